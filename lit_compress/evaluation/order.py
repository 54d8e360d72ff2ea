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


def same_order(net: nn.Module, other: nn.Module, data: DataModule) -> float | None:
    """Return Spearman's correlation of two models' numbers for texts; None for tasks that do not give one number.

    Args:
        net, other: on the CPU, in evaluation mode.
        data: at most :data:`ROWS` rows of its first dev split are read, as ``data.sample_dataloader`` draws them.
    """
    kind = task_type(data.record)
    if kind.loss not in NUMBERS:
        return None
    score, loader = Correlation(spearman_corrcoef), data.sample_dataloader(ROWS)
    score.distributed_available_fn = lambda: False  # this process reads all rows, alone
    for batch in track(loader, "compare", len(loader)):
        with torch.inference_mode():
            ours, theirs = (kind.outputs(each, batch, data.tokenizer) for each in (net, other))  # type: ignore[arg-type]
        score.update(ours, theirs)
    return float(score.compute())
