"""Shared by the parsers of several commands: short options, errors of one line, silent libraries."""

from __future__ import annotations

import argparse
import logging
import os
import re
import warnings
from typing import NoReturn

from lit_compress.cli.arguments import inferred_task
from lit_compress.cli.exporting import typed_choices
from lit_compress.cli.options import CommandLine
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError, as_shown
from lit_compress.utils.removed import removed_value

# short option of `factorize`: option of fit, help
SHORT = {
    "density": ("model.density", "fraction of the matrices that is kept (default 0.25 for kfac); or"),
    "rank": ("model.rank", "rank of every matrix; or"),
    "rank_ratio": ("model.rank_ratio", "fraction of the ranks of every matrix (default 0.33 for other weightings)"),
    "budget": (
        "model.budget",
        "what the export may have instead: params=5M, size=20MB, flops=0.3, speedup=3x (or "
        "speedup=3x@openvino-int8,32x128: the runtime, and texts x tokens) or density=0.25",
    ),
    "round_to": ("model.round_to", "ranks and numbers of neurons become multiples of it, e.g. 8 (default 1)"),
    "shape": (
        "model.shape",
        "uniform: with removes structures every layer keeps as many heads and neurons, so that OUT is an ordinary "
        "model of its family (default free)",
    ),
    "allocation": (
        "model.allocation",
        "global: one budget for all, where energy is most (default for kfac), or uniform (default for the others)",
    ),
    "scope": (
        "model.scope",
        "inputs, kfac: the density is of the blocks' matrices (blocks, default), or of the whole model (all)",
    ),
    "price": (
        "model.price",
        "what the density is a share of: parameters (default) or flops",
    ),
    "weighting": (
        "model.retrain.weighting",
        "kfac (default of factorize: Fisher information, Kronecker-factored), inputs (second moments of the inputs), "
        "fisher (diagonal), none (SVD), or importance: scores of a pruning stage",
    ),
    "labels": (
        "model.retrain.labels",
        "kfac: exact, the expectation over the classes (default for two), drawn from the model (default otherwise), or "
        "true",
    ),
    "calibration_examples": ("model.retrain.calibration_examples", "inputs, kfac: training examples (default 1,024)"),
    "calibration_seed": ("model.retrain.calibration_seed", "inputs, kfac: of the choice of examples and of labels"),
    "removes": (
        "model.retrain.removes",
        "inputs, kfac: components of matrices (default), structures (heads, neurons, whole sub-layers), or auto: "
        "tries both and keeps that with the least divergence on held-out training rows (default for a speed-up)",
    ),
    "axis": ("model.retrain.axis", "fisher: which weights share an importance: in (default), out, both"),
    "power": ("model.retrain.power", "fisher, importance: exponent of the importance (default 0.5)"),
    "estimator": ("model.retrain.estimator", "fisher: per_example (default) or batch"),
    "fisher_examples": ("model.retrain.fisher_examples", "fisher: number of training examples (default all)"),
}
OF_FISHER = ("axis", "power", "estimator", "fisher_examples")  # without any meaning for the default weighting


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise ``message`` as a UserError."""
        typed = re.match(r"argument (--\S+): invalid choice: '(\w+)'", message)
        raise UserError((typed and removed_value(typed[1], typed[2])) or message)


def add_consent(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what a command on somebody's run may run."""
    parser.add_argument("--model", metavar="NAME", help="method of your own that made RUN, e.g. mypackage.Mine")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that the models of RUN bring")


def consent(given: argparse.Namespace) -> list[str]:
    """Return the options of :func:`add_consent` as words."""
    return [*([f"--model={given.model}"] if given.model else []), *["--trust_remote_code"] * given.trust_remote_code]


def parse_one_shot(parser: Parser, args: list[str]) -> tuple[argparse.Namespace, CommandLine]:
    """Parse the arguments of ``parser``, the short options and fit's, for a method on MODEL."""
    for name, (_, meaning) in SHORT.items():
        parser.add_argument(f"--{name}", help=meaning, metavar="")
    parser.add_argument(
        "--device", help="cpu, cuda, mps, xpu, ... (default the accelerator if there is one)", metavar="NAME"
    )
    task = inferred_task(args)
    meaning = "task of the fine-tuned model, e.g. sst2; default custom if --data.path is a file"
    parser.add_argument("--data.task", dest="task", required=task is None, help=meaning)
    parser.epilog = "Further options: fit's of the data and the model, e.g. --data.path DIR, --data.batch_size 16."
    given, rest = parser.parse_known_args(args)
    typed = {option[2:] for action in parser._actions for option in action.option_strings if option[:2] == "--"}
    values = {option: getattr(given, name, None) for name, (option, _) in SHORT.items()}
    short = [f"--{option}={value}" for option, value in values.items() if value is not None]
    shared = ["--model", _method_of(given, rest), f"--model.backbone={given.model}", f"--data.task={task}"]
    short += [f"--export.{name}={value}" for name, value in typed_choices(given).items() if name not in SHORT]
    short += [f"--device={given.device}"] if given.device else []
    own = (name for name in vars(given) if name in typed)
    cli = CommandLine([*shared, *short, *rest], "factorize", own, [*short, *rest])
    current_device()  # refuses one that is not here before anything is loaded
    return given, cli


def _method_of(given: argparse.Namespace, rest: list[str]) -> str:
    """Return the method of `factorize`: the one that is named, SecondOrder, or FWSVD for another weighting.

    Raises:
        UserError: an option of another weighting is given, but not the weighting.
    """
    if given.method:
        return str(given.method)
    if given.weighting or any(word.startswith("--model.retrain.weighting") for word in rest):
        return "SecondOrder" if given.weighting == "kfac" else "FWSVD"
    for name in OF_FISHER:
        if (value := getattr(given, name)) is not None:
            raise UserError(f"{name}: '{value}' means nothing to weighting kfac, the default; add --weighting fisher")
    return "SecondOrder"


def silence_libraries() -> None:
    """Hide messages of libraries that do not help the user of a command."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.formatwarning = lambda message, *_: f"warning: {as_shown(str(message))}\n"
    for name in ("utilities.rank_zero", "accelerators.cuda"):  # which devices there are
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.WARNING)
    for name in ("transformers", "huggingface_hub", "datasets", "torch.export", "torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    for message in (
        "does not have many workers",
        "`isinstance\\(treespec, LeafSpec\\)`",
        "It is recommended to use `self.log",  # our metrics are reduced over ranks already
        "The number of training batches",
    ):
        warnings.filterwarnings("ignore", f".*{message}")
