"""The benchmark of a real decoder, its whole way on a tiny one: texts, every method, refinement, table."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import WORDS, write_model

from benchmarks import common
from benchmarks.decoder import integers, run, serve, tables, texts


def write_rows(file: Path, column: str, rows: list[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: rows}), file)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The options that try the script."""
    rng = random.Random(0)
    lines = [f" {' '.join(rng.choices(WORDS, k=30))} . \n" for _ in range(40)]
    for split in ("validation", "test"):
        write_rows(tmp_path / "data" / "wikitext2" / f"{split}.parquet", "text", ["", " = Title = \n", *lines])
        write_rows(tmp_path / "data" / "cnn_dailymail" / f"{split}.parquet", "article", ["short", *lines])
    (tmp_path / "net").mkdir()
    write_model(tmp_path / "net", "llama", "plain_text")
    given = {"backbone": "net", "data": "data", "work": "work", "results": "results"}
    folders = [word for name, folder in given.items() for word in (f"--{name}", str(tmp_path / folder))]
    return ["run", *folders, "--length", "12", "--calibrated", "16", "--measured", "3", "--densities", "0.8", "0.6"]


def test_the_whole_way(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    work: list[tuple[Any, ...]] = []

    def here(options: Any, *rest: Any) -> None:
        work.append(rest)
        run.make(options, *rest)

    monkeypatch.setattr(run, "alone", here)
    monkeypatch.setattr(sys, "argv", [*words, "--only", "structures", "svd", "slicegpt", "--refine", "0", "3"])
    run.main()
    assert [(method, steps) for method, _, steps in work] == [
        ("dense", 0), ("structures", 0), ("svd", 0), ("slicegpt", 0), ("structures", 3), ("svd", 3)
    ]  # fmt: skip
    made = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")}
    assert len(made) == 1 + 2 * 3 + 2 * 2
    assert all(0.7 < made[f"{m}-0.8"]["file_density"] <= 0.8 for m in ("structures", "svd", "slicegpt"))
    assert made["structures-0.6"]["bytes"] < made["structures-0.8"]["bytes"] < made["dense"]["bytes"]
    told = made["svd-0.8-refined"]["refined"]
    assert (told["steps"], told["texts"]) == (3, 16)

    before = len(work)
    run.main()
    assert len(work) == before  # all is there
    monkeypatch.setattr(
        sys, "argv", [*words, "--only", "structures", "--densities", "0.8", "--refine", "3", "--mixed", "99"]
    )
    run.main()
    mixed = json.loads((tmp_path / "results" / "structures-0.8-mixed.json").read_text())
    assert mixed["mixed"] == mixed["refined"]["texts"] == 99 and mixed["seconds"] == made["structures-0.8"]["seconds"]
    assert len((tmp_path / "work/mixed/train.txt").read_text().splitlines()) > 40
    monkeypatch.setattr(sys, "argv", [*words, "--only", "structures", "--densities", "0.8", "--distil", "4"])
    run.main()
    distilled = json.loads((tmp_path / "results" / "structures-0.8-distilled-4.json").read_text())
    told = distilled["distilled"]
    assert (told["steps"], told["batch"], told["precision"], distilled["mixed"]) == (4, 2, "bf16-mixed", 99)
    assert distilled["losses"] != mixed["losses"] and distilled["refined"] == mixed["refined"]
    assert tables.spent(distilled) == tables.spent(mixed) + distilled["distil_seconds"]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--temperature", "1"])
    run.main()
    colder = json.loads((tmp_path / "results" / "structures-0.8-distilled-at-1-4.json").read_text())
    assert colder["losses"] != distilled["losses"]
    for part in ("train", "train_extra"):
        write_rows(tmp_path / "data" / "squad" / f"{part}.parquet", "context", [f"film {part} {i}" for i in range(30)])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--more", "--written", "6"])
    run.main()
    written = json.loads((tmp_path / "results" / "structures-0.8-distilled-at-1-4-more-written-6.json").read_text())
    assert written["losses"] != colder["losses"] and tables._texts(written).endswith("texts of the dense model")
    assert len((tmp_path / "work" / "written-6" / "train.txt").read_text().splitlines()) == 6

    program = made["structures-0.8"] | {"of": "structures-0.8", "way": "round", "bytes": 9_600_000}
    stored = {"decoder": common.load(tmp_path / "results"), "decoder/integers": [program], "decoder/serve": []}
    monkeypatch.setattr(tables, "load", stored.get)
    _, rows, origin, _, programs, _ = tables.sections()
    assert "| 9.6 | K-FAC heads and neurons, uniform | 0.8 | int4, 32, rounded | " in programs
    shown = [line.split(" | ") for line in rows.splitlines()[2:]]
    assert len(shown) == 14 and all(len(line) == 10 and all(line) for line in shown)
    assert "benchmarks.decoder.run" in origin


def words_of_a_model(results: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the dense and a smaller model; return the options of a script that measures both."""
    monkeypatch.setattr(run, "alone", run.make)
    monkeypatch.setitem(run.METHODS, "even", [*run.METHODS["even"][:-1], 2])  # as narrow as the tiny model
    words = words[: words.index("--densities")]
    monkeypatch.setattr(sys, "argv", [*words, "--only", "even", "--densities", "0.8", "--refine", "0"])
    run.main()
    where = words.index("--results") + 1
    return [*words[:where], str(results), *words[where + 1 :], "--only", "dense", "even-0.8"]


def test_programs_of_integers(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NNCF's own work, which tests/export/integers_cases.py does."""
    for package in ("openvino", "nncf"):
        pytest.importorskip(package)
    asked = []

    def copy(whole: Path, small: Path, dtype: str, feeds: Any, way: Any) -> None:
        asked.append((dtype, len(feeds or ()), way))
        for ending in (".xml", ".bin"):
            shutil.copy(whole.with_suffix(ending), small.with_suffix(ending))

    monkeypatch.setattr("lit_compress.export.integers.quantize", copy)
    monkeypatch.setattr(integers, "alone", integers.measure)
    words = words_of_a_model(tmp_path / "integers", words, monkeypatch)
    monkeypatch.setattr(sys, "argv", [*words[: words.index("even-0.8")], "--ways", "int8", "awq-scales"])
    integers.main()
    made = {result["name"]: result for result in common.load(tmp_path / "integers")}
    assert asked == [("int8", 0, {"ratio": 1.0}), ("int4", 16, integers.WAYS["awq-scales"] | {"ratio": 1.0})]
    dense = json.loads((tmp_path / "results" / "dense.json").read_text())
    for way, texts_read in (("int8", 0), ("awq-scales", 16)):
        result = made[f"dense-{way}"]
        assert result["texts"] == texts_read and tables.WAYS[way] and result["memory_mib"] > 100
        assert result["losses"]["news"] == pytest.approx(dense["losses"]["news"], abs=1e-3)


def test_tokens_a_second(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch reads the ordinary folder; other runtimes need tools of their own and a converter."""
    from transformers import AutoModelForCausalLM

    words = words_of_a_model(tmp_path / "serve", words, monkeypatch)
    monkeypatch.setattr(sys, "argv", [*words, "--prompt", "8", "--new", "4", "--rounds", "2"])
    serve.main()
    (made,) = common.load(tmp_path / "serve")
    answer = made["models"]["even-0.8/float32"]
    assert len(answer["prompt"]) == len(answer["generation"]) == 2
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "work" / "served" / "even-0.8")
    tokens = torch.tensor([json.loads((tmp_path / "work" / "served" / "prompt.json").read_text())])
    assert tokens.shape == (1, 8)
    expected = model.generate(tokens, do_sample=False, max_new_tokens=5, min_new_tokens=5)[0, 8:]
    assert answer["tokens"] == expected.tolist()

    for part in ("prompt", "generation"):
        made["models"]["dense/float32"][part], answer[part] = [2.0, 3.0], [1.0, 2.0]
    other = made | {"name": "llama.cpp"}
    other["models"] = {name: dict(value, tokens=[0] * 5) for name, value in made["models"].items()}
    stored = {"decoder": [], "decoder/integers": [], "decoder/serve": [other, made]}
    monkeypatch.setattr(tables, "load", stored.get)
    *_, rows, _, origin = tables.sections()
    assert [line.split(" | ")[0] for line in rows.splitlines()[2:]] == ["| pytorch"] * 2 + ["| llama.cpp"] * 2
    assert "benchmarks.decoder.serve" in origin


def test_a_decoder_writes_texts_and_goes_on(tmp_path: Path, words: list[str]) -> None:
    """Batches have seeds of their own; each text begins with given tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    net, tokenizer = (kind.from_pretrained(tmp_path / "net") for kind in (AutoModelForCausalLM, AutoTokenizer))
    (given := tmp_path / "given.txt").write_text("film " * 40)
    once, twice = tmp_path / "once.txt", tmp_path / "twice.txt"
    texts.write(net, tokenizer, given, once, texts.AT_ONCE + 3, 2 * texts.GIVEN)
    for count in (texts.AT_ONCE, texts.AT_ONCE + 3):
        texts.write(net, tokenizer, given, twice, count, 2 * texts.GIVEN)
    lines = once.read_text().splitlines()
    assert once.read_bytes() == twice.read_bytes() and len(lines) == texts.AT_ONCE + 3
    assert all(line.split()[: texts.GIVEN] == ["film"] * texts.GIVEN for line in lines), lines[:2]
    assert len(set(lines)) > 10
