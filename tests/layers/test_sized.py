"""A Linear of another size is a Linear: for this package, in an export, and for other libraries, such as peft."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from lit_compress.export.modelling import code_of
from lit_compress.layers import SizedLinear


def exported() -> type[nn.Linear]:
    """The class in the modelling file of an export."""
    names: dict[str, type[nn.Linear]] = {}
    exec(code_of("BertModel", ["sized"]), names)
    return names["SizedLinear"]


@pytest.mark.parametrize("kind", [SizedLinear, exported()])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(3, 5), (0, 5), (3, 0)])
def test_it_is_a_linear_that_draws_nothing(kind, bias, sizes):
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of an initialization of no values
        layer = kind(*sizes, bias=bias)
    assert isinstance(layer, nn.Linear) and torch.equal(torch.get_rng_state(), state)
    weight, offset = torch.randn(sizes[::-1]), torch.randn(sizes[1]) if bias else None
    made, x = kind.from_tensors(weight, offset), torch.randn(2, sizes[0])
    assert (made.in_features, made.out_features) == (layer.in_features, layer.out_features) == sizes
    assert [name for name, _ in made.named_parameters()] == ["weight", "bias"][: 1 + bias]
    torch.testing.assert_close(made(x), x @ weight.T + (0 if offset is None else offset))
