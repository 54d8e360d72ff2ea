"""No option and no recipe of version 0.2.0 changes or is lost without a word.

Version 0.2.0 wrote golden/options.json. An option that is there is an option today with the same default, or a line
refuses it. A recipe gives every option that is left the same value as before.
"""

import functools
import json
import re
from inspect import signature
from pathlib import Path

import pandas as pd
import pytest
import yaml
from mistakes import fails
from quick import quick_runs
from tiny import write_rows

from lit_compress import methods
from lit_compress.__main__ import COMMANDS, OLD, main
from lit_compress.cli import catalogue
from lit_compress.cli.lines import read_line
from lit_compress.cli.options import CommandLine
from lit_compress.cli.recipes import shipped
from lit_compress.utils.removed import REMOVED, VALUES, removed

FROZEN = json.loads((Path(__file__).parent / "golden" / "options.json").read_text())
POSITIONS = {"export": ("run", "out"), "factorize": ("model", "out"), "bench": ("out",)}
FOREIGN = ("trainer.", "config", "help", "print_config")  # Lightning's own
# option -> its default in version 0.2.0 and the one of today, which the changelog names
CHANGED = {"export.dtype": ("float32", "auto"), "model.recompute": (None, False)}
OF_RECIPES = {  # of one recipe; what is not there is the default
    "quickstart.yaml": {
        "model.dense.epochs": (4, "not there"), "model.prune.epochs": (2, 1),
        "data.task": ("docstrings", "custom"), "model.task": ("docstrings", "custom"),
        "data.backbone": ("embedded", "runs/made/bert"), "model.backbone": ("embedded", "runs/made/bert"),
    },
    "llm_pruner_wikitext2.yaml": {"model.prune.learning_rate": (1e-4, "not there")},  # that of all weights
}  # fmt: skip


def values(line):
    """What a parsed command line gives every option but Lightning's, by dotted name."""
    (dumped,) = pd.json_normalize([line.dump()]).to_dict("records")
    return {name.replace(".init_args", ""): dumped[name] for name in sorted(dumped) if not name.startswith(FOREIGN)}


def values_of(*words):
    return values(CommandLine(read_line("plan", words)))


@functools.cache
def defaults(method):
    return values_of("--model", method, "--data.task", "sst2")


@pytest.fixture(scope="module", autouse=True)
def quick():
    with quick_runs():
        yield


def test_every_command_has_its_options_or_refuses_them(capsys):
    for command, names in FROZEN["commands"].items():
        command = OLD.get(command, [command])[0]
        if command not in COMMANDS:
            assert f"unknown command '{command}'" in fails(capsys, command, *(f"--{name}=1" for name in names[:1]))
            continue
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known = set(re.findall(r"--([a-z]\w*(?:\.\w+)*)", capsys.readouterr().out))
        for name in sorted(set(names) - known):
            data = () if command in ("bench", "list") else ("--data.task", "sst2")
            line = fails(capsys, command, *POSITIONS.get(command, ()), *data, f"--{name}=1")
            assert name.rpartition(".")[2] in line, line


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_option_is_refused_in_one_line(name, capsys):
    typed, method = typed_for(name)
    line = fails(capsys, "plan", "--model", method, "--data.task", "sst2", f"--{typed}", "1")
    assert line == f"error: {removed(typed)}"


OF_A_LIST = [name for name in VALUES if name not in ("backbone", "task")]  # options with a list of valid values


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in OF_A_LIST for value in VALUES[name]])
def test_a_removed_value_is_refused_in_one_line(name, value, capsys):
    typed, method = typed_for(name)
    assert f"{typed}: '{value}' is not a valid value of " in fails(
        capsys, "plan", "--model", method, "--data.task", "sst2", f"--{typed}", value
    )


@pytest.mark.parametrize("method", FROZEN["methods"])
def test_a_method_has_its_defaults(method):
    assert changed(FROZEN["methods"][method], defaults(method)) == {}


def test_a_config_of_version_0_2_loads(tmp_path):
    """Options that were removed are there with the values that are always used now."""
    config = {}
    for name, value in FROZEN["methods"]["SecondOrder"].items():
        if name.startswith(("model.", "export.")) and not name.endswith(("class_path", "task")):
            *path, last = name.split(".")
            place = config
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value
    config["model"] = {"class_path": "SecondOrder", "init_args": config["model"]}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    now = values_of("--config", str(tmp_path / "old.yaml"), "--data.task", "sst2")
    assert changed(FROZEN["methods"]["SecondOrder"], now) == {}


@pytest.mark.parametrize("recipe", sorted({*FROZEN["recipes"], *shipped()}))
def test_a_recipe_has_its_values_and_makes_its_run(recipe, hub, tiny_backbone, tmp_path, monkeypatch):
    line, intended = CommandLine(read_line("fit", ["--config", recipe])), OF_RECIPES.get(recipe, {})
    usual = defaults(line.config.model.class_path.rpartition(".")[2])
    given = {name: value for name, value in values(line).items() if name not in usual or usual[name] != value}
    assert recipe not in FROZEN["recipes"] or changed(FROZEN["recipes"][recipe], given) == intended
    hub.add("sentence-transformers/all-MiniLM-L6-v2", tiny_backbone)  # it says itself how it pools
    write_rows(tmp_path / "runs" / "made" / "areas", train=[{"text": "a film", "area": area} for area in "ab"])
    monkeypatch.chdir(tmp_path)  # the files of the quickstart are there
    parts = line.build()
    assert parts.method.task.name == parts.data.record.name
    assert (parts.method.stages()[0].name == "dense") == (parts.method.teacher is None)


def typed_for(name):
    """Return an option by its last part, in full, and a method that had it."""
    pairs = ((option, method) for method, names in FROZEN["methods"].items() for option in names)
    others = tuple(f".{other}" for other in REMOVED if other.endswith(f".{name}"))  # have lines of their own
    found = (pair for pair in pairs if f".{pair[0]}".endswith(f".{name}") and not pair[0].endswith(others))
    return next(found, (name, "SVD"))  # of a command alone


def changed(before, now):
    """Return the values that differ, or are lost: {option: (before, now)}; an option may be new."""
    lost = "not there"
    names = [name for name in before if removed(name) is None]
    pairs = {name: (before[name], now.get(name, lost)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and pair != CHANGED.get(name)}


def test_the_catalogue_names_every_method():
    """It reads the source alone, so it is compared with what is imported."""
    assert set(catalogue.methods()) == set(methods.__all__) - {"Method"}
    for name in catalogue.methods():
        known = set(signature(getattr(methods, name)).parameters)
        assert {option.split(".")[1] for option in catalogue.of_method(name)} == known - {"task"}
