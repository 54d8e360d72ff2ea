"""The embedded task and backbone: balanced, leak-free, the same every time."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lit_compress.models import embedded
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

TASK = get_task("docstrings")


@pytest.fixture(scope="module")
def splits():
    return embedded.load_texts(TASK)


@pytest.fixture(scope="module")
def folder() -> Path:
    return embedded.build_backbone(TASK)


@pytest.mark.slow
def test_sizes_and_balance(splits):
    assert len(splits["train"]) >= 4000 and len(splits["validation"]) >= 400 and len(splits["test"]) >= 400
    counts = Counter(row["label"] for row in splits["validation"])
    assert set(counts) == set(range(TASK.num_labels))
    assert max(counts.values()) / len(splits["validation"]) <= 0.25


def test_no_text_twice(splits):
    texts = [row["text"] for rows in splits.values() for row in rows]
    assert len(texts) == len(set(texts))


def test_a_passage_is_cut_at_sentences_and_hides_the_module():
    sentence = "Parse the argument with Json and then return " + "very " * 10 + "new objects."
    first, second = embedded._passages(f"{sentence} {sentence}\n\n-----\n\nToo short.", "json")
    assert first == second and first.startswith("parse the argument with module and") and first.endswith("objects .")


def test_sources_that_are_missing_or_broken_are_left_out(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_bytes(b'"""' + b"a long word and more of them " * 3 + b'"""')
    (tmp_path / "csv.py").write_bytes(b"def broken(:")
    (tmp_path / "re.py").write_bytes(b"\xff\xfe")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "json.py").write_text('"""' + "not of the library at all, " * 9 + '"""')
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda _: str(tmp_path))
    rows = [row for split in embedded._docstring_splits(tmp_path / "cache").values() for row in split]
    assert [row["area"] for row in rows] == ["text"]


def test_the_backbone_is_reused_and_other_tasks_get_the_same(folder):
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert embedded.build_backbone(get_task("sst2")) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_the_same_files_every_time(folder, tmp_path, splits):
    """Also the tokenizer, whose trainer keeps its pieces in an order of its own; random numbers stay as they are."""
    state = torch.get_rng_state()
    embedded._write_backbone(tmp_path, [row["text"] for row in splits["train"]])
    assert torch.equal(state, torch.get_rng_state())
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


def test_no_sources_at_all_and_longer_tasks_are_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="'embedded' reads 128 tokens, task 'docstrings' has 129"):
        embedded.build_backbone(replace(TASK, max_length=129))
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match="found no sources"):
        embedded._docstring_splits(tmp_path)
