"""Packed texts have the states of single ones, in compressed models as well, or are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import make_net

from lit_compress.export.mixed import RESULT, Packed, packed


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra"])
def test_their_states_are_those_of_single_texts(family):
    net, lengths = make_net(family, initializer_range=0.2).eval(), np.array([3, 8, 5])
    row = {name: torch.as_tensor(value) for name, value in packed(lengths, 12, net.config.vocab_size).items()}
    assert row["input_ids"].shape == (1, 24) and row["starts"].tolist() == [0, 3, 11, 16, 24]
    with torch.inference_mode():
        texts = row["input_ids"].split(row["starts"].diff().tolist(), 1)
        alone = [net.base_model(input_ids=text).last_hidden_state[0] for text in texts]
        found = Packed(net, 12)(**row)[RESULT]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["mpnet", "deberta-v2", "llama", "modernbert"])
def test_other_attention_is_refused(family):
    """Relative positions, causal attention, and windows, which only a long text shows."""
    with pytest.raises(LookupError, match="it reads no packed texts: "):
        Packed(make_net(family, initializer_range=0.2).eval(), 64)
