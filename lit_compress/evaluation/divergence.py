"""How far a compressed model's answers are from the dense model's: the loss that a second-order estimate predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lit_compress.tasks import task_type
from lit_compress.tasks.divergence import summed_divergence
from lit_compress.utils.devices import current_device, move, to_device
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from torch import Tensor
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
            total += summed_divergence(kind, ours, theirs, batch)
        seen += len(theirs)
    move(net, "cpu")
    move(dense, "cpu")
    return total / seen
