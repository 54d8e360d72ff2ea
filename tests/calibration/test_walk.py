"""States between blocks on disk. Statistics of blocks are those of a model in memory by tests/test_golden.py."""

from __future__ import annotations

import pytest
import torch
from tiny import make_batch, make_net

from lit_compress.calibration.walk import Walk, calibration_parts
from lit_compress.models.block_net import one_by_one
from lit_compress.tasks import KINDS
from lit_compress.utils.files import remove

KIND = KINDS["classification"]
SHAPES = [(4, 9, 32), (2, 7, 32)]  # of the states of the two parts


@pytest.fixture
def walk(tmp_path):
    """Seven examples in two parts before the first block of a BERT."""
    batches = [make_batch(4, 9), make_batch(3, 7, seed=2) | {"index": torch.tensor([4, 5, -1])}]
    with one_by_one(make_net("bert", num_hidden_layers=3).eval(), "cpu") as blocks:
        yield Walk(blocks, KIND, calibration_parts(KIND, batches, None), tmp_path / "states")


def test_files_have_all_copies_of_every_part(walk):
    tensors = [torch.randn(2, *shape) for shape in SHAPES]
    walk.write("gradients", 1, tensors)
    for order in (None, [1, 0, 1]):
        expected = tensors if order is None else [tensors[i] for i in order]
        read = list(walk.stored("gradients", 1, order))
        assert all(torch.equal(one, other) for one, other in zip(read, expected, strict=True))
    with pytest.raises(ZeroDivisionError):
        walk.write("states", 2, (tensor / 1 if i == 0 else 1 / 0 for i, tensor in enumerate(tensors)))
    assert not walk.path("states", 2).exists()


def test_it_goes_on_from_the_nearest_states(walk):
    walk.reach(2, keep=True)
    walk.reach(3, keep=True)
    last = list(walk.last())
    assert [state.shape for state in last] == SHAPES
    for number in (2, 3):
        remove(walk.path("states", number))
    walk.reach(3)
    assert all(torch.equal(one, other) for one, other in zip(walk.last(), last, strict=True))
    assert sorted(path.name for path in walk.folder.iterdir()) == ["states-00003"]
