"""The guard of the memory: work that does not fit ends before it begins, with the option that needs less.

It counts a forward of the largest batch with its logits over a vocabulary, four times the model and the teacher. That
is rough, so it warns above :data:`WARN` of the free memory, and refuses above :data:`REFUSE`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lit_compress.calibration.statistics import TOKENS
from lit_compress.data.batching import ResumableLoader
from lit_compress.models.accounting import forward_bytes
from lit_compress.models.sites import Model
from lit_compress.run.job import Job
from lit_compress.run.trainer import bare_trainer
from lit_compress.stages.compression import CompressedStage
from lit_compress.stages.recompute import activations, recomputes
from lit_compress.utils.devices import current_device, free_bytes
from lit_compress.utils.errors import UserError
from lit_compress.utils.memory import free_memory
from lit_compress.utils.progress import note

CPU = torch.device("cpu")
WARN, REFUSE = 0.85, 1.1  # shares of the free memory
LESS = (
    "half of --data.batch_size with twice --trainer.accumulate_grad_batches makes the same steps; "
    "a smaller model needs less as well"
)
AGAIN = "--model.recompute true computes activations again and keeps few; "
TRAINED, UNTRAINED = 4, 2  # times the model: with its gradient and AdamW's moments; beside the model it is made of


def check_memory(work: str, size: float, less: str, device: torch.device = CPU) -> None:
    """Refuse work that needs more than :data:`REFUSE` of the free memory, and warn of work that may not fit.

    Args:
        work: its name.
        size: bytes that it needs.
        less: the options that need less.
        device: of the work.
    """
    free = free_memory() if device.type == "cpu" else free_bytes(device)
    if free is None or size <= WARN * free:
        return
    text = f"memory: {work} needs about {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; {less}"
    if size > REFUSE * free:
        raise UserError(text)
    note(text)


def check_fit(job: Job) -> None:
    """Check the memory of all stages of a checked job; raises as :func:`check_memory`."""
    made = bare_trainer(job.trainer)
    device = made.strategy.root_device
    copies = made.num_devices if device.type == "cpu" else 1
    size, name, can_less = max((copies * size, name, can_less) for name, size, can_less in _stages(job))
    check_memory(name, size, f"{AGAIN if can_less else ''}{LESS}", device)


def _stages(job: Job) -> Iterator[tuple[str, float, bool]]:
    """Yield the name of every stage, the bytes that it needs, and whether recomputation is off and would need less."""
    method, net = job.method, copy.deepcopy(job.dense)
    shape = job.data.train_dataloader().largest
    half = "16" in str(job.trainer.get("precision") or "")
    for stage in method.stages():
        after = stage.outline(copy.deepcopy(net))
        own = after if stage.shrinks_first else net
        trains = stage.settings.epochs > 0
        forward = activations(stage, own, shape, half, method.recompute) if trains else None
        taught = trains and stage.distil and method.distillation.on and stage.name != "dense"
        times = TRAINED if trains else UNTRAINED
        kept = (forward or 0) + trains * (2 + 2 * taught) * logits_bytes(own, *shape)
        size = stage.forwards * kept + times * bytes_of(own) + taught * bytes_of(job.dense)
        yield stage.name, size, trains and not method.recompute and recomputes(stage, own, True)
        net = after


def check_factorize(job: Job, stage: CompressedStage, distils: bool = False) -> None:
    """Check the memory of ``factorize``, which may train afterwards (``distils``); raises as :func:`check_memory`."""
    dense, data = job.dense, job.data
    forwards = [_evaluated(dense, loader) for loader in data.val_dataloader()]
    texts, length = data.train_dataloader().largest
    if stage.compression.moments == "kfac":
        forwards.append(forward_bytes(dense, max(1, TOKENS // length), length, "sites") or 0)
    if distils:
        trained = forward_bytes(stage.outline(copy.deepcopy(dense)), texts, length, "parameters") or 0
        forwards.append(trained + 4 * logits_bytes(dense, texts, length))
    size = max(forwards) + (TRAINED + distils) * bytes_of(dense)
    fewer = "a smaller --data.batch_size, or no --distil, needs less; " if distils else ""
    check_memory("factorize", size, f"{fewer}--by_block has one block in memory", current_device())


def check_evaluation(net: Model, loaders: Sequence[ResumableLoader]) -> None:
    """Check the memory of an evaluation of ``net`` on the batches of ``loaders``; raises as :func:`check_memory`."""
    device = current_device()
    forward = max(_evaluated(net, loader) for loader in loaders)
    size = forward + (0 if device.type == "cpu" else bytes_of(net))
    check_memory("the evaluation", size, "--data.eval_batch_size 1, or a few more, needs less", device)


def _evaluated(net: Model, loader: ResumableLoader) -> float:
    """Return the bytes of a forward of the largest batch of ``loader``; a decoder's logits are read."""
    read = 0 if net.config.is_encoder_decoder else logits_bytes(net, *loader.largest)
    return read + (forward_bytes(net, *loader.largest, "none") or 0)


def logits_bytes(net: Model, texts: int, length: int) -> int:
    """Return the bytes of the logits over a vocabulary; an encoder-decoder writes a quarter of ``length`` tokens."""
    written = max(1, length // 4) if net.config.is_encoder_decoder else length
    return 4 * texts * written * net.config.vocab_size if net.can_generate() else 0


def bytes_of(net: nn.Module) -> int:
    """Return the bytes of the parameters of a model, which may have no values."""
    return sum(value.numel() * value.element_size() for value in net.parameters())
