"""Errors of one line, and silent libraries."""

from __future__ import annotations

import argparse
import logging
import os
import re
import warnings
from typing import NoReturn

from lit_compress.utils.errors import UserError, as_shown
from lit_compress.utils.removed import removed_value


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise ``message`` as a UserError."""
        typed = re.match(r"argument (--\S+): invalid choice: '(\w+)'", message)
        raise UserError((typed and removed_value(typed[1], typed[2])) or message)


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
