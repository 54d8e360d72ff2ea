"""The data and the backbone of `make quickstart`: balanced, leak-free, the same every time."""

import csv
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import quickstart
from lit_compress.data.datamodule import DataModule
from lit_compress.tasks.records import Custom


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    quickstart.write(folder)
    return folder


@pytest.fixture(scope="module")
def splits(made):
    tables = {path.stem: list(csv.DictReader(path.open(newline=""))) for path in (made / "areas").iterdir()}
    assert set(tables) == {"train", "validation", "test"}
    return tables


def test_sizes_and_balance(splits):
    assert len(splits["train"]) >= 4000 and len(splits["validation"]) >= 400 and len(splits["test"]) >= 400
    counts = Counter(row["area"] for row in splits["validation"])
    assert set(counts) == set(quickstart.AREAS)
    assert max(counts.values()) / len(splits["validation"]) <= 0.25


def test_no_text_twice(splits):
    texts = [row["text"] for rows in splits.values() for row in rows]
    assert len(texts) == len(set(texts))


def test_the_package_reads_the_files(made, splits):
    data = DataModule("custom", str(made / "bert"), str(made / "areas"), custom=Custom(label="area"))
    data.setup("fit")
    assert data.record.labels == tuple(quickstart.AREAS) and data.limit == 128
    assert len(data.train_dataloader().dataset) == len(splits["train"])


def test_a_passage_is_cut_at_sentences_and_hides_the_module():
    sentence = "Parse the argument with Json and then return " + "very " * 10 + "new objects."
    first, second = quickstart._passages(f"{sentence} {sentence}\n\n-----\n\nToo short.", "json")
    assert first == second and first.startswith("parse the argument with module and") and first.endswith("objects .")


def test_sources_that_are_missing_or_broken_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(SystemExit, match="error: no sources"):
        quickstart.read_splits()
    (tmp_path / "json.py").write_bytes(b'"""' + b"a long word and more of them " * 3 + b'"""')
    (tmp_path / "csv.py").write_bytes(b"def broken(:")
    (tmp_path / "re.py").write_bytes(b"\xff\xfe")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "json.py").write_text('"""' + "not of the library at all, " * 9 + '"""')
    assert [area for rows in quickstart.read_splits().values() for _, area in rows] == ["text"]


def test_a_whole_folder_stays_and_a_broken_one_is_made_again(made, tmp_path, monkeypatch, capsys):
    """The same files every time, also the tokenizer, whose trainer keeps its pieces in an order of its own."""
    state, folder, calls = torch.get_rng_state(), tmp_path / "made", []
    write = quickstart.write
    monkeypatch.setattr(quickstart, "write", lambda folder: (calls.append(folder), write(folder)))
    monkeypatch.setattr("sys.argv", ["quickstart", str(folder)])
    for _ in range(2):
        quickstart.main()
    assert len(calls) == 1 and capsys.readouterr().out == f"{folder}\n" * 2
    assert torch.equal(state, torch.get_rng_state())
    (folder / "bert" / "config.json").unlink()
    quickstart.main()
    files = {path.relative_to(made) for path in made.rglob("*") if path.is_file()}
    assert len(calls) == 2 and Path("bert/model.safetensors") in files and len(files) == 7
    assert all((made / name).read_bytes() == (folder / name).read_bytes() for name in files)
