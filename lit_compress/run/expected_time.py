"""How long the passes over texts of a command will take: their operations, and how fast the device multiplies now.

A pass costs 2 operations for every token and weight of a matrix, and its backward twice that. Attention, norms and
copies are left out, and no device multiplies every shape as fast as a square. So the time is one to a few times longer
than the line prints.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from lit_compress.calibration.statistics import TOKENS
from lit_compress.models.accounting import counted_weights
from lit_compress.stages.compression import EXAMPLES
from lit_compress.stages.distil import NO_RECOVERY, Recovery
from lit_compress.stages.weighting import KRONECKER, Weighted
from lit_compress.utils.devices import current_device, synchronize
from lit_compress.utils.progress import spoken

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.batching import ResumableLoader
    from lit_compress.data.datamodule import DataModule
    from lit_compress.methods.base import Method
    from lit_compress.run.runner import Components
    from lit_compress.stages.base import Stage

SIDES = (256, 512, 1024, 2048, 4096)
ENOUGH = 0.003  # seconds of a product that say how fast the device is: 512 x 512 on a core, 4096 x 4096 on a large GPU


def product_speed(device: torch.device) -> float:
    """Return the operations per second of a product of two square float32 matrices, as large as the device needs."""
    for side in SIDES:
        x, seconds = torch.rand(side, side, device=device), []
        for _ in range(2):  # the first of a shape also chooses a kernel
            synchronize(device)
            begin = time.perf_counter()
            x @ x
            synchronize(device)
            seconds.append(time.perf_counter() - begin)
        if min(seconds) >= ENOUGH:
            break
    return 2 * side**3 / min(seconds)


def token_flops(net: PreTrainedModel, over_vocabulary: bool) -> int:
    """Return the operations of a forward for one token: 2 for every weight of a matrix that multiplies its state.

    Args:
        net: with or without values.
        over_vocabulary: whether the output layer reads every token.
    """
    tables = {id(p) for module in net.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    output = net.get_output_embeddings() if over_vocabulary else None
    tables -= {id(p) for p in output.parameters()} if output is not None else set()
    return 2 * sum(p.numel() for p in net.parameters() if p.ndim == 2 and id(p) not in tables)


def evaluation_line(net: PreTrainedModel, over_vocabulary: bool, loaders: Sequence[ResumableLoader]) -> str:
    """Return the line on the expected time of an evaluation."""
    return _line(token_flops(net, over_vocabulary) * sum(map(_tokens, loaders)))


def factorize_line(
    method: Method, stage: Stage, nets: Sequence[PreTrainedModel], data: DataModule, evaluations: int = 2,
    recovery: Recovery = NO_RECOVERY,
) -> str:  # fmt: skip
    """Return the line on the expected time of ``factorize``; the arguments of :func:`factorize_flops`."""
    return _line(factorize_flops(method, stage, nets, data, evaluations, recovery))


def factorize_flops(
    method: Method, stage: Stage, nets: Sequence[PreTrainedModel], data: DataModule, evaluations: int,
    recovery: Recovery,
) -> float:  # fmt: skip
    """Return the operations of the passes of ``factorize``: over calibration texts, dev texts and recovery texts.

    Args:
        method: has the task.
        stage: of it, which is done without training.
        nets: the dense model and the planned one, without values.
        data: gives the batches.
        evaluations: of either model; in memory the metric and the divergence have passes of their own.
        recovery: how the compressed model is trained.
    """
    over = method.kind.over_vocabulary
    weighted = stage.settings if isinstance(stage.settings, Weighted) else None
    dense, own = (token_flops(net, over) for net in nets)
    flops: float = evaluations * sum(map(_tokens, data.val_dataloader())) * (dense + own)
    loader = data.train_dataloader()
    each, texts = _tokens(loader) / max(1, len(loader.order.lengths)), len(loader.order.lengths)
    if weighted is not None and weighted.weighting in (*KRONECKER, "fisher"):
        kron, gradients = weighted.weighting in KRONECKER, weighted.weighting != "inputs"
        examples = weighted.examples(texts) if kron else min(weighted.fisher_examples or texts, texts)
        sums = [sum(side**2 for side in weight.shape[0 if gradients else 1 :]) for weight in counted_weights(nets[0])]
        passes = 3 * dense if gradients else token_flops(nets[0], False)
        flops += examples * each * (passes + 2 * kron * sum(sums))
    if recovery.refine is not None:  # a block at a time: together the blocks are the model without its output layer
        first, smaller = (token_flops(net, False) for net in nets)
        read = each * (min(EXAMPLES, texts) if weighted is None else weighted.examples(texts))
        flops += recovery.refine * min(TOKENS, read) * 3 * smaller + read * (first + 2 * smaller)
    if recovery.distil is not None:
        flops += recovery.distil * data.batch_size * each * (dense + 3 * own)
    return flops


def fit_line(parts: Components, dense: PreTrainedModel, steps: Mapping[str, int]) -> str:
    """Return the line on the expected time of the training steps of ``fit``: a forward and twice that for a backward.

    Args:
        parts: checked.
        dense: the dense model, without values.
        steps: of every stage, by name.
    """
    method, net, flops = parts.method, copy.deepcopy(dense), 0.0
    over, loader = method.kind.over_vocabulary, parts.data.train_dataloader()
    texts = parts.data.batch_size * parts.data.accumulate
    tokens = texts * _tokens(loader) / max(1, len(loader.order.lengths))
    for stage in method.stages():
        after = stage.outline(copy.deepcopy(net))
        own = 3 * stage.forwards * token_flops(after if stage.shrinks_first else net, over)
        taught = stage.distil and method.distillation.on and stage.name != "dense"
        flops += steps.get(stage.name, 0) * tokens * (own + taught * token_flops(dense, over))
        net = after
    return _line(flops)


def _line(flops: float) -> str:
    speed = product_speed(current_device())
    seconds = spoken(flops / speed)
    return f"time: at least about {seconds} of passes over texts, at the {speed / 1e9:.0f} GFLOP/s that are reached now"


def _tokens(loader: ResumableLoader) -> int:
    return sum(loader.order.lengths)
