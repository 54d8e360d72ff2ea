"""The expected memory of ``factorize --by_block``."""

from __future__ import annotations

import pytest
from tiny import make_net

from lit_compress.models.shapes import without_values
from lit_compress.run import expected_memory as memory
from lit_compress.run.expected_memory import LIBRARIES
from lit_compress.run.memory_by_block import check_memory_by_block, expected_by_block, logits_by_block
from lit_compress.tasks import KINDS
from lit_compress.utils.errors import UserError

MB = 10**6


@pytest.fixture
def free(monkeypatch):
    """Return a function that sets the machine's free memory."""
    monkeypatch.setattr(memory, "resident", lambda: 0)
    return lambda size: monkeypatch.setattr(memory, "free_memory", lambda: size)


def test_two_blocks_and_the_larger_of_sums_and_training():
    assert expected_by_block(5, 3, 7) == 5 + 2 * 3 + 7
    assert expected_by_block(5, 3, 7, training=9) == 5 + 2 * 3 + 9


def test_logits_behind_the_last_block_count_where_they_are_more(free):
    free(10**12)
    few = check_memory_by_block(100 * MB, 50 * MB, 30 * MB, logits=120 * MB)
    assert "two blocks 0.1 GB" in few and "logits" not in few
    many = check_memory_by_block(100 * MB, 50 * MB, 30 * MB, logits=900 * MB)
    assert f"about {(1000 * MB + LIBRARIES) / 1e9:.1f} GB" in many and "logits 0.9 GB" in many


def test_what_does_not_fit_is_one_line(free):
    free(500 * MB)
    with pytest.raises(UserError, match="--weighting none"):
        check_memory_by_block(100 * MB, 50 * MB, 30 * MB, logits=900 * MB)


def test_only_a_vocabulary_has_logits_and_a_backward_keeps_more():
    decoder, encoder = (without_values(lambda name=name: make_net(name)) for name in ("llama", "bert"))
    texts, sentences = KINDS["language_modelling"], KINDS["classification"]
    assert logits_by_block(sentences, encoder, 10**6, 10**6) == 0
    of_two = logits_by_block(texts, decoder, 64, 0)
    assert of_two == 2 * logits_by_block(texts, decoder, 32, 0) > 0
    assert logits_by_block(texts, decoder, 64, 1000) > of_two
