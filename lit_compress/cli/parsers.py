"""The words of ``compare``, errors of one line, and silent libraries."""

from __future__ import annotations

import argparse
import logging
import os
import re
import warnings
from collections.abc import Sequence
from typing import NoReturn

from lit_compress.cli.recipes import shipped_comparisons
from lit_compress.utils.errors import UserError, as_shown, nearest
from lit_compress.utils.removed import removed_value


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise ``message`` as a UserError."""
        typed = re.match(r"argument (--\S+): invalid choice: '(\w+)'", message)
        raise UserError((typed and removed_value(typed[1], typed[2])) or message)


# keys of the config that the command line may replace
OWN = (
    ("methods", str, "make only the runs of these of the config's methods"),
    ("budgets", str, "densities, or size=20MB, params=5M, flops=0.3, speedup=3x, in place of the config's"),
    ("seeds", int, "seeds in place of the config's"),
    ("learning_rates", float, "learning rates in place of the config's"),
    ("updates", int, "training steps after the teacher, overrides the config"),
    ("hold_out", int, "training rows that choose learning rates and epochs in place of the config's"),
)
SEVERAL = ("methods", "budgets", "seeds", "learning_rates")


def comparison_words(args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the own options of ``compare``, and the words of those of fit.

    Raises:
        UserError: an option of its own has a wrong value.
        SystemExit: ``--help`` was given, and was printed.
    """
    doc = "Run several methods, budgets and seeds from the same teachers with equal training steps, and compare them."
    parser = Parser(prog="python -m lit_compress compare", description=doc, allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="NAME.yaml", help="a path, or a shipped comparison: "
                        + ", ".join(shipped_comparisons()))  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="folder to write (default runs/NAME)")
    parser.add_argument("--list", action="store_true", help="print all runs as commands, one a line, and make none")
    parser.add_argument("--index", type=int, metavar="N",
                        help="make only the run of line N of --list, from 0, and the teacher it needs")  # fmt: skip
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="runs at one time (default 1)")
    for name, kind, meaning in OWN:
        parser.add_argument(f"--{name}", type=kind, nargs="+" if name in SEVERAL else None, metavar="X", help=meaning)
    parser.epilog = "Options of fit apply to all runs, e.g. --data.path DIR, --model.backbone DIR."
    given, rest = parser.parse_known_args(args)
    if given.workers < 1:
        raise UserError(f"workers: {given.workers} is below 1, the smallest valid value")
    return given, rest


def options_in(words: Sequence[str]) -> dict[str, str]:
    """Return the options of fit among ``words``, by name.

    Raises:
        UserError: a word is no option, or an option has no value.
    """
    options, left = {}, iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            raise UserError(f"'{word}' has no option before it; see --help")
        if word == "--trust_remote_code":
            value = "true"
        elif not equals and (value := next(left, "")) == "":
            raise UserError(f"{name[2:]}: the value is missing")
        if name[2:].partition(".")[0] not in ("data", "model", "trainer", "checkpoint_every", "trust_remote_code"):
            own = [row[0] for row in OWN]
            known = ["config", "out", "list", "index", "workers", *own, "data.path", "model.backbone"]
            raise UserError(f"unknown option '{name[2:]}'; {nearest(name[2:], known)}")
        options[name[2:]] = value
    return options


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
