"""Whether two models put texts in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torchmetrics.functional import spearman_corrcoef

from lit_compress.evaluation.divergence import ROWS
from lit_compress.evaluation.metrics import Correlation
from lit_compress.numerics.losses import NUMBERS
from lit_compress.tasks import task_type
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from lit_compress.data.datamodule import DataModule


def same_order(net: nn.Module, other: nn.Module, data: DataModule, rows: int = ROWS) -> float | None:
    """Return Spearman's correlation of two models' numbers for texts; None for tasks that do not give one number.

    Args:
        net, other: on the CPU, in evaluation mode.
        data: its first validation split is read.
        rows: about as many examples, the first ones.
    """
    kind = task_type(data.record)
    if kind.loss not in NUMBERS:
        return None
    score, seen, loader = Correlation(spearman_corrcoef), 0, data.val_dataloader()[0]
    score.distributed_available_fn = lambda: False  # this process reads all rows, alone
    for batch in track(loader, "compare", min(len(loader), -(-rows // (loader.batch_size or 1)))):
        with torch.inference_mode():
            ours, theirs = (kind.outputs(each, batch, data.tokenizer) for each in (net, other))  # type: ignore[arg-type]
        score.update(ours, theirs)
        seen += len(batch["index"])
        if seen >= rows:
            break
    return float(score.compute())
