"""The command line: every mistake is one line with exit code 2, before anything is written."""

from __future__ import annotations

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

from lit_compress import methods
from lit_compress.__main__ import COMMANDS, main
from lit_compress.cli.options import CommandLine, _whole_first
from lit_compress.cli.recipes import FOLDER, find_config

CONFIG = ("fit", "--config", "lpaf_sst2.yaml")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("fitt",), "unknown command 'fitt'; did you mean 'fit'?"),
        (("fit", "--config", "lpaf_sst3.yaml"), "'lpaf_sst3.yaml'; did you mean 'lpaf_sst2.yaml'?"),
        (("fit",), "no method given"),
        (("fit", "--print_config"), "no method given"),
        ((*CONFIG, "--seed_everything", "-1"), "seed_everything: -1 is not in [0, 4294967295]; nearest valid 0"),
        ((*CONFIG, "--model.rank", "0"), "error: model.rank: 0 is below 1, the smallest valid value"),
        ((*CONFIG, "--model.retrain.learning_rate=-1"), "error: model.retrain.learning_rate: -1.0 is not above 0"),
        (("fit", "lpaf_sst2.yaml"), "'lpaf_sst2.yaml' has no option before it; --config lpaf_sst2.yaml"),
        (("fit", "--config"), "no file or shipped config is named after --config"),
        (("fit", "--model", "Lpaf"), "unknown method 'Lpaf'; did you mean 'LPAF'?"),
        (
            ("fit", "--model", "SP3", "--model.retrain.epochs", "1"),
            "SP3 has no stage retrain; its stages: dense, prune",
        ),
        ((*CONFIG, "--model.density", "0.2", "--model.rank", "30"), "only one of them can decide the ranks"),
        (("fit", "--model", "SVD", "--model.density", "0.2", "--model.rank_ratio", "0.3"), "only one of them"),
        ((*CONFIG, "--data.task", "sst3"), "data.task: unknown task 'sst3'; did you mean 'sst2'?"),
        ((*CONFIG, "--model.densty", "0.3"), "unknown option 'model.densty'; did you mean 'model.density'?"),
        (
            (*CONFIG, "--model.lr", "1"),
            "unknown option 'model.lr'; every stage has its own: model.dense.learning_rate, model.prune.learning_rate, "
            "model.retrain.learning_rate",
        ),
        ((*CONFIG, "--epochs", "1"), "unknown option 'epochs'; every stage has its own: model.dense.epochs, "),
        ((*CONFIG, "--model.prune.scor", "signed"), "did you mean 'model.prune.score'?"),
        ((*CONFIG, "--model.prune.score", "sign"), "model.prune.score: 'sign' is not a valid value of"),
        ((*CONFIG, "--trainer.max_epoch", "3"), "did you mean 'trainer.max_epochs'?"),
        ((*CONFIG, "--trainer.max_epochs", "3"), "trainer.max_epochs: 3 would hold for every stage"),
        ((*CONFIG, "--trainer.enable_checkpointing", "false"), "trainer.enable_checkpointing: False has no effect"),
        ((*CONFIG, "--model.density", "0"), "model.density: 0.0 is not in (0, 1]; nearest valid value 0.01"),
        ((*CONFIG, "--model.density", "abc"), "model.density: 'abc' is not a valid float"),
        ((*CONFIG, "--data.batch_size", "0"), "data.batch_size: 0 "),
        ((*CONFIG, "--checkpoint_every", "0"), "checkpoint_every: 0 is below 1"),
        ((*CONFIG, "--model.prune.start", "0.8"), "0.8 + 0.3 leave no step to prune"),
        ((*CONFIG, "--model.backbone", "./nowhere"), "no folder './nowhere'"),
        ((*CONFIG, "--model.backbone", "no-such/model"), "without network give the folder"),
        (("predict", "/nowhere"), "no folder '/nowhere'"),
        (("validate",), "TARGET: it is missing; see evaluate --help"),
        (
            ("export", "RUN", "OUT", "--format", "onx"),
            "format: 'onx' is not valid; did you mean 'onnx'?",
        ),
        (
            ("export", "RUN", "OUT", "--format", "torch"),
            "--format 'torch': this value was removed in version 0.3; --format onnx writes a program",
        ),
        ((*CONFIG, "--export.format", "torch"), "export.format 'torch': this value was removed in version 0.3;"),
        (("export", "/nowhere", "/tmp/out"), "'/nowhere' is not a run folder"),
    ],
)
def test_mistakes_are_one_line(args, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in fails(capsys, *args)
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("model: {class_path: lit_compress.methods.LPAF\n", "mine.yaml' is not readable YAML: while parsing"),
        ("modl: {class_path: x}\n", "unknown option 'modl"),
        ("model: {class_path: lit_compress.methods.Nope}\n", "unknown method 'lit_compress.methods.Nope'"),
        (
            "model: {class_path: lit_compress.methods.LPAF, init_args: {prune: {epoch: 3}}}\n",
            "did you mean 'model.prune.epochs'",
        ),
        ("model: {class_path: lit_compress.methods.LPAF, init_args: {densty: 3}}\n", "did you mean 'model.density'"),
    ],
)
def test_mistakes_in_a_config_are_one_line(content, words, capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text(content)
    assert words in fails(capsys, "fit", "--config", tmp_path / "mine.yaml")


def test_no_saving_rank_is_refused_before_training(capsys, short_run, tmp_path):
    line = fails(capsys, *fit(short_run, tmp_path / "run", "--model.density", "null", "--model.rank", "22"))
    assert "model.rank: 22 makes no matrix smaller; the largest rank that does is 21" in line
    assert not (tmp_path / "run").exists()


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


def test_config_names_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("lpaf_sst2.yaml") == find_config("lpaf_sst2") == (FOLDER / "lpaf.yaml", "sst2")
    (tmp_path / "lpaf_sst2.yaml").write_text("mine")
    assert find_config("lpaf_sst2.yaml") == (tmp_path / "lpaf_sst2.yaml", None)


@pytest.mark.parametrize("method", [name for name in methods.__all__ if name != "Method"])
def test_options_of_a_method_may_stand_before_it(method, tiny_backbone):
    """The defaults are the method's, wherever it is named."""
    options, name = ["--model.backbone", str(tiny_backbone), "--data.task", "sst2"], ["--model", method]
    first, last = (CommandLine(args, "fit").dump() for args in ([*name, *options], [*options, *name]))
    assert first == last and first["model"]["class_path"].endswith(method)


@pytest.mark.parametrize("given", [["--trainer.callbacks", "Timer"], ["--trainer.callbacks+=Timer"]])
def test_callbacks_whose_defaults_are_no_plain_values_are_written(given, tiny_backbone):
    """Lightning's Timer has an enumeration's member where its type says a string."""
    options = ["--model", "SVD", "--model.backbone", str(tiny_backbone), "--data.task", "sst2", *given]
    made = CommandLine(options, "fit").dump()["trainer"]["callbacks"]
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


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_text_has_every_option_once(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = re.findall(r"^  (--[\w.]+)", capsys.readouterr().out, flags=re.M)
    assert len(options) == len(set(options))


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


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_of_other_libraries_move_in_a_terminal_only(terminal, monkeypatch):
    names = [f"HF_{library}_DISABLE_PROGRESS_BARS" for library in ("HUB", "DATASETS")]
    for name in names:
        monkeypatch.setenv(name, "")  # and as it was afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    main(["--version"])
    assert [os.environ.get(name) for name in names] == [None if terminal else "1"] * 2


@pytest.mark.parametrize(("given", "kind"), [("1", int), ("50", int), ("1.0", float), ("0.5", float), ("1e-1", float)])
def test_a_whole_number_is_no_fraction(given, kind):
    """`--trainer.limit_train_batches 1` was 1.0, all batches, where a library had made this type before Lightning."""

    parser = ArgumentParser()
    parser.add_argument("--most", type=_whole_first(Union[float, int, None]))  # noqa: UP007  as libraries write it
    assert type(parser.parse_args([f"--most={given}"]).most) is kind


def test_a_limit_of_batches_counts_the_steps_of_a_plan(short_run, capsys):
    main(["plan", "--model", "LPAF", *short_run, "--trainer.limit_train_batches", "2"])
    assert "dense 2 epochs = 4 steps, prune 3 epochs = 6 steps, retrain 2 epochs = 4 steps" in capsys.readouterr().out


@pytest.mark.parametrize(("own", "used"), [(None, "64"), ("500", "500")])
def test_few_products_are_kept_unless_the_user_says_so(monkeypatch, own, used):
    """Every new length of a batch made another product, and 1,024 of them were kept."""
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, own or "")
    if own is None:
        monkeypatch.delenv(name)
    main(["--version"])
    assert os.environ[name] == used
