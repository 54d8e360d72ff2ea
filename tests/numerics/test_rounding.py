"""Weights on the grid of 4-bit integers: a loop over groups, and NNCF's own numbers."""

import numpy as np
import pytest
import torch

from lit_compress.numerics.rounding import rounded


def naive(weight: torch.Tensor, group: int) -> torch.Tensor:
    made = weight.clone()
    for row in made:
        for start in range(0, len(row), group):
            part = row[start : start + group]
            farthest = max(part.tolist(), key=lambda v: (abs(v), v < 0))
            scale = farthest / -8 or 1.0
            row[start : start + group] = torch.tensor(
                [scale * min(7, max(-8, round(v / scale))) for v in part.tolist()]
            )
    return made


@pytest.mark.parametrize("group", [4, 16])
def test_every_group_has_a_scale(group: int) -> None:
    weight = torch.randn(3, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight[0, :16], weight[1, :4] = 0.0, torch.tensor([-1.0, 1.0, 0.3, 0.0])  # a group of zeros; two that are farthest
    made = rounded(weight, group)
    assert torch.allclose(made, naive(weight, group), atol=1e-12) and not torch.equal(made, weight)
    assert torch.allclose(rounded(made, group), made, atol=1e-12)
    assert all(len(part.unique()) <= 16 for part in made.unflatten(1, (-1, group)).flatten(0, 1))


def test_nncf_has_the_same_grid() -> None:
    nncf, openvino = pytest.importorskip("nncf"), pytest.importorskip("openvino")
    opset = openvino.opset13
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    given = opset.parameter([1, 64], np.float32)
    product = opset.matmul(given, opset.constant(weight.numpy()), False, True)
    program = openvino.Model([product], [given])
    mode = nncf.CompressWeightsMode.INT4_SYM
    program = nncf.compress_weights(program, mode=mode, group_size=32, ratio=1.0, all_layers=True)
    call = openvino.compile_model(program, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    answers = torch.stack([torch.from_numpy(call(row[None].numpy())[0])[0] for row in torch.eye(64)], 1)
    assert torch.allclose(answers, rounded(weight, 32), atol=2e-3)  # scales have 16 bits in the program
