"""README.md and docs/: every command runs, every option and link is there, outputs.md names every file and field.

A page is run as a reader would: from its first command to its last, in a folder with the files it names. Commands get
what makes them tiny: a net of two layers, a few rows, an epoch. A command that nobody knows how to run is a failure.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow.parquet as pq
import pytest
from tiny import WORDS, write_backbone

from lit_compress import methods
from lit_compress.__main__ import main
from lit_compress.data.datamodule import DataModule

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

# ------------------------------------------------------------------------------------------- what stands on a page


@dataclass(frozen=True)
class Item:
    """A command or a block of Python.

    Attributes:
        where: page and line.
        language: ``bash`` or ``python``.
        text: the command in one line, or the code.
        output: lines that the page shows below the command.
    """

    where: str
    language: str
    text: str
    output: tuple[str, ...] = ()


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Return (first line, language, text) of every fenced block; text outside has the language ``prose``."""
    found, language, start, lines = [], "prose", 1, []
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), "```end"], start=1):
        if line.startswith("```"):
            found.append((start, language, "\n".join(lines)))
            language, start, lines = (line[3:].strip() if language == "prose" else "prose"), number + 1, []
        else:
            lines.append(line)
    assert language in ("prose", "end"), f"{page}: a block is not closed"
    return found


def items(page: Path) -> list[Item]:
    """Return the commands and the Python blocks of a page, in order."""
    found: list[Item] = []
    for start, language, text in blocks(page):
        if language == "python":
            found.append(Item(f"{page.name}:{start}", language, text))
            continue
        lines = re.sub(r" *\\\n *", " ", text).split("\n")
        if language == "bash":
            commands = [(line, ()) for line in lines if line and not line.startswith("#")]
        elif language == "console":
            parts = [part.split("\n") for part in re.split(r"^\$ ", "\n".join(lines), flags=re.M)[1:]]
            commands = [(part[0], tuple(line for line in part[1:] if line.strip())) for part in parts]
        elif language in ("prose", "text", ""):
            pattern = r"\s*\$ (.*)|\s*(python -m lit_compress .*)| {4,}(lit_compress .*)"
            commands = [(next(filter(None, m.groups())), ()) for line in lines if (m := re.fullmatch(pattern, line))]
        else:
            commands = []
        found += [Item(f"{page.name}:{start}", "bash", *command) for command in commands]
    return found


def lit_compress_words(text: str) -> list[str] | None:
    """Return the arguments of a lit_compress command, also of one that torchrun starts; None if it is none."""
    words = shlex.split(text)
    if words[0] == "torchrun":
        return words[words.index("lit_compress") + 1 :]
    if words[:3] == ["python", "-m", "lit_compress"]:
        return words[3:]
    return words[1:] if words[0] == "lit_compress" else None


# ------------------------------------------------------------------------------------------- how a command becomes tiny

CLASSES = {
    "lpaf": "LPAF", "svd": "SVD", "fwsvd": "FWSVD", "losparse": "LoSparse", "losparse_bert": "LoSparse",
    "low_rank_1": "LowRankI", "low_rank_2": "LowRankII", "itp": "ITP", "movement": "Movement", "cofi": "CoFi",
    "cofi_losparse": "CoFiLoSparse", "sp3": "SP3", "magnitude": "Magnitude", "first_order": "FirstOrder",
    "platon": "PLATON", "quickstart": "LPAF", "second_order": "SecondOrder",
}  # fmt: skip
STAGES = ("dense", "distil", "prune", "retrain")
SHORT = {  # a schedule for a few steps
    **{
        name: {"start": "0.1", "end": "0.3", "interval": "1"}
        for name in ("LoSparse", "LowRankII", "ITP", "CoFiLoSparse")
    },
    "Movement": {"start": "0.1", "end": "0.3"},
    "PLATON": {"interval": "2", "start": "0.4", "end": "0.3"},
}
OF_TINY = {"5M": "8K", "8000": "48", "60": "6"}  # values for which the tiny net is too small
LIKE_TINY = ["--data.batch_size", "8", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


def given(words: list[str], option: str) -> str | None:
    """Return the last value of an option."""
    return next((words[i + 1] for i in reversed(range(len(words) - 1)) if words[i] == option), None)


def options_of(kind: type) -> dict[str, Any]:
    """Return the options of a class with their defaults, those it hands on to its bases too."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith(("lit_compress", "lightning")) and "__init__" in vars(base):
            for name, parameter in inspect.signature(base.__init__).parameters.items():
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) and name != "self":
                    found[name] = parameter.default
    return found


def method_and_task(words: list[str]) -> tuple[str, str]:
    """Return the class and the task of ``fit WORDS``; a recipe has both in its name."""
    recipe = (given(words, "--config") or "").removesuffix(".yaml")
    stem = max((name for name in CLASSES if recipe == name or recipe.startswith(f"{name}_")), key=len, default="")
    named = "docstrings" if recipe == "quickstart" else recipe.removeprefix(f"{stem}_") or "sst2"
    if any(word.startswith("--data.custom.") for word in words):
        named = "custom"
    return given(words, "--model") or CLASSES[stem], given(words, "--data.task") or named


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
    if task == "sst2" and teacher.exists():
        extra["--data.train_examples"] = "48"
        if given(words, "--model.backbone") is None:
            extra["--model.teacher"] = str(teacher)
    for name in options_of(getattr(methods, method)):
        if name in STAGES:
            extra |= {
                f"--model.{name}.epochs": "2" if name == "dense" else "1",
                f"--model.{name}.learning_rate": "3e-3",
            }
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


def one_process(words: list[str]) -> list[str]:
    """Return what brings a command for several devices to one."""
    return ["--trainer.devices", "1", "--trainer.strategy", "auto"] if given(words, "--trainer.devices") else []


def tiny(words: list[str], place: Path, teacher: Path) -> list[str]:
    """Return the arguments that are run for a documented command."""
    if {"--help", "--print_config"} & set(words):
        return words
    if words[0] == "fit":
        return tiny_fit(words, place, teacher)
    if words[0] in ("factorize", "analyze") and "--data.task" in words:
        path = [] if given(words, "--data.path") else ["--data.path", str(place / "data" / "sst2")]
        return [*words, *path, "--data.batch_size", "8"]
    return words


# ------------------------------------------------------------------------------------------- the files pages name


def rows_of(task: str, number: int) -> list[dict[str, Any]]:
    """Return rows of a task as the hub has them, of a few words."""
    record = DataModule(task).record
    found = []
    for i in range(number):
        words = [WORDS[(i * 7 + j * 3) % len(WORDS)] for j in range(3 + i % 5)]
        row: dict[str, Any] = {name: " ".join(words) for name in record.text}
        if record.kind == "tagging":
            row = {record.text[0]: words, record.label: [(i + j) % len(record.labels) for j in range(len(words))]}
        elif record.kind == "span_qa":
            start = len(words[0]) + 1
            row |= {"id": str(i), record.label: {"text": [words[1]], "answer_start": [start]}}
        elif record.kind == "summarization":
            row[record.label] = " ".join(words[:2])
        elif record.kind != "language_modelling":
            row[record.label] = i % len(record.labels) if record.labels else float(i % 6)
        found.append(row)
    return found


def write_rows(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Write JSON lines, a file per split."""
    folder.mkdir(parents=True)
    for split, some in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


def real_reviews(count: int) -> list[tuple[str, int]]:
    """Return sentences of film reviews and their stars from the real data, if LIT_COMPRESS_SHARED names it; else []."""
    file = Path(os.environ.get("LIT_COMPRESS_SHARED", "/nowhere")) / "data" / "glue" / "sst2" / "validation.parquet"
    if not file.is_file():
        return []
    table = pq.read_table(file, columns=["sentence", "label"]).slice(0, count).to_pylist()
    return [(row["sentence"].strip().replace('"', '""'), 5 if row["label"] else 1) for row in table]


def custom_files(place: Path) -> None:
    """Write the single files of the page on data."""
    rows = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(4 + i % 3)) for i in range(60)]

    def csv(name: str, header: str, lines: list[str]) -> None:
        (place / name).write_text("\n".join([header, *lines]) + "\n")

    made_up = [(text, 1 + i % 3) for i, text in enumerate(rows)]
    reviews = [(f'"{text}"', stars) for text, stars in real_reviews(60) or made_up]
    csv("reviews.csv", "review,stars", [f"{text},{stars}" for text, stars in reviews])
    csv("new_reviews.csv", "review", [text for text, _ in reviews[:5]])
    csv("scores.csv", "left,right,score", [f"{text},{rows[0]},{i % 7}" for i, text in enumerate(rows)])
    custom = {
        "tagged": [{"tokens": text, "tags": " ".join("OX"[j % 2] for j in range(len(text.split())))} for text in rows],
        "questions": [{"question": "the", "context": f"0 {text}", "answers": "0"} for text in rows],
        "articles": [{"article": text, "headline": text[:5]} for text in rows],
    }  # fmt: skip
    for name, some in custom.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


TASKS = ("wnli", "mrpc", "stsb", "squad", "squad_v2", "conll2003", "xsum", "docstrings")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: Path, tiny_data: Path) -> Path:
    """The folder with all that pages name but do not make."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("my_model", "finetuned"):
        shutil.copytree(tiny_backbone, folder / name)
    write_backbone(folder / "opt", "opt", "wikitext2")
    write_backbone(folder / "bart", "bart", "xsum")
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


# ------------------------------------------------------------------------------------------- running a page


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
    line = re.sub(r"[\u2500-\u257f]", " ", line)
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

    def run(self, item: Item) -> str:
        """Run one item in the present folder and return what it said."""
        if item.language == "python":
            return run_python(item)
        words = lit_compress_words(item.text)
        if words is None:
            return check_other(shlex.split(item.text), Path.cwd())
        return self.known.get(tuple(words)) or run_command(self.arguments(words))

    def check(self, item: Item) -> None:
        """Run one item; it must end well and say what the page shows."""
        said = self.run(item)
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
    if "from_pretrained" in item.text or "torch.export" in item.text:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(item.text, item.where, "exec"), {})
    else:
        assert item.where.startswith("add_a"), f"{item.where}: nobody runs this code"
    return ""


SHARED = (
    "python -m lit_compress fit --config quickstart.yaml",
    "python -m lit_compress fit --config lpaf_sst2.yaml",
    "python -m lit_compress export runs/lpaf-sst2 small_torch --format torch",
)


@pytest.fixture(scope="module")
def reader(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A reader who has made what several pages go on from."""
    found = Reader(place, tmp_path_factory.mktemp("base"))
    with quick():
        found.make(*SHARED)
    return found


@contextlib.contextmanager
def quick():
    """Leave out what takes seconds and is tested elsewhere: the reload in another process, timings, fine pictures."""
    import matplotlib
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context({"figure.dpi": 20, "savefig.dpi": 20}):
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        patch.setattr("lit_compress.export.folder.check_export", lambda net, path: 0.0)
        report = importlib.import_module("lit_compress.export.report")
        patch.setattr(report, "latency", functools.partial(report.latency, repeats=10))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if items(page)], ids=lambda page: page.stem)
def test_every_command_of_a_page_runs(page, reader, tmp_path, monkeypatch):
    monkeypatch.chdir(reader.folder(tmp_path / "here"))
    for item in items(page):
        with quick():
            reader.check(item)


@pytest.mark.slow
def test_tables_have_the_rows_that_are_printed(reader):
    said = reader.known[tuple(lit_compress_words(SHARED[0]) or ())]
    printed = {skeleton(line) for line in said.splitlines()}
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith(("│", "┃")):
                assert skeleton(line) in printed, f"{page.name}: {line}"


# ------------------------------------------------------------------------------------------- files and fields


def field_names(value: Any, without: tuple[str, ...]) -> set[str]:
    """Return the keys of nested dicts, but what is below the keys ``without``."""
    if not isinstance(value, dict):
        return set()
    below = (field_names(child, without) for key, child in value.items() if key not in without)
    return set(value).union(*below)


@pytest.mark.slow
def test_outputs_names_every_field_and_file(reader):
    text = (ROOT / "docs" / "outputs.md").read_text(encoding="utf-8")
    words = set(re.findall(r"[\w.]+", text))
    run, out = reader.base / "runs" / "lpaf-sst2", reader.base / "small_torch"
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
            assert name in words or path.is_dir(), f"docs/outputs.md does not name {path.relative_to(folder)}"


def test_options_exist():
    known = set()
    for name in methods.__all__:
        known |= nested("model", options_of(getattr(methods, name)))
    known |= nested("data", options_of(DataModule)) | nested("trainer", options_of(pl.Trainer))
    for page in PAGES:
        found = set(re.findall(r"--((?:model|data|trainer)\.[a-z_0-9.]*[a-z_0-9])", page.read_text(encoding="utf-8")))
        assert found - {"model.densty"} <= known, f"{page.name}: {sorted(found - known)}"


def nested(prefix: str, options: dict[str, Any]) -> set[str]:
    """Return the names of options and of the fields of those that are dataclasses."""
    return {f"{prefix}.{name}" for name in options} | {
        f"{prefix}.{name}.{field.name}"
        for name, default in options.items()
        if is_dataclass(default)
        for field in fields(default)
    }


# ------------------------------------------------------------------------------------------- form


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


WANTED = ("getting_started", "methods", "tasks_and_data", "outputs", "distributed", "resume", "export", "add_a_method",
          "add_a_task", "add_an_architecture", "glossary", "house", "benchmarks")  # fmt: skip


def test_every_page_is_there():
    for name in WANTED:
        assert ROOT / "docs" / f"{name}.md" in PAGES
    linked = set(re.findall(r"\(docs/(\w+)\.md", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert linked == {page.stem for page in PAGES[1:]}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    prose = "\n".join(text for _, language, text in blocks(page) if language == "prose")
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_file(), f"{page.name}: no {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: no heading {target}"


def test_every_command_is_known():
    """Nothing is skipped: each command is of lit_compress or one of the few that are only checked."""
    others = {"make", "pip", "tensorboard"}
    found = [item for page in PAGES for item in items(page) if item.language == "bash"]
    assert len(found) > 40
    for item in found:
        assert lit_compress_words(item.text) or item.text.split()[0] in others, f"{item.where}: {item.text}"


def test_the_map_has_every_room():
    text = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    rooms = set(re.findall(r"^  (\w+)/ ", text, flags=re.M))
    assert len(rooms) == 14
    if (ROOT / "lit_compress" / "run").is_dir():
        assert rooms == {path.parent.name for path in (ROOT / "lit_compress").glob("*/__init__.py")}


def test_blocks_have_a_language():
    for page in PAGES:
        for start, language, _ in blocks(page):
            assert language in ("prose", "bash", "console", "python", "text", "yaml", "end"), f"{page.name}:{start}"


def test_every_method_has_a_section():
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.M)
    for name in set(methods.__all__) - {"Method"}:
        assert f"`{name}`" in text, name
    for section in sections:
        if "python -m lit_compress fit" in section:
            title = section.partition("\n")[0]
            assert "```text" in section, f"{title}: no equation"
            for part in ("Reached here", "Not for"):
                assert part in section, f"{title}: no '{part}'"


TERMS = ("site", "density", "stage", "teacher", "export", "recipe", "rank", "factor", "gate", "score", "sensitivity",
         "Fisher information", "calibration", "distillation", "structure", "budget", "row", "neuron", "head", "kept",
         "stored", "merged", "latency", "dev set", "warm-up", "perplexity", "tied", "hard concrete", "Lagrangian",
         "residual stream", "sub-layer", "block", "backbone", "report", "run", "task", "method")  # fmt: skip


def test_glossary_has_every_term():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    titles = [title for line in re.findall(r"^### (.*)$", text, flags=re.M) for title in line.split(", ")]
    assert set(TERMS) <= set(titles)
    assert len(titles) == len(set(titles))
    heads = re.findall(r"^### (.*)$", text, flags=re.M)
    assert heads == sorted(heads, key=str.lower)


# ------------------------------------------------------------------------------------------- code on how to extend


def python_blocks(name: str) -> list[str]:
    return [text for _, language, text in blocks(ROOT / "docs" / f"{name}.md") if language == "python"]


def test_the_record_of_a_task_is_one():
    (code,) = python_blocks("add_a_task")
    task = eval(code, {"Task": type(DataModule("sst2").record)})
    assert task.num_labels == 6


def test_the_record_of_an_architecture_is_python():
    module = importlib.import_module("lit_compress.models.architectures")
    shown = {}
    for code in python_blocks("add_an_architecture"):
        shown |= eval(compile(f"{{{code}}}", "add_an_architecture.md", "eval"), vars(module).copy())
    assert shown == {name: module.ARCHITECTURES[name] for name in ("qwen3", "modernbert")}


@pytest.mark.slow
def test_the_method_of_the_docs_works(tiny_backbone, tiny_data, tmp_path, monkeypatch):
    """Its file, its test, and a whole run of it."""
    method, test = python_blocks("add_a_method")
    for code in (method, test):
        compile(code, "add_a_method.md", "exec")
    if not (ROOT / "lit_compress" / "stages" / "unstructured.py").is_file():
        return  # the page is of the layout with rooms
    (tmp_path / "increase.py").write_text(method)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace: dict[str, Any] = {}
    exec(test.replace("lit_compress.methods.increase", "increase"), namespace)
    namespace["test_the_score_is_what_the_paper_says"]()
    words = ["fit", "--model", "increase.Increase", "--data.task", "sst2", "--data.path", str(tiny_data), *LIKE_TINY,
             "--model.backbone", str(tiny_backbone), "--model.dense.epochs", "1", "--model.prune.epochs", "1",
             "--run_dir", str(tmp_path / "run")]  # fmt: skip
    with quick():
        said = run_command(words)
    assert "Increase on sst2" in said, said
    assert os.path.exists(tmp_path / "run" / "export" / "model.safetensors")
