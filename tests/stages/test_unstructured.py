"""First-order pruning inside a real fit: scores, zeroing, schedule, budget."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_net

from lit_compress.methods import LPAF
from lit_compress.methods.lpaf import LPAFSettings
from lit_compress.models.sites import find_sites
from lit_compress.numerics.importance import row_importance
from lit_compress.stages.unstructured import FirstOrderScore, Score, UnstructuredPruning
from lit_compress.utils.errors import UserError


def lpaf(**settings):
    return LPAF(
        backbone="unused", prune=LPAFSettings(**{"epochs": 2, "learning_rate": 1e-3, "density": 0.3, **settings})
    )


def weights(method):
    return [method.net.get_submodule(s.name).weight.detach() for s in find_sites(method.net)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_scores_equal_a_hand_made_sum(fit, dense, accumulate):
    """Invariant 21: S is the sum over optimizer steps of |g W|, gradients unclipped and whole."""
    method = lpaf(density=1.0)
    expected, before = [], []

    original = LPAF.on_before_optimizer_step

    def note(self, optimizer):  # gradients as torch sees them, before clipping, with the weights of the forward
        grads = [self.net.get_submodule(s.name).weight.grad.clone() for s in find_sites(self.net)]
        before.append((grads, [w.clone() for w in weights(self)]))
        original(self, optimizer)

    method.on_before_optimizer_step = note.__get__(method)
    fit(method, "prune", dense, gradient_clip_val=0.01, accumulate=accumulate, max_epochs=1)
    for grads, values in before:
        terms = [(g * w).abs() for g, w in zip(grads, values, strict=True)]
        expected = terms if not expected else [e + t for e, t in zip(expected, terms, strict=True)]
    assert len(before) == -(-13 // accumulate)
    assert all(torch.allclose(s, e, atol=1e-9) for s, e in zip(method.stage.scores, expected, strict=True))


def test_zeros_hold_after_every_step_and_the_budget_is_exact(fit, dense):
    """Invariants 20 and 23: pruned entries are 0 after every step, the final count is floor(vN + 1/2)."""
    density, frozen = [], []

    def look(trainer, method):
        stage, step = method.stage, trainer.global_step
        total = sum(w.numel() for w in weights(method))
        density.append(sum(int((w != 0).sum()) for w in weights(method)) / total)
        if step >= stage._start:
            for weight, score in zip(weights(method), stage.scores, strict=True):
                assert torch.count_nonzero(weight[score < stage.threshold]) == 0
        frozen.append([(w == 0, s.clone()) for w, s in zip(weights(method), stage.scores, strict=True)])

    method = fit(lpaf(interval=3), "prune", dense, look)
    for earlier, later in pairwise(frozen):  # a zero weight adds nothing to its score
        for (zero, score), (still, next_score) in zip(earlier, later, strict=True):
            assert torch.allclose(score[zero & still], next_score[zero & still], atol=1e-30)
    total = sum(w.numel() for w in weights(method))
    assert density[-1] == int(0.3 * total + 0.5) / total
    assert density[0] == 1.0 and all(a >= b - 0.02 for a, b in pairwise(density))


def test_equal_scores_do_not_exceed_the_density_once_it_is_final():
    """A few are kept while the density falls; an epoch before the last step may be the best one."""
    net, settings = make_net(), LPAFSettings(interval=100, start=0.1, end=0.5)
    stage = UnstructuredPruning(settings, 0.5, Score())
    stage.attach(net)
    stage.set_total_steps(10)
    generator = torch.Generator().manual_seed(0)
    for score in stage.scores:
        score.copy_(torch.rand(score.shape, generator=generator).mul(2000).round())
    stage.after_step(net, 5)
    assert stage.at_budget(5) and stage.status(net, 5)["density"] == 0.5


def test_scores_are_float32_for_bfloat16_weights():
    """Invariant 22."""
    stage = UnstructuredPruning(LPAFSettings(), 0.5, FirstOrderScore())
    stage.attach(make_net().bfloat16())
    assert {score.dtype for score in stage.scores} == {torch.float32}


def test_schedule_is_longer_than_training():
    stage = UnstructuredPruning(LPAFSettings(start=0.9, end=0.05), 0.5, Score())
    with pytest.raises(UserError, match=r"leave no step of total=1 "):
        stage.set_total_steps(1)


def test_at_budget_only_after_the_ramp():
    stage = UnstructuredPruning(LPAFSettings(start=0.1, end=0.3), 0.5, Score())
    stage.set_total_steps(100)
    assert [stage.at_budget(step) for step in (0, 69, 70, 100)] == [False, False, True, True]
    assert stage.target(10) == 1.0 and stage.target(70) == 0.5 and stage.target(40) == pytest.approx(0.5625)


def test_artefact_holds_the_importances(fit, dense, tmp_path):
    method = fit(lpaf(), "prune", dense)
    out = tmp_path / "out"
    out.mkdir()
    method.stage.finish(method.net, out)
    sites, rows = [s.name for s in find_sites(method.net)], load_file(out / "importance.safetensors")
    for name, score, weight in zip(sites, method.stage.scores, weights(method), strict=True):
        assert torch.equal(rows.pop(f"{name}/scores"), row_importance(score, weight))
    assert not rows


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"density": 0.0}, "prune.density: 0.0 is not in"),
        ({"density": 1.5}, "nearest valid 1.0"),
        ({"start": 0.6, "end": 0.4}, "0.6 \\+ 0.4 leave no step"),
        ({"start": 1.5}, "prune.start: 1.5 is neither .* nearest valid 2"),
        ({"start": float("inf")}, "prune.start: inf is neither .* nearest valid 0.1"),
        ({"end": float("nan")}, "prune.end: nan is neither"),
        ({"interval": 0}, "prune.interval: 0 is below 1"),
        ({"epochs": 0}, "epochs: 0 is below 1"),
        ({"learning_rate": -1.0}, "learning_rate: -1.0 is not above 0"),
    ],
)
def test_bad_settings_are_one_line(settings, words):
    with pytest.raises(UserError, match=words):
        LPAFSettings(**settings)
