"""Progress outside training, notes to the user, on the first rank only, and libraries that are silent."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable
from typing import TypeVar

from tqdm.auto import tqdm

from lit_compress.utils.errors import as_shown, printable

T = TypeVar("T")
_noted: set[str] = set()


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """Return ``items``; until they are done, a bar called ``description`` says so, in a file once a minute."""
    pauses = {} if sys.stderr.isatty() else {"delay": 5.0, "mininterval": 60.0, "maxinterval": 60.0}  # seconds
    said = printable(description)
    return tqdm(items, desc=said, total=total, leave=False, disable=not _first(), dynamic_ncols=True, **pauses)


def note(line: str) -> None:
    """Print a line that a user should know but need not act on, once per process, on the first rank only."""
    line = as_shown(line)
    if _first() and line not in _noted:
        print(f"note: {line}", file=sys.stderr)
    _noted.add(line)


def _first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("RANK", "0") == "0"


def silence_libraries() -> None:
    """Hide messages of libraries that do not help the user of a command."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.formatwarning = lambda message, *_: f"warning: {as_shown(str(message))}\n"
    for name in ("utilities.rank_zero", "accelerators.cuda"):  # which devices there are
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.WARNING)
    for name in ("transformers", "huggingface_hub", "datasets", "torch.export", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("torch.onnx._internal").setLevel(logging.ERROR)  # torch sets that of torch.onnx
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    for message in (
        "does not have many workers",
        "`isinstance\\(treespec, LeafSpec\\)`",
        "It is recommended to use `self.log",  # our metrics are reduced over ranks already
        "The number of training batches",
    ):
        warnings.filterwarnings("ignore", f".*{message}")
