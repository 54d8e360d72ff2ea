"""Magnitude, first-order and PLATON pruning: what each ranks by, inside a fit."""

from __future__ import annotations

import pytest
import torch

from lit_compress.methods import PLATON, Magnitude
from lit_compress.methods.platon import ConfidenceSettings
from lit_compress.models.sites import find_sites
from lit_compress.numerics.masks import keep_count
from lit_compress.stages.unstructured import Unstructured, UnstructuredPruning
from lit_compress.utils.errors import UserError

SHORT = {"epochs": 2, "learning_rate": 1e-3, "start": 0.2}


def weights(method):
    return [method.net.get_submodule(s.name).weight.detach() for s in find_sites(method.net)]


def make(name, density=0.3, **settings):
    ranking = ConfidenceSettings if name is PLATON else Unstructured
    return name(backbone="unused", density=density, prune=ranking(**{**SHORT, **settings}))


def test_magnitude_keeps_the_largest(fit, dense, monkeypatch):
    """Spec 5.1: whenever the weights are ranked, the kept ones are the largest of those the step left."""
    original, checked = UnstructuredPruning.after_step, []

    def look(self, net, step):
        before = [w.detach().clone() for w in self._weights]
        original(self, net, step)
        if step % 5 == 0 and step >= self._start:
            values = torch.cat([w.abs().flatten() for w in before])
            limit = values.sort(descending=True).values[keep_count(self.target(step), len(values)) - 1]
            for old, new in zip(before, self._weights, strict=True):
                assert torch.equal(new, old * (old.abs() >= limit))
            checked.append(self.target(step))

    monkeypatch.setattr(UnstructuredPruning, "after_step", look)
    fit(make(Magnitude, interval=5), "prune", dense)
    assert len(checked) == 5 and checked[0] == 1.0 and checked[-1] == 0.3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_platon_scores_equal_a_hand_made_average(fit, dense, accumulate):
    """Spec 2.2: w after the step and before zeroing, clipped gradient; windows of 2; Ibar before Ubar."""
    seen, method = [], make(PLATON, interval=2, beta2=0.9, start=0.4)
    original = method.stages()[1].__class__.after_step

    def note(self, net, step):
        seen.append([(w.detach() * w.grad).abs() for w in self._weights])
        assert sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None) ** 0.5 < 0.0101
        original(self, net, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_compress.stages.unstructured.UnstructuredPruning.after_step", note)
        fit(method, "prune", dense, gradient_clip_val=0.01, accumulate=accumulate, max_steps=6)
    average = [torch.zeros_like(w) for w in seen[0]]
    uncertainty = [torch.zeros_like(w) for w in seen[0]]
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        means = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        average = [0.85 * a + 0.15 * m for a, m in zip(average, means, strict=True)]
        uncertainty = [0.9 * u + 0.1 * (m - a).abs() for u, m, a in zip(uncertainty, means, average, strict=True)]
    for score, i, u in zip(method.stage.scores, average, uncertainty, strict=True):
        close = torch.isclose(score, i * u, rtol=1e-4, atol=1e-12)
        assert close.float().mean() > 0.999  # a tie at the threshold may have been lowered


def test_platon_needs_a_window_before_it_ranks():
    stage = make(PLATON, interval=10, start=0.05).stages()[1]
    with pytest.raises(UserError, match=r"prune.start: 5 steps are fewer than the 10 of prune.interval"):
        stage.set_total_steps(100)
    stage.set_total_steps(200)
