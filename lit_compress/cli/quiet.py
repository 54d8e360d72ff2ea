"""Silent libraries."""

from __future__ import annotations

import logging
import os
import warnings

from lit_compress.utils.errors import as_shown


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
