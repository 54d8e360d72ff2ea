"""The command line: every mistake is one line with exit code 2, before anything is written."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from typing import Union

import pytest
import yaml
from jsonargparse import ArgumentParser
from mistakes import fails, fit

from lit_compress import __main__ as main_of
from lit_compress.__main__ import COMMANDS, main
from lit_compress.cli import commands  # noqa: F401  as after a first command
from lit_compress.cli.lines import read_line
from lit_compress.cli.options import CommandLine, _whole_first
from lit_compress.cli.recipes import FOLDER

CONFIG = ("fit", "--config", "lpaf_sst2.yaml")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("fitt",), "unknown command 'fitt'; did you mean 'fit'?"),
        (("fit",), "no method given"),
        ((*CONFIG, "--seed_everything", "-1"), "seed_everything: -1 is not in [0, 4294967295]; nearest valid 0"),
        ((*CONFIG, "--model.rank", "0"), "error: model.rank: 0 is below 1, the smallest valid value"),
        ((*CONFIG, "--model.retrain.learning_rate=-1"), "error: model.retrain.learning_rate: -1.0 is not above 0"),
        (("fit", "lpaf_sst2.yaml"), "'lpaf_sst2.yaml' has no option before it; --config lpaf_sst2.yaml"),
        (("fit", "--config"), "config: the value is missing"),
        (("fit", "--model", "Lpaf"), "unknown method 'Lpaf'; did you mean 'LPAF'?"),
        (
            ("fit", "--model", "SP3", "--model.retrain.epochs", "1"),
            "unknown option 'model.retrain.epochs' for SP3; its options: model.backbone, model.budget, model.dense,",
        ),
        ((*CONFIG, "--model.density", "0.2", "--model.rank", "30"), "only one of them can decide the size"),
        (
            (*CONFIG, "--model.lr", "1"),
            "unknown option 'model.lr'; did you mean 'model.dense.learning_rate' or 'model.prune.learning_rate' or",
        ),
        ((*CONFIG, "--trainer.max_epochs", "3"), "3 has no effect in a fit; set model.<stage>.epochs"),
        ((*CONFIG, "--model.density", "0"), "model.density: 0.0 is not in (0, 1]; nearest valid value 0.01"),
        ((*CONFIG, "--data.batch_size", "0"), "data.batch_size: 0 "),
        ((*CONFIG, "--checkpoint_every", "0"), "checkpoint_every: 0 is below 1"),
        ((*CONFIG, "--model.prune.start", "0.8"), "0.8 + 0.3 leave no step to prune"),
        ((*CONFIG, "--model.backbone", "no-such/model"), "without network give the folder"),
        (("validate",), "TARGET: it is missing; see evaluate --help"),
        (("report", "RUN", "--device", "cpu"), "trainer.accelerator: report does not read it; leave it out"),
        (("list", "--folde", "runs"), "unknown option 'folde'; did you mean 'folder'?"),
        (
            ("export", "RUN", "OUT", "--format", "onx"),
            "format: 'onx' is not valid; did you mean 'onnx'?",
        ),
        (("fit", "--model.backbone", "null"), "model.backbone: it is null; give a model (./null for a folder"),
        ((*CONFIG, "--ckpt_path", "x.ckpt"), "ckpt_path: 'x.ckpt' is not a valid value of last"),
        (
            ("fit", "--model", "CoFi", "--model.prune.init", "finetuned", "--model.distil.epochs", "4"),
            "model.distil.epochs: the run has no stage distil, only dense, prune, retrain; leave it out",
        ),
        ((*CONFIG, "--data.custom.labels", "[1,x]"), """quote it inside of the list: '["1"]'"""),
    ],
)
def test_mistakes_are_one_line(args, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in fails(capsys, *args)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_stage_that_does_not_run_may_have_no_epochs(tiny_backbone, tiny_data):
    """As comparisons say it of CoFi."""
    words = ["--model", "CoFi", "--model.prune.init", "finetuned", "--model.distil.epochs", "0"]
    words += ["--model.backbone", str(tiny_backbone), "--data.task", "sst2", "--data.path", str(tiny_data)]
    stages = CommandLine(read_line("fit", words)).ready().method.stages()
    assert [stage.name for stage in stages] == ["dense", "prune", "retrain"]


def test_stages_of_no_epochs(capsys, short_run, tmp_path):
    """What a stage is built with is what it leaves, and its metric is that before training; pruning needs steps."""
    main(fit(short_run, tmp_path / "run", "--model.retrain.epochs", "0", "--trainer.logger", "false"))
    dense, retrain = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert retrain["steps"] == 0 < dense["steps"] and retrain["metric"] == retrain["initial"] != dense["metric"]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["compressed"]["metric"] == pytest.approx(retrain["metric"]["val/accuracy"])
    assert 0.4 < report["compressed"]["density"] <= 0.5
    line = fails(capsys, "fit", "--model", "LPAF", *short_run, "--model.prune.epochs", "0")
    assert "prune.epochs: 0 is below 1, the smallest valid value" in line


def test_a_schedule_is_checked_for_all_processes(capsys, tiny_backbone, tiny_data, tmp_path):
    """100 examples in batches of 8: 13 steps on one process, 2 on seven, with nothing between start and end."""
    args = [*CONFIG, "--model.backbone", str(tiny_backbone), "--data.path", str(tiny_data), "--data.batch_size", "8",
            "--trainer.accelerator", "cpu", "--trainer.strategy", "ddp", "--trainer.devices", "7",
            "--model.prune.epochs", "1", "--model.prune.start", "0.3", "--model.prune.end", "0.6",
            "--run_dir", str(tmp_path / "run")]  # fmt: skip
    assert "leave no step of total=2" in fails(capsys, *args)
    assert not (tmp_path / "run" / "dense").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [["--trainer.callbacks", "Timer"], ["--trainer.callbacks+=Timer"]])
def test_callbacks_whose_defaults_are_no_plain_values_are_written(given, tiny_backbone):
    """Lightning's Timer has an enumeration's member where its type says a string."""
    options = ["--model", "SVD", "--model.backbone", str(tiny_backbone), "--data.task", "sst2", *given]
    made = CommandLine(read_line("fit", options)).dump()["trainer"]["callbacks"]
    assert yaml.safe_load(yaml.safe_dump(made)) == made
    timer = made[0] if isinstance(made, list) else made
    assert timer["init_args"]["interval"] == "step"


def test_a_help_text_or_a_mistake_imports_nothing_heavy():
    code = """import sys
from lit_compress.__main__ import COMMANDS, main
for words in [*([name, "--help"] for name in COMMANDS), ["fit", "--model.densty", "1"], ["compare", "--seed", "1"]]:
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code == (0 if words[-1] == "--help" else 2), words
print({"torch", "transformers", "lightning"} & set(sys.modules))"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip().endswith("set()")


def test_the_collector_rests_while_a_command_is_imported(monkeypatch):
    name = "lit_compress.cli.commands"
    assert main_of._commands() is sys.modules[name]
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(main_of, "import_module", lambda given: (given, gc.isenabled()))
    assert main_of._commands() == (name, False)
    assert gc.isenabled() and gc.get_freeze_count() > 10_000
    gc.unfreeze()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_text_has_every_option_once(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = re.findall(r"^  (--[\w.]+)", said := capsys.readouterr().out, flags=re.M)
    assert len(options) == len(set(options))
    assert not re.search(r"default [A-Z_]+\)", said)  # a name of the program


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_the_usage_is_shown_without_a_command(args, capsys):
    main(args)
    said = capsys.readouterr().out
    assert said.startswith("usage: python -m lit_compress COMMAND") and "quickstart.yaml" in said


@pytest.mark.parametrize("args", [[], ["--help"], ["fit", "--config", "lpaf_sst2.yaml"]])
def test_a_python_without_the_packages_is_one_line(args):
    """As in a shell that has not activated the environment of `make quickstart`."""
    line = [sys.executable, "-S", "-m", "lit_compress", *args]
    said = subprocess.run(line, cwd=FOLDER.parents[0], capture_output=True, text=True)
    assert said.returncode == 2 and said.stderr.startswith("error: this Python has no package '"), said.stderr
    assert "activate" in said.stderr and said.stderr.count("\n") == 1


@pytest.mark.parametrize(("given", "kind"), [("1", int), ("50", int), ("1.0", float), ("0.5", float), ("1e-1", float)])
def test_a_whole_number_is_no_fraction(given, kind):
    """`--trainer.limit_train_batches 1` was 1.0, all batches, where a library had made this type before Lightning."""
    for hint in (Union[float, int, None], Union[int, float, str, None]):  # noqa: UP007  as libraries write them
        parser = ArgumentParser()
        parser.add_argument("--most", type=_whole_first(hint))
        assert type(parser.parse_args([f"--most={given}"]).most) is kind


def test_a_limit_of_batches_counts_the_steps_of_a_plan(short_run, capsys):
    main(["plan", "--model", "LPAF", *short_run, "--trainer.limit_train_batches", "2"])
    assert "dense 2 epochs = 4 steps, prune 3 epochs = 6 steps, retrain 2 epochs = 4 steps" in capsys.readouterr().out


@pytest.mark.parametrize(("terminal", "given", "bars", "products"), [(True, "500", "", "500"), (False, "", "1", "64")])
def test_what_is_set_unless_the_user_sets_it(terminal, given, bars, products, monkeypatch):
    """Bars of other libraries move in a terminal only; 64 products of oneDNN are kept, not 1,024."""
    kept = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    for name in (kept, "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, given)  # and as it was afterwards
        monkeypatch.delenv(name)
    if given:
        monkeypatch.setenv(kept, given)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    main(["--version"])
    assert (os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", ""), os.environ[kept]) == (bars, products)
