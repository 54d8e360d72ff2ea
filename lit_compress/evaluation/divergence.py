"""How far a compressed model's answers are from the dense model's: their divergence, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lit_compress.evaluation.metrics import Correlation
from lit_compress.numerics.losses import NUMBERS
from lit_compress.tasks import task_type
from lit_compress.utils.devices import current_device, move, to_device
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from lit_compress.data.batching import ResumableLoader
    from lit_compress.data.datamodule import DataModule

ROWS = 512  # enough for two digits


def divergence(
    net: PreTrainedModel, dense: PreTrainedModel, data: DataModule,
    batches: ResumableLoader | Sequence[dict[str, Tensor]] | None = None,
) -> float:  # fmt: skip
    """Return the mean over examples of KL(dense || model), summed over the distributions of an example (e.g. tokens).

    That is the loss that ``net`` adds for labels drawn from ``dense``. For regression and vectors, half the squared
    difference of the outputs: the KL of normal distributions of variance 1 around them; for vectors 1 - cosine.

    Args:
        net: the compressed model, in evaluation mode; on the CPU afterwards, like ``dense``.
        dense: the model before the compression.
        data: has the task.
        batches: of examples; None: :data:`ROWS` of the first dev split, as ``data.sample_dataloader`` draws them.
    """
    device = current_device()
    net, dense = move(net, device).eval(), move(dense, device).eval()
    kind, total, seen = task_type(data.record), 0.0, 0
    batches = data.sample_dataloader(ROWS) if batches is None else batches
    for batch in track(batches, "compare", len(batches)):
        batch = to_device(batch, device)
        with torch.inference_mode():
            ours, theirs = (kind.logits(kind.run(n, batch), batch) for n in (net, dense))
            total += kind.divergence(ours, theirs, batch)
        seen += len(theirs)
    move(net, "cpu")
    move(dense, "cpu")
    return total / seen


def same_order(net: nn.Module, other: nn.Module, data: DataModule) -> float | None:
    """Return Spearman's correlation of two models' numbers for texts; None for tasks that do not give one number.

    Args:
        net, other: on the CPU, in evaluation mode.
        data: at most :data:`ROWS` rows of its first dev split are read, as ``data.sample_dataloader`` draws them.
    """
    kind = task_type(data.record)
    if kind.loss not in NUMBERS:
        return None
    score, loader = Correlation(["spearman"]), data.sample_dataloader(ROWS)
    score.distributed_available_fn = lambda: False  # this process reads all rows, alone
    for batch in track(loader, "compare", len(loader)):
        with torch.inference_mode():
            ours, theirs = (kind.outputs(each, batch, data.tokenizer) for each in (net, other))  # type: ignore[arg-type]
        score.update(ours, theirs)
    return float(score.compute()["spearman"])
