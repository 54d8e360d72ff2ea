"""The methods of the contract test, and short runs of each."""

from __future__ import annotations

import os
from importlib import import_module
from inspect import signature

import pytest
import yaml

from lit_compress import methods
from lit_compress.cli.recipes import FOLDER
from lit_compress.methods import Method


def shipped_methods() -> list[str]:
    """Find the methods in the shipped configs."""
    paths = (yaml.safe_load(path.read_text())["model"]["class_path"] for path in FOLDER.glob("*.yaml"))
    return sorted({path.rpartition(".")[2] for path in paths})


def class_of(method: str) -> type[Method]:
    """Return a shipped method by its name, or one of another package by its import path."""
    package, _, name = method.rpartition(".")
    return getattr(import_module(package) if package else methods, name)


GIVEN = os.environ.get("LIT_COMPRESS_METHOD")  # of another package
METHODS = [GIVEN] if GIVEN else shipped_methods()
VARIANTS = {
    "BlockMovement": {"": ["--model.prune.block", "8"]},
    "CoFi": {"": ["--model.distil.epochs", "1"]},
    "CoFiLoSparse": {"": ["--model.distil.epochs", "1"]},
    # the other form, the default on accelerators, has other draws of dropout
    "Layers": {"": [], "measured": ["--model.prune.choice", "measured", "--model.prune.examples", "50"]},
    # a window of scores must be complete before the first ranking; and once from the backbone, with a new head
    "PLATON": {"": ["--model.prune.interval", "2", "--model.prune.start", "0.2", "--model.prune.init", "pretrained"]},
    "SecondOrder": {
        "": [],
        "structures": ["--model.retrain.removes", "structures"],
    },
    "Theseus": {"": ["--model.replace.epochs", "2", "--model.replace.learning_rate", "1e-3"]},
    "FWSVD": {
        "": [],
        "plain": ["--model.retrain.weighting", "none"],
        "global": ["--model.allocation", "global"],
        "inputs": ["--model.retrain.weighting", "inputs", "--model.retrain.calibration_examples", "50"],
    },
}
CASES = [
    pytest.param((method, variant), id=f"{method}-{variant}".strip("-"))
    for method in METHODS
    for variant in VARIANTS.get(method, {"": []})
]


# one method of every class of stages: kills, other devices and several processes meet the others' code in these
OF_STAGES = ("BlockMovement", "CoFi", "LLMPruner", "LPAF", "LoSparse", "PLATON", "SP3", "SecondOrder", "SliceGPT",
             "Theseus")  # fmt: skip
CLASSES = [GIVEN] if GIVEN else OF_STAGES
WHOLE = "LPAF"  # goes through the dense stage in every test, and accumulates; both are the same for all methods
WINDOWS = ["--data.batch_size", "4", "--trainer.accumulate_grad_batches", "2"]
# methods/test_several_processes.py compares their steps with those of one process, and looks at their jobs on two
COMPARED = ("CoFi", "CoFiLoSparse", "LPAF", "LoSparse", "SP3", "SecondOrder")
# what a method stores may be below the density by one unit of its removal, if that is more than 1 %: in weights of the
# tiny model. By their papers these have one share of the rank in every matrix, so a unit is one rank of all of them
UNIT = dict.fromkeys(("FWSVD", "LPAF", "LowRankI", "LowRankII", "SVD"), 2 * (4 * (32 + 32) + 2 * (32 + 64)))

STEPS = ["--checkpoint_every", "3"]
SHORT_PRUNE = ["--model.prune.epochs", "2", "--model.prune.learning_rate", "1e-3"]
LEAN = ["--trainer.logger", "false"]  # of runs that look at neither curves nor figures
# of the net that most methods begin with
TEACHES = ("SVD", [*LEAN, "--model.retrain.epochs", "0"])


def options(method: str, short_run: list[str], variant: str = "", density: float = 0.5) -> list[str]:
    """Return what makes a short run of the method: of the options for stages, those of its own stages."""
    own = signature(class_of(method)).parameters
    given = [*short_run, *SHORT_PRUNE, *VARIANTS.get(method, {}).get(variant, [])]
    kept = [
        word
        for name, value in zip(given[::2], given[1::2], strict=True)
        if not name.startswith("--model.") or name.split(".")[1] in own
        for word in (name, value)
    ]
    return ["--model", method, "--model.density", str(density), *kept, *(WINDOWS if method == WHOLE else [])]
