"""README.md and docs/: every command runs, and files.md names every file and field.

A command that nobody knows how to run is a failure.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import fails
from page_files import custom_files, rows_of, write_rows
from pages import PAGES, items, lit_compress_words, named, python_blocks
from reading import LIKE_TINY, Reader, quick, run_command, skeleton
from tiny import WORDS, make_net, write_backbone

from lit_compress.__main__ import main
from lit_compress.models.shards import load_tensors

TASKS = (
    "wnli",
    "mrpc",
    "stsb",
    "squad",
    "squad_v2",
    "conll2003",
    "xsum",
    "docstrings",
    "stsb_embedding",
    "wiki_qa",
    "go_emotions",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: Path, tiny_data: Path) -> Path:
    """The folder with all that pages name but do not make."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("my_model", "finetuned"):
        shutil.copytree(tiny_backbone, folder / name)
    shutil.copytree(tiny_backbone, folder / "sentence_model")
    make_net("bert", "stsb_embedding").save_pretrained(folder / "sentence_model")
    shutil.copytree(tiny_backbone, folder / "reranker")
    make_net("bert", "wiki_qa").save_pretrained(folder / "reranker")
    write_backbone(folder / "opt", "opt", "wikitext2")
    write_backbone(folder / "bart", "bart", "xsum")
    write_backbone(folder / "my_decoder", "llama", "plain_text", max_position_embeddings=256)
    for name in ("my_data", "data/sst2"):
        shutil.copytree(tiny_data, folder / name)
    write_rows(folder / "labelled_test", {"test": rows_of("sst2", 12)})
    for task in TASKS:
        write_rows(folder / "data" / task, {"train": rows_of(task, 48), "validation": rows_of(task, 16)})
    text = "\n".join(" ".join(WORDS[(i * j) % len(WORDS)] for j in range(9)) for i in range(200)) + "\n"
    for name, endings in (("my_texts", "txt"), ("data/wikitext2", "txt")):
        (folder / name).mkdir(parents=True)
        for split in ("train", "validation"):
            (folder / name / f"{split}.{endings}").write_text(text)
    custom_files(folder)
    return folder


SHARED = (
    "python -m lit_compress fit --config quickstart.yaml",
    "python -m lit_compress fit --config lpaf_sst2.yaml",
    "python -m lit_compress export runs/lpaf-sst2 small_onnx --format onnx",
)


@pytest.fixture(scope="module")
def reader(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A reader who has made what several pages go on from."""
    found = Reader(place, tmp_path_factory.mktemp("base"))
    with quick():
        found.make(*SHARED)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("read", [path for path in PAGES if items(path)], ids=lambda path: path.stem)
def test_every_command_of_a_page_runs(read, reader, tmp_path, monkeypatch):
    monkeypatch.chdir(reader.folder(tmp_path / "here"))
    steps = items(read)
    for number, item in enumerate(steps):
        with quick(), reader.hub(tmp_path / f"cache{number}"):
            reader.check(item, rest=" ".join(step.text for step in steps[number + 1 :]))


@pytest.mark.slow
def test_tables_have_the_rows_that_are_printed(reader):
    said = reader.known[tuple(lit_compress_words(SHARED[0]) or ())]
    printed = {skeleton(line) for line in said.splitlines()}
    shown = [(path, line) for path in PAGES for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [(path, line) for path, line in shown if line.startswith(("│", "┃"))]
    assert rows
    for path, line in rows:
        assert skeleton(line) in printed, f"{path.name}: {line}"


def field_names(value: Any, without: tuple[str, ...]) -> set[str]:
    """Return the keys of nested dicts, but what is below the keys ``without``."""
    if not isinstance(value, dict):
        return set()
    below = (field_names(child, without) for key, child in value.items() if key not in without)
    return set(value).union(*below)


@pytest.mark.slow
def test_outputs_names_every_field_and_file(reader):
    text = named("files").read_text(encoding="utf-8")
    words = set(re.findall(r"[\w.]+", text))
    run, out = reader.base / "runs" / "lpaf-sst2", reader.base / "small_onnx"
    main(["predict", str(out)])
    report = json.loads((out / "report.json").read_text())
    names = field_names(report, ("config", "matrices"))  # one has the options, the other names of matrices
    assert {"program", "kept", "merged", "ratios"} <= names
    assert not names - words
    records = json.loads((run / "stages.json").read_text())
    assert not set().union(*records) - words
    for folder in (run, out):
        for path in folder.rglob("*"):
            name = path.name.partition(".")[0] if "tfevents" in path.name else path.name
            assert name in words or path.is_dir(), f"docs/reference/files.md does not name {path.relative_to(folder)}"


@pytest.mark.slow
def test_the_method_of_the_docs_works(tiny_backbone, tiny_data, tmp_path, monkeypatch):
    """Its file, its test, and a whole run of it."""
    method, test, _ = python_blocks("add_a_method")
    for code in (method, test):
        compile(code, "add_a_method.md", "exec")
    (tmp_path / "increase.py").write_text(method)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace = {}
    exec(test.replace("lit_compress.methods.increase", "increase"), namespace)
    namespace["test_the_score_is_what_the_paper_says"]()
    words = ["fit", "--model", "increase.Increase", "--data.task", "sst2", "--data.path", str(tiny_data), *LIKE_TINY,
             "--model.backbone", str(tiny_backbone), "--model.dense.epochs", "1", "--model.prune.epochs", "1",
             "--run_dir", str(tmp_path / "run")]  # fmt: skip
    with quick():
        said = run_command(words)
    assert "Increase on sst2" in said, said
    assert os.path.exists(tmp_path / "run" / "export" / "model.safetensors")


@pytest.mark.slow
def test_the_one_shot_method_of_the_docs_works(tiny_backbone, tiny_data, tmp_path, monkeypatch, capsys):
    """From one file, in memory, by block and with training: the same units; a method that has to train is refused."""
    *_, method = python_blocks("add_a_method")
    (tmp_path / "smallest.py").write_text(method)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = ["--data.task", "sst2", "--data.path", str(tiny_data)]
    line = ["factorize", str(tiny_backbone), "OUT", *data, "--method", "smallest.Smallest", "--density", "0.6"]
    with quick():
        for name, more in (("whole", []), ("blocks", ["--by_block", "float32"])):
            said = run_command([str(tmp_path / name) if word == "OUT" else word for word in line] + more)
            assert (tmp_path / name).is_dir(), said
        run_command(["fit", "--model", "smallest.Smallest", *data, *LIKE_TINY, "--model.backbone", str(tiny_backbone),
                     "--model.teacher", str(tiny_backbone), "--model.prune.epochs", "0", "--model.density", "0.6",
                     "--run_dir", str(tmp_path / "run")])  # fmt: skip
    found = [load_tensors(tmp_path / name) for name in ("whole", "blocks", "run/export")]
    small = [name for name, value in found[0].items() if value.shape != load_tensors(tiny_backbone)[name].shape]
    assert small
    for other in found[1:]:
        assert other.keys() == found[0].keys() and all(torch.equal(other[n], found[0][n]) for n in other)
    said = fails(capsys, "factorize", tiny_backbone, tmp_path / "none", *data, "--method", "LPAF", "--density", "0.5")
    assert "factorize: LPAF has to train: fit --model LPAF; nearest here: SecondOrder" in said
