"""Batches as a user's files give them."""

from itertools import chain

import pytest
import torch
from lightning.pytorch import Trainer
from tiny import write_backbone, write_rows

from lit_compress.data.batching import held_out
from lit_compress.data.datamodule import DataModule
from lit_compress.models.backbones import load_net
from lit_compress.tasks import task_type
from lit_compress.utils.errors import UserError


@pytest.fixture
def make(sst2, backbone):
    def build(**options):
        return DataModule(**{"task": "sst2", "backbone": backbone, "path": str(sst2), "batch_size": 4, **options})

    return build


def _rows(loader):
    return sorted(row for batch in loader for row in batch["index"].tolist())


def test_a_batch_is_what_the_tokenizer_makes_of_its_rows(make):
    dm = make()
    batch = next(iter(dm.train_dataloader()))
    assert {name: tensor.dtype for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids", "labels", "index"), torch.int64
    )
    rows = dm._split("train").rows[batch["index"].tolist()]
    expected = dm.tokenizer(rows["sentence"], padding=True, return_tensors="pt")
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name], expected[name]), name
    assert batch["labels"].tolist() == rows["label"]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_text_without_tokens_is_read_alike_in_every_batch(family, tmp_path):
    """As tokenizers without special tokens make of an empty one: alone it would be no input of a model."""
    folder = str(write_backbone(tmp_path / family, family, "sst2", num_hidden_layers=2))
    rows = [{"sentence": text, "label": 1} for text in ("the film", "", "dull plot so poor", "")]
    data = write_rows(tmp_path / "data", train=rows, validation=rows)
    found = []
    for size in (1, 3, 4):
        module = DataModule("sst2", folder, str(data), eval_batch_size=size)
        net, outputs = load_net(folder, module.record).eval(), {}
        for batch in module.val_dataloader()[0]:
            logits = task_type(module.record).outputs(net, batch, module.tokenizer)
            outputs |= dict(zip(batch["index"].tolist(), logits, strict=True))
        found.append(torch.stack([outputs[row] for row in range(4)]).detach())
    assert found[0].isfinite().all() and found[0][1].equal(found[0][3])
    for others in found[1:]:
        torch.testing.assert_close(others, found[0])


def test_every_row_once_and_a_new_order_each_epoch(make):
    loader = make().train_dataloader()
    first, second = ([batch["index"].tolist() for batch in loader] for _ in range(2))
    assert first != second and sorted(chain(*first)) == sorted(chain(*second)) == list(range(37))
    assert len(loader) == len(first) == make().steps_per_epoch() == 10
    halved = make()
    halved.devices = 2
    assert halved.steps_per_epoch() == 5 and halved.global_batch == 8


def test_both_validation_splits_of_mnli(tmp_path, backbone):
    for split in ("train", "validation_matched", "validation_mismatched"):
        (tmp_path / f"{split}.tsv").write_text("premise\thypothesis\tlabel\na\tb\tneutral\n")
    assert len(DataModule("mnli", backbone, str(tmp_path)).val_dataloader()) == 2
    drawn = DataModule("mnli", backbone, str(tmp_path), validation_examples=1)
    assert [_rows(loader) for loader in drawn.val_dataloader()] == [[0]] * 2
    (tmp_path / "validation_mismatched.tsv").unlink()
    assert len(DataModule("mnli", backbone, str(tmp_path)).val_dataloader()) == 1


def test_drawn_examples_are_seeded_and_nested(make):
    def texts(**options):
        dm = make(**options)
        dm.setup("fit")
        return dm._split("train").rows["sentence"][:]

    assert texts(train_examples=9) == texts(train_examples=9)
    assert texts(train_examples=9) != texts(train_examples=9, seed=1)
    assert all(text in texts(train_examples=9) for text in texts(train_examples=5))
    assert texts(train_examples=37) == texts()


def test_drawn_validation_examples_are_nested_and_those_of_every_seed(make):
    def rows(**options):
        dm = make(**options)
        [loader] = dm.val_dataloader()
        found = loader.dataset.rows
        assert _rows(loader) == list(range(len(found)))
        return list(zip(found["sentence"][:], found["label"][:], strict=True))

    every, five = rows(), rows(validation_examples=5)
    assert len(five) == 5 and five != every[:5]
    assert five == rows(validation_examples=5, seed=1, train_examples=9, batch_size=3)
    rest = iter(every)
    assert all(row in rest for row in five)  # in the order of the file
    assert all(row in five for row in rows(validation_examples=3))
    assert rows(validation_examples=11) == every


def test_a_sample_of_dev_rows_is_drawn_and_the_same_for_every_seed(make):
    """They were the longest: evaluation reads rows by falling length."""

    def drawn(**options):
        dm = make(eval_batch_size=2, **options)
        loader = dm.sample_dataloader(5)
        ids = {tuple(row["input_ids"]) for row in loader.dataset.encoded}
        every = [tuple(row["input_ids"]) for row in dm.val_dataloader()[0].dataset.encoded]
        assert len(loader.dataset) == 5 and ids == {every[row] for row in dm.sample(5)}
        return dm.sample(5), sorted(every, key=len)[-5:], ids

    numbers, longest, ids = drawn()
    assert not set(longest) <= ids and numbers not in (list(range(5)), list(range(6, 11)))
    assert drawn(seed=1, batch_size=3)[0] == numbers == sorted(set(numbers))
    assert make().sample(512) == list(range(11))


def test_validation_examples_are_those_of_fit_and_validate_alone(make, sst2):
    """The test split stays whole; predict takes what it goes through whole unless it is given the option."""
    dm = make(validation_examples=4)
    dm.setup("fit")
    assert dm.train_size() == 37 and len(dev := dm.val_dataloader()[0].dataset.rows) == 4
    assert dm.predict_dataloader().dataset.rows["sentence"][:] == dev["sentence"][:]
    assert _rows(dm.predict_dataloader()) == list(range(4)) and len(make().predict_dataloader().dataset.rows) == 11
    (sst2 / "test.tsv").write_text((sst2 / "validation.tsv").read_text())
    dm = make(validation_examples=4)
    assert _rows(dm.test_dataloader()) == _rows(dm.predict_dataloader()) == list(range(11))


def test_predict_prefers_test_and_needs_no_labels(make, sst2):
    dm = make()
    [index] = [batch["index"] for batch in dm.predict_dataloader()]
    assert sorted(index.tolist()) == list(range(11)) and len(dm.predict_dataloader().dataset.rows) == 11
    (sst2 / "test.tsv").write_text("sentence\nthe film\ngood\nwas the film bad\n")
    dm = make()
    [batch] = dm.predict_dataloader()
    assert "labels" not in batch
    rows = dm.predict_dataloader().dataset.rows
    texts = [rows[row]["sentence"] for row in batch["index"].tolist()]
    assert texts == ["was the film bad", "the film", "good"]
    with pytest.raises(UserError, match="only predict reads such rows, and factorize by SecondOrder, SVD or"):
        dm.test_dataloader()


def test_predict_does_not_read_the_other_files(make, sst2):
    (sst2 / "train.tsv").unlink()
    assert len(make().predict_dataloader()) == 1 and len(make().val_dataloader()) == 1


def test_fingerprint_follows_content_and_order(make, sst2):
    first = make().fingerprint()
    assert first == make(num_workers=1, eval_batch_size=3).fingerprint()
    changed = [make(seed=1), make(batch_size=5), make(max_length=6), make(train_examples=9)]
    changed.append(make(validation_examples=9))
    prints = {first, *(dm.fingerprint() for dm in changed)}
    (sst2 / "validation.tsv").write_text("sentence\tlabel\nthe film\t1\n")
    assert len(prints | {make().fingerprint()}) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "sst3"}, "data.task: unknown task 'sst3'; did you mean 'sst2'?"),
        ({"batch_size": 0}, "data.batch_size: 0 is too small; the smallest is 1"),
        ({"max_length": 3}, "data.max_length: 3 is too small; the smallest is 4"),
        ({"max_length": 33}, "data.max_length: 33 is more than"),
        ({"train_examples": 38}, "data.train_examples: 38 is more than there are; the largest is 37"),
        ({"validation_examples": 12}, "data.validation_examples: 12 is more than there are; the largest is 11"),
        ({"backbone": "/nowhere"}, "model.backbone: no folder '/nowhere'"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_line(make, options, message):
    with pytest.raises(UserError) as caught:
        make(**options).train_dataloader()
    assert str(caught.value).startswith(message)


def test_length_limits(make):
    assert make().max_length == 32  # the task has 128, the backbone reads 32
    assert max(batch["input_ids"].shape[1] for batch in make(max_length=6).train_dataloader()) == 6


def _on_rank(dm, rank, world_size=2):
    dm.trainer = type("Trainer", (), {"global_rank": rank, "world_size": world_size, "overfit_batches": 0})()
    return dm


def test_overfit_batches_is_refused(make):
    dm = _on_rank(make(), 0)
    dm.trainer.overfit_batches = 2
    with pytest.raises(UserError, match=r"trainer.overfit_batches: 2 .* data.train_examples"):
        dm.val_dataloader()


def test_two_ranks_share_the_rows(make):
    modules = [_on_rank(make(eval_batch_size=3), rank) for rank in (0, 1)]
    train = [list(dm.train_dataloader()) for dm in modules]
    assert len(train[0]) == len(train[1]) == 5 and all(batch["index"].min() >= 0 for batch in train[0] + train[1])
    assert {row for dm in modules for row in _rows(dm.train_dataloader())} == set(range(37))
    evaluated = sorted(row for dm in modules for row in _rows(dm.val_dataloader()[0]))
    assert evaluated == [-1, *range(11)]  # 11 rows, 2 ranks: one copy, marked


def test_held_out_rows_are_a_function_of_data_and_seed_and_take_the_place_of_the_dev_set_in_a_trainer(make):
    def split(**options):
        dm = make(**options)
        dm.setup("fit")
        return dm, [list(dm._split(name).rows["sentence"]) for name in ("train", "held_out")]

    def sentences(dm):
        return list(dm.val_dataloader()[0].dataset.rows["sentence"])

    whole, dm = make(), split(hold_out=7)[0]
    whole.setup("fit")
    kept, held = split(hold_out=7)[1]
    assert (len(kept), len(held)) == (30, 7)
    assert [kept, held] == split(hold_out=7)[1] != split(hold_out=7, seed=1)[1]
    assert dm.contents == split(hold_out=7, seed=1)[0].contents != {}
    assert sorted(kept + held) == sorted(whole._split("train").rows["sentence"])
    assert split(hold_out=7, train_examples=5)[1][1] == held and dm.fingerprint() != make().fingerprint()
    assert sentences(dm) == sentences(whole)
    dm.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert sentences(dm) == held
    assert _rows(dm.val_dataloader()[0]) == list(range(7))
    with pytest.raises(UserError, match="hold_out: 37 of 37 training rows leaves none; the largest is 36"):
        make(hold_out=37).setup("fit")
    first, *rest = held_out(10, 4, 0, one_text=True)[1]
    assert rest == [first + 1, first + 2, first + 3]
