"""The order of batches as a function, and the loader's position through a real Trainer."""

import itertools
from collections import Counter

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset

from lit_compress.data.batching import BatchOrder, ResumableLoader, batch_order, step_order

LENGTHS = torch.randint(3, 60, (503,), generator=torch.Generator().manual_seed(0)).tolist()


SPLITS = [(8, 1, 1), (4, 1, 2), (4, 2, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8)]  # rows, micro-batches, ranks: 8 a step


def _dealt(split, size):
    """Return the shares of all ranks in every step of an epoch."""
    rows, _, ranks = split
    orders = [BatchOrder(LENGTHS[:size], rows, 5, rank, ranks, size=8) for rank in range(ranks)]
    return list(zip(*orders, strict=True))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 503])
def test_one_rank_sees_every_row_once(shuffle, size):
    batches = (step_order if shuffle else batch_order)(LENGTHS[:size], 4)
    assert sorted(itertools.chain(*batches)) == list(range(size))
    assert Counter(map(len, batches)) == Counter([4] * (size // 4) + [size % 4] * (size % 4 > 0))


@pytest.mark.parametrize("size", [1, 3, 8, 503])
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_makes_the_steps_of_the_global_batch(split, size):
    """A rank or a micro-batch without a row of the last, smaller step has a copy that does not count."""
    steps = _dealt(split, size)
    expected = step_order(LENGTHS[:size], 8, seed=5)
    if split == (8, 1, 1):
        assert [share for (share,) in steps] == expected
        return
    assert [sorted(row for share in shares for row in share.own if row >= 0) for shares in steps] == [
        sorted(rows) for rows in expected
    ]
    for shares in steps:
        assert len({share.parts for share in shares}) == 1 and len({tuple(share.rows) for share in shares}) == 1
        for share in shares:
            real = [row for row in share.own if row >= 0]
            assert share.parts <= split[1] and len(real) <= split[0] * split[1]
            assert len(share.own) == max(len(real), share.parts)  # a copy is alone in its micro-batch
            assert -(-len(share.own) // share.parts) <= split[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_evaluation_marks_what_only_fills_up(world_size):
    ranks = [batch_order(LENGTHS, 4, rank, world_size) for rank in range(world_size)]
    assert len({tuple(map(len, batches)) for batches in ranks}) == 1
    numbers = [number for batches in ranks for batch in batches for number in batch]
    assert sorted(number for number in numbers if number >= 0) == list(range(503))
    copies = [number for number in numbers if number < 0]
    assert len(copies) == -503 % world_size and all(0 <= ~number < 503 for number in copies)


def test_order_depends_on_seed_and_epoch_alone():
    first = step_order(LENGTHS, 4, seed=1, epoch=2)
    assert first == step_order(LENGTHS, 4, seed=1, epoch=2)
    others = [step_order(LENGTHS, 4, seed=seed, epoch=epoch) for seed, epoch in ((1, 3), (2, 2), (2, 1), (0, 3))]
    assert all(first != other for other in others)


def test_batches_of_a_small_set_are_new_every_epoch():
    first, second = (step_order(LENGTHS[:40], 4, epoch=epoch) for epoch in (0, 1))
    assert not {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}


def test_little_padding_and_no_order_of_lengths():
    batches = step_order(LENGTHS, 4, seed=3)
    padded = sum(len(batch) * max(LENGTHS[row] for row in batch) for batch in batches)
    assert padded < 1.15 * sum(LENGTHS)
    longest = [max(LENGTHS[row] for row in batch) for batch in batches]
    assert longest != sorted(longest) and longest[0] != max(LENGTHS)
    evaluated = batch_order(LENGTHS, 4)
    assert max(LENGTHS) == LENGTHS[evaluated[0][0]]


class _Rows(Dataset):
    def __getitem__(self, rows):
        return torch.tensor(rows)


def _loader(size=22, batch_size=4, workers=0, shuffle=True):
    order = BatchOrder(LENGTHS[:size], batch_size, seed=5, shuffle=shuffle)
    return ResumableLoader(_Rows(), sampler=order, batch_size=None, num_workers=workers, generator=torch.Generator())


def _epoch(epoch, size=22):
    return step_order(LENGTHS[:size], 4, seed=5, epoch=epoch)


def _lists(batches):
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_position_counts_what_was_handed_out_and_is_restored(workers):
    loader = _loader(workers=workers)
    iterator = iter(loader)
    assert _lists(itertools.islice(iterator, 2)) == _epoch(0)[:2]
    state = loader.state_dict()
    assert state == {"epoch": 0, "batch": 2}  # the workers are further by now
    other = _loader(workers=workers)
    other.load_state_dict(state)
    assert len(other) == 6 and other.state_dict() == state
    rest = iter(other)
    assert next(rest).tolist() == _epoch(0)[2]
    assert other.state_dict() == {"epoch": 0, "batch": 3}  # so that a resumed run can be resumed
    assert _lists(rest) == _epoch(0)[3:]
    assert other.state_dict() == {"epoch": 1, "batch": 0}
    assert _lists(other) == _epoch(1) and _lists(other) == _epoch(2)


def test_at_the_end_of_an_epoch_nothing_of_it_is_left():
    loader = _loader()
    loader.load_state_dict({"epoch": 3, "batch": 6})
    assert _lists(loader) == [] and _lists(loader) == _epoch(4)


def test_the_epoch_may_be_set_after_the_iterator_was_asked_for():
    loader = _loader()
    iterator = iter(loader)
    loader.sampler.set_epoch(4)
    assert _lists(iterator) == _epoch(4)
    loader.load_state_dict({"epoch": 1, "batch": 2})
    loader.sampler.set_epoch(1)
    assert _lists(loader) == _epoch(1)[2:]
    loader.load_state_dict({"epoch": 1, "batch": 2})
    loader.sampler.set_epoch(2)
    assert loader.state_dict() == {"epoch": 2, "batch": 0} and _lists(loader) == _epoch(2)


class _Recorder(LightningModule):
    """Trains one weight and keeps the batches it saw."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def training_step(self, batch, _):
        self.seen.append((self.current_epoch, batch.tolist()))
        return (self.weight - batch.float().mean()).square().sum()

    def validation_step(self, batch, _):
        self.log("size", float(len(batch)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return _loader(workers=0)

    def val_dataloader(self):
        return [_loader(size=9, shuffle=False)]


def _run(folder, checkpoint=None, callbacks=()):
    module = _Recorder()
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=list(callbacks), use_distributed_sampler=False,
        enable_checkpointing=bool(callbacks), max_epochs=3, val_check_interval=2,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
    return module


@pytest.mark.filterwarnings("ignore")
def test_resumed_runs_see_the_batches_of_an_unbroken_one(tmp_path):
    """From every checkpoint: in an epoch, at the last batch of one, and at its end."""
    step = ModelCheckpoint(tmp_path, "step-{step}", every_n_train_steps=1, save_top_k=-1)
    end = ModelCheckpoint(tmp_path, "end-{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    whole = _run(tmp_path, callbacks=[step, end])
    assert whole.seen == [(epoch, batch) for epoch in range(3) for batch in _epoch(epoch)]
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == 21
    for file in checkpoints[::2]:
        loops = torch.load(file, weights_only=True)["loops"]["fit_loop"]
        done = loops["epoch_loop.batch_progress"]["total"]["processed"]
        resumed = _run(tmp_path, checkpoint=str(file))
        assert resumed.seen == whole.seen[done:], file.name
        assert torch.equal(resumed.weight, whole.weight), file.name
