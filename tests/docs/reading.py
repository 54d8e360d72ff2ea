"""A page is run as a reader would: from its first command to its last, in a folder with the files it names.

Commands get what makes them tiny: a net of two layers, a few rows, an epoch.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
from hub import running
from page_files import rows_of
from pages import ROOT, Item, lit_compress_words

from lit_compress.__main__ import main
from lit_compress.cli import catalogue
from lit_compress.cli.recipes import DEFAULT_METHOD, merged_configs
from lit_compress.cli.words import take_apart
from lit_compress.data.datamodule import DataModule
from lit_compress.export.program import FILES
from lit_compress.export.runtimes import RUNTIMES
from lit_compress.models.embedded import AREAS

STAGES = ("dense", "distil", "prune", "replace", "retrain")
SHORT = {  # a schedule for a few steps
    **{
        name: {"start": "0.1", "end": "0.3", "interval": "1"}
        for name in ("LoSparse", "LowRankII", "ITP", "CoFiLoSparse")
    },
    "BlockMovement": {"start": "0.1", "end": "0.3"},
    "Movement": {"start": "0.1", "end": "0.3"},
    "PLATON": {"interval": "2", "start": "0.4", "end": "0.3"},
}
OF_TINY = {  # values for which the tiny net is too small
    "5M": "8K", "8000": "48", "60": "6", "256": "16", "300": "30",
    "size=150MB": "size=60kB", "size=200MB": "size=60kB", "size=60MB": "size=45kB", "size=8MB": "size=40kB",
    "speedup=2x@eager,32x64": "speedup=1x@eager,32x64",
}  # fmt: skip
DOCSTRINGS = {split: [{"text": row["text"], "area": [*AREAS][row["label"]]} for row in rows_of("docstrings", 48)]
              for split in ("train", "validation", "test")}  # fmt: skip
LIKE_TINY = ["--data.batch_size", "8", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


def given(words: list[str], option: str) -> str | None:
    """Return the last value of an option."""
    return next((words[i + 1] for i in reversed(range(len(words) - 1)) if words[i] == option), None)


def without(words: list[str], *options: str) -> list[str]:
    """Return the words without some options and their values."""
    kept, option = [], ""
    for word in words:
        option = word if word.startswith("--") else option
        kept += [word] if option not in options else []
    return kept


def method_and_task(words: list[str]) -> tuple[str, str]:
    """Return the class and the task of a command, ``fit`` or ``plan`` and its words."""
    config = merged_configs(take_apart("fit", words[1:], {}))
    method, data = config["model"].get("class_path", DEFAULT_METHOD), config.get("data", {})
    return method.rpartition(".")[2], data.get("task") or "sst2"


def tiny_fit(words: list[str], place: Path, teacher: Path) -> list[str]:
    """Return ``fit WORDS`` for a tiny net and little data on one process.

    Args:
        words: after ``fit``, too.
        place: the folder of the files.
        teacher: a tiny net fine-tuned on SST-2; where it is there, only the first command makes one of its own.
    """
    method, task = method_and_task(words)
    kind = given(words, "--data.custom.kind") if task == "custom" else DataModule(task).record.kind
    backbone = {"summarization": "bart", "language_modelling": "opt"}.get(kind or "", "my_model")
    words = [OF_TINY.get(word, word) for word in words]
    extra = {"--model.backbone": str(place / backbone), "--data.path": str(place / "data" / task)}
    if kind == "summarization":  # writing takes long
        words += ["--data.target_length", "6", "--data.num_beams", "2"]
    if task == "docstrings":
        extra["--data.train_examples"] = "40"  # of 48; the recipe takes a part, too
    if task == "sst2" and teacher.exists():
        extra["--data.train_examples"] = "48"
        if given(words, "--model.backbone") is None:
            extra["--model.teacher"] = str(teacher)
    for name in STAGES:
        if f"model.{name}.epochs" in catalogue.of_method(method):
            extra[f"--model.{name}.epochs"] = "2" if name == "dense" else "1"
            if given(words, f"--model.{name}.optimizer") is None:
                extra[f"--model.{name}.learning_rate"] = "3e-3"
    extra |= {f"--model.prune.{name}": value for name, value in SHORT.get(method, {}).items()}
    if "interval" in SHORT.get(method, {}):  # scores of rows need a few optimizer steps
        extra["--trainer.accumulate_grad_batches"] = "1"
    if method == "SP3":
        extra["--model.params"] = "null" if given(words, "--model.density") else OF_TINY["5M"]
    for name, value in extra.items():
        if given(words, name) is None:
            words += [name, value]
    log = ["--trainer.logger", "false"] if teacher.exists() else []  # the first run shows what TensorBoard has
    return [*words, *LIKE_TINY, *one_process(words), *log]


def tiny_compare(words: list[str], place: Path) -> list[str]:
    """Return ``compare WORDS`` for a tiny net; where all runs are made, only those of one method."""
    few = [] if {"--list", "--index", "--methods"} & set(words) else ["--methods", "SVD"]
    options = {"data.task": "sst2", "data.path": place / "data" / "sst2", "model.backbone": place / "my_model"}
    sizes = ["--updates", "6", "--hold_out", "12", "--trainer.logger", "false"]  # no curves and pictures
    return [*words, *few, *sizes, *(f"--{name}={value}" for name, value in options.items()), *LIKE_TINY]


def one_process(words: list[str]) -> list[str]:
    """Return what brings a command for several devices to one."""
    return ["--trainer.devices", "1", "--trainer.strategy", "auto"] if given(words, "--trainer.devices") else []


def tiny(words: list[str], place: Path, teacher: Path) -> list[str]:
    """Return the arguments that are run for a documented command."""
    if {"--help", "--print_config"} & set(words):
        return words
    if words[0] in ("fit", "plan"):
        return tiny_fit(words, place, teacher)
    if words[0] == "compare":
        return tiny_compare(words, place)
    if words[0] == "bench":
        assert {word for word in words if word.startswith(("onnx", "openvino"))} <= set(RUNTIMES)
        few = {"--batch": "1", "--length": "8", "--runtimes": "eager", "--rounds": "3"}
        return [*without(words, *few), *(word for pair in few.items() for word in pair)]
    if words[0] == "export" and given(words, "--dtype") == "int8":  # tests/export makes programs of integers
        assert given(words, "--format") in FILES
        return without(words, "--format", "--dtype")
    if words[0] == "factorize":
        words = [OF_TINY.get(word, word) for word in words]
    if words[0] == "factorize" and "--data.task" in words:
        path = [] if given(words, "--data.path") else ["--data.path", str(place / "data" / "sst2")]
        return [*words, *path, "--data.batch_size", "8"]
    return words


def run_command(words: list[str]) -> str:
    """Run a command as `python -m lit_compress` does and return all it says."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as stop:
            if stop.code not in (0, 2, None) or (stop.code == 2 and "error: " not in said.getvalue()):
                raise
    return said.getvalue()


def skeleton(line: str, folders: tuple[str, ...] = ()) -> str:
    """Return a line of output without numbers, borders and the folders of this machine."""
    for folder in folders:
        line = line.replace(f"{folder}/", "")
    line = re.sub(r"[\u2500-\u257f]", " ", line).replace(" noise ", " 1.0x ").replace("≈", "")  # on a busy machine
    line = line.replace(" (chance)", "")  # of a teacher that these short runs teach hardly anything
    return " ".join(re.sub(r"\d[\d,.]*(?:e[+-]\d+)?", "#", line).split())


class Reader:
    """Runs pages: each in a folder of its own, with the files of ``place`` and what was run before it once for all.

    Args:
        place: what pages name.
        base: folder of the runs that several pages go on from.
    """

    def __init__(self, place: Path, base: Path) -> None:
        self.place, self.base = place, base
        self.known: dict[tuple[str, ...], str] = {}  # command -> what it said

    def make(self, *texts: str) -> None:
        """Run the commands that leave the shared runs."""
        with contextlib.chdir(self.base):
            for text in texts:
                words = lit_compress_words(text)
                assert words is not None
                self.known[tuple(words)] = run_command(self.arguments(words))

    def arguments(self, words: list[str]) -> list[str]:
        """Return what is run for a documented command."""
        return tiny(words, self.place, self.base / "runs" / "lpaf-sst2" / "dense" / "net")

    def folder(self, target: Path) -> Path:
        """Lay out the folder a page is read in."""
        target.mkdir()
        for path in self.place.iterdir():
            (target / path.name).symlink_to(path)
        (target / "runs").mkdir()
        for path in (*self.base.glob("runs/*"), *self.base.glob("small_*")):
            (target / path.relative_to(self.base)).symlink_to(path)
        return target

    @contextlib.contextmanager
    def hub(self, cache: Path) -> Iterator[None]:
        """Let names be those of a small hub with what the pages name, and a token that may write there."""
        with running(cache) as made, pytest.MonkeyPatch.context() as patch:
            for name in ("google-bert/bert-base-uncased", "me/net"):
                made.add(name, self.place / "my_model")
            made.add("me/net", self.place / "my_model", revision="v1.0")
            made.add("me/small-model", self.base / "runs" / "lpaf-sst2" / "export", private=True)
            rows = "".join(f"{text},{label}\n" for text, label in (("a great film", "good"), ("so dull", "bad")) * 10)
            made.add("me/reviews", {"train.csv": f"review,label\n{rows}".encode()}, kind="datasets")
            made.add("me/own", self.base / "runs" / "lpaf-sst2" / "dense" / "net", revision="v1.0")
            several = "".join(f"- config_name: {name}\n  data_files: {name}.csv\n" for name in ("cola", "sst2"))
            glue = {"README.md": f"---\nconfigs:\n{several}---\n", "sst2.csv": f"sentence,label\n{rows}"}
            made.add("nyu-mll/glue", {name: text.encode() for name, text in glue.items()}, kind="datasets")
            patch.setenv("HF_TOKEN", "hf_me")
            yield

    def run(self, item: Item, needed: bool) -> str:
        """Run one item in the present folder and return what it said; of a run that nothing needs, only the plan."""
        if item.language == "python":
            return run_python(item)
        words = lit_compress_words(item.text)
        if words is None:
            return check_other(shlex.split(item.text), Path.cwd())
        arguments = self.arguments(words)
        if words[0] == "fit" and not item.output and not needed:
            arguments = ["plan", *arguments[1:]]  # a run of each method and task is tested elsewhere
        return self.known.get(tuple(words)) or run_command(arguments)

    def check(self, item: Item, rest: str = "") -> None:
        """Run one item; it must end well and say what the page shows. ``rest`` is the page after it."""
        folder = re.search(r"runs/[\w-]+", item.text)
        said = self.run(item, folder is not None and folder[0] in rest)
        shown = [skeleton(line) for line in item.output]
        if item.language == "bash" and not any(line.startswith("error: ") for line in shown):
            assert "error: " not in said, f"{item.where}: `{item.text}` fails: {said[said.index('error: ') :]}"
        here = tuple(str(path.resolve()) for path in (Path.cwd(), self.base))
        lines = {skeleton(line, here) for line in said.splitlines()}
        for line in shown:
            assert line in lines, f"{item.where}: `{item.text}` does not say `{line}` but\n" + "\n".join(sorted(lines))


def check_other(words: list[str], here: Path) -> str:
    """Check a command that is not of lit_compress without running it."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        assert set(words[1:]) <= set(targets), f"Makefile has no {words[1:]}"
    elif words[:2] == ["pip", "install"]:
        extra = re.search(r"\[(\w+)\]", words[2])
        assert words[2] == "." or extra, words
        assert not extra or re.search(rf"^{extra[1]} = \[", (ROOT / "pyproject.toml").read_text(), flags=re.M), words
    elif words[0] == "tensorboard":
        assert words[1] == "--logdir" and (here / words[2]).is_dir(), words
    else:
        raise AssertionError(f"nobody knows how to run {words}")
    return ""


def run_python(item: Item) -> str:
    """Run a block that uses an export; blocks of the pages on extending have tests of their own."""
    if "onnxruntime" in item.text:
        return run_alone(item)
    if any(used in item.text for used in ("from_pretrained", "import lit_compress as lc", "hashlib")):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(item.text, item.where, "exec"), {})
    else:
        assert item.where.startswith("add_a"), f"{item.where}: nobody runs this code"
    return ""


def run_alone(item: Item) -> str:
    """Run a block where neither torch nor transformers nor lit_compress is; it prints a label for every text."""
    hidden = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'lit_compress')))\n"
    done = subprocess.run([sys.executable, "-c", hidden + item.text], capture_output=True, text=True)
    assert done.returncode == 0, f"{item.where}: {done.stderr}"
    labels = re.findall(r"-> (.+)", done.stdout)
    assert labels and len([line for line in item.text.splitlines() if line]) <= 10, f"{item.where}: {done.stdout}"
    (config,) = re.findall(r'"(\w+/config\.json)"', item.text)
    known = json.loads(Path(config).read_text())["id2label"].values()
    assert set(labels) <= set(known), f"{item.where}: {labels}"
    return done.stdout


@contextlib.contextmanager
def quick():
    """Leave out reloads in other processes, which take seconds and are tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
        patch.setattr("lit_compress.export.bench._fresh", lambda *_: iter(()))
        patch.setattr("lit_compress.models.embedded._docstring_splits", lambda cache: DOCSTRINGS)
        patch.setattr("lit_compress.run.workers.start_process", forks.start_process)
        yield
