"""A hundred mistakes: typos of every class of options, wrong values, folders and files. Each is one line, exit code 2.

The line names the option as it was typed, and what is nearest to it among the options of the method at hand.
"""

from __future__ import annotations

import json
import re
import warnings
from inspect import signature

import pytest
from lightning_utilities.core.imports import RequirementCache
from mistakes import fails

from lit_compress import methods
from lit_compress.__main__ import main
from lit_compress.cli import catalogue
from lit_compress.cli.lines import read_line
from lit_compress.cli.words import SHORT, own_options
from lit_compress.utils.errors import UserError


def misspelt(option: str) -> str:
    """The option without the letter in the middle of its last word."""
    group, dot, name = option.rpartition(".")
    middle = len(name) // 2
    return f"{group}{dot}{name[:middle]}{name[middle + 1 :]}"


SVD, ONE_SHOT = ("fit", "--model", "SVD"), ("factorize", "MODEL", "OUT", "--data.task", "sst2")
TYPOS = [
    *((*SVD, option) for option in (*catalogue.names("SVD"), *catalogue.trainer()) if not option.startswith("model")),
    *((*ONE_SHOT, option) for option in SHORT),
    *((*args, option) for args in (("predict", "MODEL", "--data.task=sst2"), ("export", "RUN", "OUT"), ("bench", "OUT"))
      for option in own_options(args[0]) if not own_options(args[0])[option].position),
    *(("fit", "--model", name, option) for name in catalogue.methods() for option in catalogue.of_method(name)),
]  # fmt: skip


def test_every_option_misspelt_is_one_line_that_names_it():
    """Names are compared with the source alone: this takes milliseconds each."""
    for *args, option in TYPOS:
        typo = misspelt(option)
        if typo in own_options(args[0]) or typo in catalogue.names():
            continue
        with pytest.raises(UserError, match=re.escape(typo)):
            read_line(args[0], [*args[1:], f"--{typo}", "1"])


def test_the_nearest_is_the_option_that_was_meant(capsys):
    """For nearly all: where the middle letter is half of the word another may be as near."""
    assert "did you mean 'output'?" in fails(capsys, "predict", "MODEL", "--data.task=sst2", "--ouput", "x")
    for option in ("model.retrain.weight_decay", "data.batch_size", "data.custom.label", "trainer.devices", "run_dir"):
        assert f"did you mean '{option}'?" in fails(capsys, *SVD, f"--{misspelt(option)}", "1")


def test_a_method_that_is_a_module_or_whose_file_is_broken_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.py").write_text("class Mine(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = ("--data.task", "sst2", "--model.density", "0.5")
    assert "'torch.nn' cannot be imported here" in fails(capsys, "fit", "--model", "torch.nn", *options)
    said = fails(capsys, "fit", "--model", "broken.Mine", *options)
    assert said.startswith(f"error: {tmp_path / 'broken.py'}, line 1: invalid syntax")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ("FirstOrder", "--model.prune.intervall", "5"),
            "'model.prune.intervall'; did you mean 'model.prune.interval'?",
        ),
        (("FirstOrder", "--model.prune.beta2", "1"), "'model.prune.beta2' for FirstOrder; its options: model.prune."),
        (
            ("FirstOrder", "--model.rank", "1"),
            "'model.rank' for FirstOrder; its options: model.backbone, model.budget, model.dense,",
        ),
        (("FirstOrder", "--model.gates", "1"), "'model.gates'; "),
        (("SVD", "--epochs", "3"), "'epochs'; did you mean 'model.dense.epochs' or 'model.retrain.epochs'?"),
        (("SVD", "--budget", "size=2MB"), "unknown option 'budget'; did you mean 'model.budget'?"),
        (("SVD", "--dense.epochs", "3"), "unknown option 'dense.epochs'; did you mean 'model.dense.epochs'?"),
        (
            ("FirstOrder", "--rank", "1"),
            "'rank' for FirstOrder; its options: model.backbone, model.budget, model.dense,",
        ),
        (("SVD", "--method", "LPAF"), "unknown option 'method'; did you mean 'model'?"),
        (("SVD", "--task", "sst2"), "unknown option 'task'; did you mean 'data.task'?"),
        (("SVD", "--run_dr", "x"), "unknown option 'run_dr'; did you mean 'run_dir'?"),
        (("SVD", "--trainer.optimizer", "SGD"), "unknown option 'trainer.optimizer'; "),
    ],
)
def test_hints_are_of_the_method_at_hand(args, words, capsys):
    line = fails(capsys, "fit", "--model", *args)
    assert words in line
    own = {f"model.{name}" for name in signature(getattr(methods, args[0])).parameters} | {"model.dense.epochs"}
    named = {word.strip("';?,:") for word in line.split() if word.strip("';?,:").startswith("model.")}
    assert {".".join(name.split(".")[:2]) for name in named if name != args[1][2:]} <= own


WRONG = [
    (*SVD, "--model.density", "x"),
    (*SVD, "--model.allocation", "globl"),
    (*SVD, "--model.dense", "3"),
    (*SVD, "--model.dense.learning_rate", "fast"),
    (*SVD, "--data.task", "sts2"),
    (*SVD, "--data.custom", "reviews"),
    (*SVD, "--trainer.precision", "8"),
    (*SVD, "--config", "nowhere.yaml"),
    (*SVD, "--model.backbone", "./nowhere"),
    (*SVD, "--model.backbone", "TINY", "--data.path", "./nowhere"),
    (*SVD, "--model.backbone", "TINY", "--data.path", "FILE"),
    (*SVD, "--model.backbone", "TINY", "--data.path", "DATA", "--model.teacher", "./nowhere"),
    (*SVD, "--model.backbone", "TINY", "--data.path", "DATA", "--run_dir", "FILE"),
    (*SVD, "--model.backbone", "TINY", "--data.path", "DATA", "--run_dir", "FULL"),
    (*SVD, "--model.backbone", "TINY", "--data.path", "DATA", "--data.train_examples", "1000"),
    ("predict", "MODEL", "--data.task", "sst2", "--output", "EMPTY"),
    ("factorize", "MODEL", "OUT", "--data.task", "sst2", "--density", "x"),
    ("factorize", "MODEL", "FULL", "--data.task", "sst2"),
    ("factorize", "./nowhere", "OUT", "--data.task", "sst2"),
    ("export", "EMPTY", "OUT"),
    ("export", "RUN", "OUT", "--embeddings", "rank"),
    ("export", "RUN", "OUT", "--dtype", "int7"),
    ("export", "RUN", "OUT", "--dtype", "int4", "--format", "onnx"),
    ("export", "RUN", "OUT", "--max_drop", "-1"),
    ("predict", "FILE"),
]


GIVEN_BEFORE = ("sweeep", "EMPTY", "./nowhere", "FULL")  # where options follow that are right


@pytest.fixture
def place(tmp_path, tiny_backbone, tiny_data, monkeypatch):
    """Folders and files by the names that stand for them."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "full", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "config.yaml").write_text("{export: {}, model: {class_path: SVD, init_args: {density: 0.5}}}")
    for name in ("file.bin", "full/thesis.txt"):
        (tmp_path / name).write_bytes(b"\x00\xff not a table")
    return {"EMPTY": "empty", "FULL": "full", "RUN": "run", "FILE": "file.bin", "TINY": str(tiny_backbone),
            "DATA": str(tiny_data), "MODEL": str(tiny_backbone)}  # fmt: skip


@pytest.mark.parametrize("args", WRONG, ids=lambda args: " ".join(args))
def test_a_wrong_value_folder_or_file(args, capsys, place, tmp_path):
    """The line has what was given, and the option or the command that it was given to."""
    before = sorted(path.name for path in tmp_path.rglob("*"))
    line = fails(capsys, *(place.get(word, word) for word in args))
    position = args.index(next((word for word in args if word in GIVEN_BEFORE), args[-1]))
    wrong = args[position]
    said = place.get(wrong, wrong).removeprefix("./").removeprefix("--").removesuffix("=sst2")
    assert said in line or args[position - 1] in ("--config", "--model.dense.epochs")
    if args[position - 1].startswith("--"):
        assert args[position - 1].lstrip("-") in line
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


CLASSES = [
    (("callbacks+=NoSuch",), "trainer.callbacks: 'NoSuch' is no callback, or cannot be imported here; valid: "),
    (("callbacks+=EarlyStoping",), "'EarlyStoping' is no callback, or cannot be imported here; did you mean 'EarlyS"),
    (("callbacks+=os.system",), "trainer.callbacks: 'os.system' is no callback, or cannot be imported here; give the"),
    (("logger=NoSuch",), "trainer.logger: 'NoSuch' is no logger"),
    (("plugins=5",), "trainer.plugins: '5' is no plugin"),
    (("callbacks+=EarlyStopping",), "trainer.callbacks: EarlyStopping needs monitor; "),
    (
        ("callbacks+=EarlyStopping", "callbacks.moniter=x"),
        "unknown option 'trainer.callbacks.moniter'; did you mean 'monitor'?",
    ),
    (
        ("callbacks+=EarlyStopping", "callbacks.monitor=x", "callbacks.patience=y"),
        "trainer.callbacks.patience: 'y' is not a valid int",
    ),
    (
        ("model.retrain.optimizer=SDG",),
        "model.retrain.optimizer: 'SDG' is no optimizer, or cannot be imported here; di",
    ),
    (("model.retrain.optimizer=SGD", "model.retrain.optimizer.lrr=1"), "'model.retrain.optimizer.lrr'; did you mean"),
    (("model.retrain.optimizer=SGD", "model.retrain.optimizer.lr=x"), "retrain.optimizer.lr: 'x' is not a valid float"),
    (("model.retrain.lr_scheduler=ExponentialLR",), "model.retrain.lr_scheduler: ExponentialLR needs gamma; e.g. --mo"),
    (
        ("model.retrain.optimizer=torch.optim.SGD", "model.retrain.learning_rate=0.1"),
        "model.retrain.learning_rate: torch.optim.SGD takes its place; give --model.retrain.optimizer.lr",
    ),
]


@pytest.mark.parametrize(("given", "words"), CLASSES, ids=lambda value: str(value[-1]))
def test_a_mistaken_class_of_the_trainer_or_of_a_stage(given, words, capsys):
    options = [option if option.startswith("model.") else f"trainer.{option}" for option in given]
    assert words in fails(capsys, *SVD, "--model.backbone", "x", *(f"--{option}" for option in options))


REFUSED = [
    (("logger=WandbLogger",), "trainer.logger: WandbLogger cannot be used here: Requirement 'wandb"),
    (
        ("callbacks+=EarlyStopping", "callbacks.monitor=x", "callbacks.mode=up"),
        "trainer.callbacks: EarlyStopping cannot be used here: `mode` can be min, max, got up",
    ),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=lambda value: str(value[-1]))
def test_a_class_of_the_trainer_that_cannot_be_made_says_why(given, words, capsys, short_run, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", RequirementCache("wandb>=9999"))
    words_of_run = (*short_run, "--run_dir", tmp_path / "run", *(f"--trainer.{option}" for option in given))
    assert words in fails(capsys, *SVD, *words_of_run)


FOUND_IN_FITS = [
    (
        ("callbacks+=EarlyStopping", "callbacks.monitor=val_loss"),
        "trainer: Early stopping conditioned on metric `val_loss`",
    ),
    (
        ("callbacks+=LearningRateMonitor",),
        "trainer: Cannot use `LearningRateMonitor` callback with `Trainer` that has no",
    ),
    (("val_check_interval=100",), "trainer: `val_check_interval` (100) must be less than or equal to the number of"),
    (("limit_train_batches=0.01",), "trainer: You requested to check 0.01 of the `train_dataloader` but 0.01 * 13 < 1"),
    (("limit_val_batches=0.01",), "trainer: You requested to check 0.01 of the `val_dataloader` but 0.01 * 1 < 1"),
]


@pytest.mark.parametrize(("given", "words"), FOUND_IN_FITS, ids=lambda value: str(value[-1]))
def test_what_only_a_fit_finds_in_the_trainer_s_options_is_one_line(given, words, capsys, short_run, tmp_path):
    options = (f"--trainer.{option}" for option in ("logger=false", *given))
    assert words in fails(capsys, *SVD, *short_run, "--run_dir", tmp_path / "run", *options)


@pytest.mark.parametrize("command", ["report", "evaluate"])
def test_a_warning_is_one_line_without_a_line_of_the_source(command, monkeypatch):
    """Of every command, also where a library has set its own form again."""
    said = []
    monkeypatch.setattr(warnings, "formatwarning", lambda *_: "a line of the source")
    monkeypatch.setattr(
        f"lit_compress.cli.commands.{command}",
        lambda line=None, **_: said.append(warnings.formatwarning("mind the gap", UserWarning, __file__, 1)),
    )
    main([command, "RUN"])
    assert said == ["warning: mind the gap\n"]


CONFIGS = {
    "model.init_args.densiy": {"model": {"init_args": {"densiy": 0.5}}},
    "model.init_args.retrain.epchs": {"model": {"init_args": {"retrain": {"epchs": 3}}}},
    "model.init_arg": {"model": {"init_arg": {}}},
    "model.density": {"model": {"density": 0.5}},
    "data.pth": {"data": {"pth": "x"}},
    "data.custom.txt": {"data": {"custom": {"txt": "x"}}},
    "trainer.devics": {"trainer": {"devics": 1}},
    "sed_everything": {"sed_everything": 1},
}


@pytest.mark.parametrize("key", CONFIGS)
def test_a_misspelt_key_of_a_config(key, capsys, tmp_path):
    config = CONFIGS[key]
    config["model"] = {"class_path": "lit_compress.methods.SVD", **config.get("model", {})}
    (tmp_path / "mine.yaml").write_text(json.dumps(config))
    line = fails(capsys, "fit", "--config", tmp_path / "mine.yaml")
    assert key.rpartition(".")[2] in line and "did you mean" in line
