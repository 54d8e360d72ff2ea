"""The benchmarks: every study is whole, its scripts start and know what is done, its pages are those of its results."""

from __future__ import annotations

import itertools
import json
import random
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import common, tables
from benchmarks.decoder.search import best_sizes
from benchmarks.embedding import rerank

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
RESULTS = sorted(HERE.glob("*/results/**/*.json"))
TRAIN = ["fwsvd", "tasks", "architectures", "second_order", "second_order/tasks",
         "size", "size/int8", "architectures/decoders", "embedding"]  # fmt: skip
STARTED = [path for path in sorted(HERE.glob("*/*.py")) if '__name__ == "__main__"' in path.read_text()]
SCRIPTS = [f"{path.parent.name}/{path.stem}".removesuffix("/run") for path in STARTED]
WHERE = {"factorize": 5, "truncation": 5, "sweep": 5}  # word with the folder that a command writes


def run(script: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Run a script in this process; a command of its own fails."""

    def refuse(*args: Any, **_: Any) -> None:
        raise AssertionError(f"ran {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(sys, "argv", [script, *words])
    import_module(common.module(script)).main()


def listed(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], which: str) -> set[str]:
    """Return the names of the runs and analyses that a script would make."""
    run(script, monkeypatch, "--list", which)
    names = set()
    for line in capsys.readouterr().out.splitlines():
        words = shlex.split(line)
        assert words[:2] == ["python", "-m"] and words[2] in ("lit_compress", "benchmarks.analysis")
        names.add(Path(words[words.index("--run_dir") + 1] if words[3] == "fit" else words[WHERE[words[3]]]).name)
    return names


@pytest.mark.parametrize("study", tables.STUDIES)
def test_a_study_is_whole(study: str) -> None:
    for name in ("tables.py", "findings.md", "README.md"):
        assert (HERE / study / name).read_text().strip(), f"{study} has no {name}"
    assert list((HERE / study / "results").glob("**/*.json"))


def test_every_folder_is_a_study() -> None:
    assert {path.parent.name for path in HERE.glob("*/tables.py")} == set(tables.STUDIES)
    assert {*TRAIN} < {*SCRIPTS}


def test_pages_are_those_of_the_results_and_their_links_lead_somewhere() -> None:
    for path, text in tables.pages().items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} is stale: python -m benchmarks.tables"
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (path.parent / target).exists(), f"{path}: {target}"


def test_tables_have_no_empty_cells() -> None:
    """A cell without a number has a dash, whose meaning the page says; the first screens have no dash either."""
    for path in [ROOT / "README.md", HERE / "README.md", *HERE.glob("*/README.md")]:
        lines = path.read_text().splitlines()
        rows = [line for line, above in zip(lines[1:], lines, strict=False) if {line[:1], above[:1]} == {"|"}]
        cells = {cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)[1:-1]}
        assert "" not in cells, path
        assert "-" not in cells or path.parent.parent == HERE, path


def test_the_summary_is_one_screen() -> None:
    assert len((HERE / "README.md").read_text().splitlines()) <= 40


def test_claims_are_decided() -> None:
    claims = (HERE / "claims.md").read_text().splitlines()[2:]
    assert claims
    verdicts = [line.split(" | ")[1] for line in claims]
    assert all(text.startswith(("held", "not held", "within the noise", "open")) for text in verdicts)


def test_results_say_where_they_come_from() -> None:
    assert RESULTS
    for path in RESULTS:
        result = json.loads(path.read_text())
        assert result["commit"] and result["versions"]["torch"] and result["hardware"]["cpu"], path
        if "records" in result:
            assert result["config"]["model"]["class_path"], path


OF_REMOVED_OPTIONS = (  # whose results stay
    "kfac-refit-", "kfac-true-", "whole-", "table-", "half-",
    *(f"{task}fisher-both-" for task in ("", "mrpc-", "stsb-", "cola-", "qnli-", "conll2003-", "squad-")),
)  # fmt: skip


@pytest.mark.parametrize("script", TRAIN)
def test_a_script_knows_what_is_done(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = (path.stem for path in common.results(script).glob("*.json"))
    done = {name for name in names if not name.startswith(OF_REMOVED_OPTIONS)}
    made = listed(script, monkeypatch, capsys, "all")
    assert done <= made
    left = listed(script, monkeypatch, capsys, "missing")
    assert not done & left
    assert {name for name in made if not name.startswith("dense-")} <= done | left


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_starts(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(script, monkeypatch, "--help")
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert f"python -m {common.module(script)}" in shown


def test_folders_are_needed_to_train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("fwsvd", monkeypatch)
    assert "--backbone is needed" in capsys.readouterr().err


def test_results_name_no_folder_of_a_machine() -> None:
    assert not [path.name for path in RESULTS if re.search(r': "/\w', path.read_text())]


def test_a_fit_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def command(options: Any, *words: object) -> float:
        calls.append(words)
        folder = Path(str(words[words.index("--run_dir") + 1]))
        folder.mkdir(parents=True)
        config = {"run_dir": "x", "data": {"backbone": "/a/minilm", "path": "/b/sst2"}}
        config["model"] = {"init_args": {"backbone": "/a/minilm", "teacher": "/c/dense/net"}}
        (folder / "report.json").write_text(json.dumps({"task": "sst2", "config": config}))
        (folder / "stages.json").write_text(json.dumps([{"name": "dense", "steps": 0, "teacher": "/c"}]))
        return 12.0

    monkeypatch.setattr(common, "command", command)
    words = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results"), "--backbone", "b", "--data", "d"]
    options = common.parser("fwsvd", "doc", *common.TRAINED).parse_args(words)
    net = common.dense_net(options, "sst2", "--data.task", "sst2", epochs=1, rate=0.1)
    assert net == tmp_path / "work" / "dense-sst2" / "dense" / "net"
    for made in (True, False):
        assert common.fit(options, "one", "--model", "SVD", teacher=lambda: net, more=lambda run: {"x": 1}) is made
    assert len(calls) == 2 and calls[1][-6:-4] == ("--model.teacher", net)
    result = json.loads((tmp_path / "results" / "one.json").read_text())
    assert (result["name"], result["x"], result["memory_mib"], result["task"]) == ("one", 1, 12.0, "sst2")
    assert result["config"]["model"]["init_args"] == {"backbone": "minilm", "teacher": "dense"}
    assert result["records"] == [{"name": "dense", "steps": 0}]


def test_the_search_has_the_least_losses_of_all_that_fit() -> None:
    draw = random.Random(0)
    for _ in range(50):
        losses = [[draw.random() for _ in range(3)] for _ in range(4)]
        prices = [[draw.randint(0, 6) for _ in range(3)] for _ in range(4)]
        cost = {
            options: sum(map(list.__getitem__, prices, options)) for options in itertools.product(range(3), repeat=4)
        }
        if fit := [options for options in cost if cost[options] <= 9]:
            least = min(fit, key=lambda options: sum(map(list.__getitem__, losses, options)))
            assert best_sizes(losses, prices, 9) == [*least]
        else:
            with pytest.raises(ValueError, match="nothing costs 9 or less"):
                best_sizes(losses, prices, 9)


def test_the_sentence_with_the_answer_is_relevant(tmp_path):
    text = "It rained. The match was moved. Nobody came."
    answers = [{"answer_start": [text.index(word)], "text": [word]} for word in ("moved", "The", "It")]
    table = pa.table({"context": [text] * 3 + ["One."], "question": list("abcd"), "answers": [*answers, answers[2]]})
    pq.write_table(table, tmp_path / "train.parquet")
    made = list(rerank.rows(tmp_path / "train.parquet", 9))
    assert [[row["label"] for row in rows] for rows in made] == [[0, 1, 0], [0, 1, 0], [1, 0, 0]]
    assert [row["sentence"] for row in made[0]] == ["It rained.", "The match was moved.", "Nobody came."]
