"""Sums of second moments: in blocks, of vectors; and of one-hot vectors as counts."""

import pytest
import torch
from moments import draw

from lit_compress.calibration import moments
from lit_compress.calibration.moments import Counts, Gram


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Matrices of several blocks, the last one smaller."""
    monkeypatch.setattr(moments, "BLOCK", 24)


@pytest.mark.parametrize("size", [5, 24, 25, 60])
def test_gram(size):
    gram, rows = Gram(size, torch.float64), draw(20, size)
    gram.add(rows[:7])
    gram.add(rows[7:])
    torch.testing.assert_close(gram.whole(0.5), rows.T @ rows / 2)
    assert torch.equal(gram.whole(), gram.whole().T)
    if size == 60:
        assert gram.flat.numel() == 24 * 24 + 24 * 48 + 12 * 60


def test_counts():
    """The diagonal of the second moment of one-hot vectors, and a little for tokens that do not occur."""
    counts, ids = Counts(5), torch.tensor([0, 3, 3, 1])
    counts.add(ids[:3, None])
    counts.add(ids[3:, None])
    hot = torch.nn.functional.one_hot(ids, 5).double()
    torch.testing.assert_close(counts.whole(0.25), (hot.T @ hot).diagonal() / 4 + moments.UNSEEN / 4)
