"""Attention masks of transformers when the host says whether there is padding: the same outputs, and nobody looks."""

import pytest
import torch
from tiny import make_inputs, make_net
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from lit_compress.stages.micro_batches import padding_known


class Reads(TorchDispatchMode):
    """Counts the tensors whose value the host reads."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def inputs_of(padded):
    inputs = make_inputs()
    return inputs if padded else inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("family", ["bert", "deberta-v2", "modernbert", "bart", "t5", "opt", "llama", "gemma2"])
def test_the_outputs_are_those_of_transformers(family, padded):
    net, inputs = make_net(family).eval(), inputs_of(padded)
    with torch.no_grad():
        expected = net(**inputs).logits
        with padding_known(padded):
            torch.testing.assert_close(net(**inputs).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_nobody_reads_the_mask(family, padded):
    net, inputs = make_net(family, "conll2003" if family == "llama" else "sst2"), inputs_of(padded)
    with Reads() as before:
        net(**inputs)
    with padding_known(padded), Reads() as reads:
        net(**inputs)
    assert before.number > reads.number == 0


def test_transformers_is_as_before_afterwards():
    with padding_known(None):
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask
    with pytest.raises(ValueError), padding_known(True):
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_mask
        raise ValueError
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask
