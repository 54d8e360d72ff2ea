"""README.md and docs/: every command is valid, some pages are run, and files.md names every file and field."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import fails
from pages import PAGES, ROOT, Item, items, lit_compress_words, named, python_blocks, skeleton
from tiny import WORDS, write_rows

from lit_compress.__main__ import OLD, main
from lit_compress.cli.lines import read_line
from lit_compress.cli.options import CommandLine
from lit_compress.cli.recipes import COMPARISONS, resolve_config
from lit_compress.models.files import load_tensors
from lit_compress.run.comparison import read_comparison

TINY = ["--data.batch_size", "8", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
RUN = ("export", "files", "programs", "your_csv")  # pages whose commands run; those of others are read
QUICKSTART = "python -m lit_compress fit --config quickstart.yaml"
SHARED = {  # command -> the folder of its data, if it does not name it
    QUICKSTART: None,
    "python -m lit_compress fit --config lpaf_sst2.yaml": "sst2",
    "python -m lit_compress export runs/lpaf-sst2 small_onnx --format onnx": None,
}


def run_command(words: list[str]) -> str:
    """Run a command as `python -m lit_compress` does and return all it says; a reload of its export takes seconds."""
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
        main(words)
    return said.getvalue()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: Path, tiny_data: Path) -> tuple[Path, dict[str, str]]:
    """A folder with what pages name, and with the runs that several go on from; what their commands said."""
    folder, said = tmp_path_factory.mktemp("docs"), dict[str, str]()
    shutil.copytree(tiny_backbone, folder / "my_model")
    shutil.copytree(tiny_data, folder / "sst2")
    texts = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(4 + i % 3)) for i in range(60)]
    rows = [{"text": text, "area": f"area {i % 8}"} for i, text in enumerate(texts)]
    write_rows(folder / "runs" / "made" / "areas", train=rows[:48], validation=rows[:16])
    shutil.copytree(tiny_backbone, folder / "runs" / "made" / "bert")
    (folder / "reviews.csv").write_text("\n".join(["review,stars", *(f"{t},{i % 3}" for i, t in enumerate(texts))]))
    (folder / "new_reviews.csv").write_text("\n".join(["review", *texts[:5]]))
    with contextlib.chdir(folder):
        for text, task in SHARED.items():
            words = lit_compress_words(text) or []
            if task:
                words += ["--data.path", str(folder / task), "--model.backbone", str(folder / "my_model")]
            if words[0] == "fit":
                words += ["--data.train_examples", "40", *TINY]
                words += [f"--model.{stage}.epochs=1" for stage in ("dense", "prune", "retrain")]
            said[text] = run_command(words)
    return folder, said


def check(item: Item) -> None:
    """Read a command as far as it goes without its data; others than lit_compress's are known by name."""
    if (words := lit_compress_words(item.text)) is None:
        words = shlex.split(item.text)
        if words[0] == "make":
            assert set(words[1:]) <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
        elif words[:2] == ["pip", "install"]:
            extra = re.search(r"\[(\w+)\]", words[2])
            assert words[2] == "." or (extra and f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text()), words
        elif words[:2] == ["hf", "upload"]:
            said = subprocess.run(
                [Path(sys.executable).with_name("hf"), "upload", "--help"], capture_output=True, text=True, check=True
            ).stdout
            assert all(word in said for word in words if word.startswith("--")), words
        else:
            assert words[0] == "tensorboard", f"nobody knows how to run {words}"
    elif {"--help", "--print_config"} & set(words):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main(words)
    else:
        given: list[str] = OLD.get(words[0], words[:1]) + words[1:]
        command = given[0]
        line = read_line(command, given[1:])
        if command in ("fit", "plan"):
            CommandLine(line)
        elif command == "factorize":
            CommandLine(replace(line, options=[*line.options, ("model.backbone", line.own["model"])]))
        elif command == "compare":
            read_comparison(resolve_config(line.own["config"], line.last("data.task"), COMPARISONS), item.where)


@pytest.mark.parametrize("page", [path for path in PAGES if items(path)], ids=lambda path: path.stem)
def test_every_command_of_a_page_is_valid(page):
    for item in items(page):
        if item.language == "python":  # test_form.py reads the records of an architecture
            assert item.where.startswith("add_an_architecture") or compile(item.text, item.where, "exec")
        elif item.output and item.output[0].startswith("error: "):
            with pytest.raises(Exception, match=re.escape(item.output[0].removeprefix("error: "))):
                check(item)
        else:
            check(item)


@pytest.mark.parametrize("name", RUN)
def test_a_page_runs_from_its_first_command_to_its_last(name, base, tmp_path, monkeypatch):
    for path in base[0].iterdir():
        if path.name != "runs":
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(base[0] / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    for item in items(named(name)):
        words = lit_compress_words(item.text) if item.language == "bash" else None
        if item.language == "python" and "onnxruntime" in item.text:
            run_alone(item)
        elif item.language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(item.text, item.where, "exec"), {})
        elif words and "int8" not in words:
            run_command([*words, *TINY] if words[0] == "fit" else words)


def run_alone(item: Item) -> None:
    """Run a block where neither torch nor transformers nor lit_compress is; it prints a label for every text."""
    hidden = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'lit_compress')))\n"
    done = subprocess.run([sys.executable, "-c", hidden + item.text], capture_output=True, text=True)
    labels = re.findall(r"-> (.+)", done.stdout)
    (config,) = re.findall(r'"(\w+/config\.json)"', item.text)
    known = json.loads(Path(config).read_text())["id2label"].values()
    assert labels and set(labels) <= set(known), f"{item.where}: {done.stdout}{done.stderr}"


def test_pages_show_what_the_quickstart_says(base):
    said = {skeleton(line, (str(base[0]),)) for line in base[1][QUICKSTART].splitlines()}
    shown = [(item.where, line) for path in PAGES for item in items(path) if "quickstart" in item.text
             for line in item.output]  # fmt: skip
    assert shown
    shown += [(path.name, line) for path in PAGES for line in path.read_text("utf-8").splitlines() if line[:1] in "│┃"]
    for where, line in shown:
        assert not line or skeleton(line) in said, f"{where}: {line}"


def field_names(value: Any, without: tuple[str, ...]) -> set[str]:
    """Return the keys of nested dicts, but what is below the keys ``without``."""
    if not isinstance(value, dict):
        return set()
    below = (field_names(child, without) for key, child in value.items() if key not in without)
    return set(value).union(*below)


def test_outputs_names_every_field_and_file(base):
    words = set(re.findall(r"[\w.]+", named("files").read_text(encoding="utf-8")))
    run, out = base[0] / "runs" / "lpaf-sst2", base[0] / "small_onnx"
    main(["predict", str(out)])
    report = json.loads((out / "report.json").read_text())
    names = field_names(report, ("config", "matrices"))  # one has the options, the other names of matrices
    assert {"program", "stored", "ratios"} <= names
    assert not names - words
    records = json.loads((run / "stages.json").read_text())
    assert not set().union(*records) - words
    for folder in (run, out):
        for path in folder.rglob("*"):
            name = path.name.partition(".")[0] if "tfevents" in path.name else path.name
            assert name in words or path.is_dir(), f"docs/reference/files.md does not name {path.relative_to(folder)}"


def test_the_method_of_the_docs_works(tiny_backbone, tiny_data, tmp_path, monkeypatch):
    """Its file, its test, and a whole run of it."""
    method, test, _ = python_blocks("add_a_method")
    (tmp_path / "increase.py").write_text(method)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace = {}
    exec(test.replace("lit_compress.methods.increase", "increase"), namespace)
    namespace["test_the_score_is_what_the_paper_says"]()
    words = ["fit", "--model", "increase.Increase", "--data.task", "sst2", "--data.path", str(tiny_data), *TINY,
             "--model.backbone", str(tiny_backbone), "--model.dense.epochs", "1", "--model.prune.epochs", "1",
             "--run_dir", str(tmp_path / "run")]  # fmt: skip
    assert "Increase on sst2" in run_command(words)
    assert os.path.exists(tmp_path / "run" / "export" / "model.safetensors")


def test_the_one_shot_method_of_the_docs_works(tiny_backbone, tiny_data, tmp_path, monkeypatch, capsys):
    """From one file, in memory, by block and with training: the same units; a method that has to train is refused."""
    *_, method = python_blocks("add_a_method")
    (tmp_path / "smallest.py").write_text(method)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = ["--data.task", "sst2", "--data.path", str(tiny_data)]
    line = ["factorize", str(tiny_backbone), "OUT", *data, "--method", "smallest.Smallest", "--density", "0.6"]
    for name, more in (("whole", []), ("blocks", ["--by_block", "float32"])):
        run_command([str(tmp_path / name) if word == "OUT" else word for word in line] + more)
    run_command(["fit", "--model", "smallest.Smallest", *data, *TINY, "--model.backbone", str(tiny_backbone),
                 "--model.teacher", str(tiny_backbone), "--model.prune.epochs", "0", "--model.density", "0.6",
                 "--run_dir", str(tmp_path / "run")])  # fmt: skip
    found = [load_tensors(tmp_path / name) for name in ("whole", "blocks", "run/export")]
    small = [name for name, value in found[0].items() if value.shape != load_tensors(tiny_backbone)[name].shape]
    assert small
    for other in found[1:]:
        assert other.keys() == found[0].keys() and all(torch.equal(other[n], found[0][n]) for n in other)
    said = fails(capsys, "factorize", tiny_backbone, tmp_path / "none", *data, "--method", "LPAF", "--density", "0.5")
    assert "factorize: LPAF has to train: fit --model LPAF; nearest here: SecondOrder" in said
