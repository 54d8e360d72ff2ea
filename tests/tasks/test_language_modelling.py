"""Plain text: every token is predicted exactly once, whatever the blocks and batches; a whole run."""

import json
import math

import pytest
import torch
from mistakes import fails
from tiny import write_backbone, write_texts

from lit_compress.data import settings
from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.models.backbones import load_net
from lit_compress.tasks import KINDS, base
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

KIND, TASK = KINDS["language_modelling"], get_task("plain_text")


@pytest.fixture(scope="module", params=["opt", "llama"])
def backbone(request, tmp_path_factory):
    return str(write_backbone(tmp_path_factory.mktemp(request.param), request.param, "plain_text"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"), shortest=0)


def tokens_of(data, file):
    return [data.tokenizer.bos_token_id, *data.tokenizer(file.read_text(), add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("length", [4, 7, 16, 64])
def test_blocks_are_the_text(length, backbone, texts):
    data = DataModule("plain_text", backbone, str(texts), max_length=length)
    data.setup("fit")
    for split in ("train", "validation"):
        blocks = data._split(split).encoded
        tokens = tokens_of(data, texts / f"{split}.txt")
        assert [t for block in blocks["input_ids"] for t in block] == tokens[:-1]
        assert [t for block in blocks["labels"] for t in block] == tokens[1:]
        assert all(n == length for n in blocks["length"][:-1]) and 0 < blocks["length"][-1] <= length


def test_kinds_of_texts_are_read_apart_and_drawn_in_turns(backbone, texts, tmp_path):
    """Files whose names differ by more than a number; the parts of one kind are one text."""
    lines = (texts / "train.txt").read_text().splitlines(keepends=True)
    (tmp_path / "train").mkdir()
    (tmp_path / "validation.txt").write_text("".join(lines[:9]))
    for number in range(2):
        (tmp_path / "train" / f"wiki-{number}.txt").write_text("".join(lines[20 * number : 20 * (number + 1)]))
    data = DataModule("plain_text", backbone, str(tmp_path), max_length=4)
    assert base.KIND not in data.train_tokens().column_names
    (tmp_path / "train" / "news.txt").write_text("".join(lines[40:55]))
    data = DataModule("plain_text", backbone, str(tmp_path), max_length=4, train_examples=20)
    assert data.train_tokens()[base.KIND].count(0) == 10
    data = DataModule("plain_text", backbone, str(tmp_path), max_length=4)
    tokens = data.train_tokens()
    news = [t for ids, kind in zip(tokens["input_ids"], tokens[base.KIND], strict=True) if not kind for t in ids]
    assert news == tokens_of(data, tmp_path / "train" / "news.txt")[:-1]
    assert base.KIND not in next(iter(data.train_dataloader()))
    drawn = [[tokens[i][base.KIND] for i in data._order(tokens, seed)] for seed in (0, 1)]
    few = tokens[base.KIND].count(0)
    assert all(sorted(kinds[i : i + 2]) == [0, 1] for kinds in drawn for i in range(0, 2 * few, 2))
    assert data._order(tokens, 0)[:20] != data._order(tokens, 1)[:20]
    data = DataModule("plain_text", backbone, str(tmp_path), max_length=4, hold_out=8)
    data.setup("fit")
    held = data._splits["held_out", True].rows
    assert held[base.KIND] == [0] * 4 + [1] * 4 and held["text"][:4] in [lines[40 + i : 44 + i] for i in range(12)]
    with pytest.raises(UserError, match="hold_out: 30 leaves none of a kind of 15 rows; nearest: 28"):
        DataModule("plain_text", backbone, str(tmp_path), hold_out=30).setup("fit")


def test_kinds_may_have_several_formats_also_next_to_a_folder(backbone, texts, tmp_path):
    """Not hidden files; a file of all next to a folder of kinds is one too many."""
    lines = (texts / "train.txt").read_text().splitlines()
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        for kind, some in (("wiki.txt", lines[:20]), ("news.jsonl", [json.dumps({"text": x}) for x in lines[20:30]])):
            (tmp_path / split / kind).write_text("\n".join(some) + "\n")
        (tmp_path / split / "._wiki.txt").write_bytes(b"\x00\x05\x16")
    data = DataModule("plain_text", backbone, str(tmp_path), max_length=4)
    data.setup("fit")
    for split in ("train", "validation"):
        assert [data._splits[split, True].rows[base.KIND].count(kind) for kind in (0, 1)] == [10, 20]
    (tmp_path / "train.txt").write_text("one\n")
    with pytest.raises(UserError, match=r"holds train\.txt and the folder train, both could be 'train'; leave one"):
        DataModule("plain_text", backbone, str(tmp_path)).setup("fit")


def test_perplexity_is_that_of_the_whole_text(backbone, texts):
    """Blocks that fit the whole text: exp of the mean of the library's own loss; smaller batches change nothing."""
    net = load_net(backbone, TASK).eval()
    data = DataModule("plain_text", backbone, str(texts), max_length=64)
    tokens = torch.tensor(tokens_of(data, texts / "validation.txt"))
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 64):
            block = tokens[start : start + 65]
            scores = net(input_ids=block[None, :-1]).logits[0].log_softmax(-1)
            total -= float(scores[torch.arange(len(block) - 1), block[1:]].double().sum())
    expected = math.exp(total / (len(tokens) - 1))
    for size in (1, 2, 100):
        data = DataModule("plain_text", backbone, str(texts), max_length=64, eval_batch_size=size)
        assert evaluate(net, data) == {"val/perplexity": pytest.approx(expected, rel=1e-5)}


@pytest.mark.parametrize(
    ("family", "task", "option"), [("llama", "plain_text", "max_length"), ("bart", "xsum", "target_length")]
)
def test_batches_are_bounded_by_their_logits(family, task, option, texts, tmp_path, monkeypatch):
    """Tokens x vocabulary, so that batches stay as they are if texts are short or the vocabulary is small.

    Texts are written without the logits of whole texts.
    """
    backbone, writes = str(write_backbone(tmp_path, family, task)), task == "xsum"
    data = DataModule(task, backbone, str(texts), batch_size=8, **{option: 10})
    assert data.eval_rows == 64 and data.fewer(8) == 8
    monkeypatch.setattr(settings, "LOGITS_CPU", 10 * len(data.tokenizer) * 3 + 1)
    assert data.eval_rows == (64 if writes else 3) and data.fewer(8) == 3
    if not writes:
        assert [len(batch["index"]) for batch in data.val_dataloader()[0]][:-1].count(3) >= 2
        steps = [(len(batch["index"]), batch["parts"]) for batch in data.train_dataloader()]
        assert (8, 3) in steps and all(parts == -(-rows // 3) for rows, parts in steps)
        assert data.split == [8, 1, 1] and data.train_dataloader().largest == (3, 10)
        assert max(len(batch["index"]) for batch in data.calibration_dataloader()) == 3
    data.eval_batch_size = 2
    assert data.eval_rows == 2 and data.fewer(2) == 2
    monkeypatch.setattr(settings, "LOGITS_CPU", 1)
    assert data.fewer(8) == 1


def test_examples_are_blocks_of_the_whole_text(backbone, texts):
    """What is drawn of a split are its blocks, not lines that never followed each other."""

    def blocks(split, **options):
        data = DataModule("plain_text", backbone, str(texts), max_length=7, **options)
        data.setup("fit")
        return data._split(split).encoded["input_ids"][:], data

    for split, option in (("train", "train_examples"), ("validation", "validation_examples")):
        (whole, _), (some, data), (other, more) = (blocks(split, **{option: n} if n else {}) for n in (0, 3, 4))
        assert len(some) == 3 and len(other) == 4 and all(block in whole for block in some)
        assert data.fingerprint() != more.fingerprint()
        with pytest.raises(UserError, match=f"data.{option}: 1000 is more than there are; the largest is {len(whole)}"):
            blocks(split, **{option: 1000})
    assert blocks("train", train_examples=3)[1].train_size() == 3
    assert blocks("train", train_examples=3)[0] != blocks("train", train_examples=3, seed=1)[0]


def test_rows_end_with_a_line_end():
    """As they do on the hub (wikitext) and in text files; one that does not gets one."""

    class Letters:
        bos_token_id = None

        def __call__(self, text, **_):
            return {"input_ids": [ord(letter) for letter in text]}

    found = KIND.encode({"text": ["ab\n", "", "c"]}, [0, 1, 2], Letters(), TASK, 3)
    assert found["input_ids"] == [[97, 98, 10], [10, 99]] and found["labels"] == [[98, 10, 10], [99, 10]]
    assert KIND.encode({"text": ["a"]}, [0], Letters(), TASK, 3)["labels"] == [[10]]


def test_a_row_has_no_answer(backbone, texts, capsys):
    line = fails(capsys, "predict", backbone, "--data.task", "plain_text", "--data.path", texts)
    assert "predict: a language model has no answer for a row" in line
