"""Scores and windows do not move in a step whose gradients are not finite."""

from __future__ import annotations

import pytest
import torch
from test_finite_steps import FiniteSteps, Poison

from lit_compress import methods

CASES = {
    "LPAF": {},
    "PLATON": {"interval": 5, "start": 0.5},
    "LoSparse": {"interval": 10},
    "LoSparse-before": {"interval": 10, "score_point": "before"},
}


@pytest.mark.parametrize("case", CASES)
def test_scores_stay(case, fit, dense):
    kind = getattr(methods, case.split("-")[0])
    settings = type(kind(task="sst2", backbone="unused").prune)
    prune = settings(epochs=1, learning_rate=1e-3, **CASES[case])
    method = kind(task="sst2", backbone="unused", density=0.5, prune=prune)
    seen = []

    def look(trainer, method):
        seen.append({n: b.detach().clone() for n, b in method.stage.named_buffers() if b.numel()})

    fit(method, "prune", dense, look, teacher=dense, callbacks=[Poison(4), FiniteSteps(3)])
    assert any(not torch.equal(seen[1][n], seen[2][n]) for n in seen[1])
    assert not [n for n in seen[2] if not torch.equal(seen[2][n], seen[3][n])]
