"""The kind of removal that is chosen: the one that changes the answers least among those that can be done."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lit_compress.run import trials as module
from lit_compress.run.trials import _try, choose_removal
from lit_compress.utils.errors import UserError


def job_of(**budget):
    method = SimpleNamespace(
        budget=SimpleNamespace(**budget) if budget else None, given={"density": 0.5}, density=0.5, task=None
    )
    job = SimpleNamespace(method=method, kinds=("structures", "components"), data=None)
    job.at = lambda *_, **__: job
    return job


def choose(monkeypatch, *found):
    left = iter(found)
    monkeypatch.setattr(module, "_try", lambda *_: next(left))
    return choose_removal(None, job_of())[0]


def done(density, divergence):
    return {"density": density, "divergence": divergence}


@pytest.mark.parametrize(("first", "second", "best"), [(0.2, 0.1, "components"), (0.1, 0.2, "structures")])
def test_the_least_divergence_is_chosen(first, second, best, monkeypatch):
    chosen = choose(monkeypatch, done(0.5, first), done(0.4, second))
    assert chosen["removes"] == best and chosen["density"] == (0.5 if first < second else 0.4)
    assert [trial["removes"] for trial in chosen["tried"] if trial["chosen"]] == [best]


def test_what_cannot_be_done_is_not_chosen(monkeypatch):
    chosen = choose(monkeypatch, {"why": "no heads"}, done(0.4, 0.2))
    assert chosen["removes"] == "components" and chosen["tried"][0]["round_to"] == 1
    with pytest.raises(UserError, match="no ranks"):
        choose(monkeypatch, {"why": "no heads"}, {"why": "no ranks"})


def test_a_speed_that_no_density_was_timed_for_is_not_tried_further(monkeypatch):
    monkeypatch.setattr(module, "_stage", lambda *_: SimpleNamespace(compression=None))
    monkeypatch.setattr(module, "measure", lambda *_: None)
    monkeypatch.setattr(module, "search_speed", lambda *_: (None, {}))
    found = _try("structures", None, job_of(value=3.0), object(), None, {})
    assert found == {"why": "reaches 1x of 3x"}
