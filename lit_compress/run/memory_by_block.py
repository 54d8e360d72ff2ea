"""The memory that ``factorize --by_block`` is expected to take, and its check against the machine's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_compress.run.expected_memory import LIBRARIES, Need, check_need, largest_of, logits_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.tasks.base import TaskType


def expected_by_block(outside: int, block: int, statistics: int, training: int = 0) -> int:
    """Return the peak bytes of ``factorize --by_block``, without libraries and activations.

    Args:
        outside: bytes of the parts outside the blocks.
        block: bytes of the largest block.
        statistics: bytes of a block's sums.
        training: bytes that the training of a block takes.
    """
    return outside + 2 * block + max(statistics, training)


def check_memory_by_block(outside: int, block: int, statistics: int, training: int = 0, logits: int = 0) -> str:
    """Return the line on the expected memory of ``factorize --by_block``.

    Args:
        outside: as for :func:`expected_by_block`, like the next three.
        block: of the largest block.
        statistics: of a block.
        training: of a block.
        logits: bytes that are made of a chunk behind the last block (:func:`logits_by_block`).

    Raises:
        UserError: the machine has less.
    """
    more = {"training of a block": training} if training > statistics else {"second moments": statistics}
    parts = {"outside the blocks": outside, "two blocks": 2 * block, **more, "libraries": LIBRARIES}
    head = {"outside the blocks": outside, "logits": logits, "libraries": LIBRARIES}
    need = largest_of([Need("factorize --by_block", parts), Need("factorize --by_block", head)])
    check_need(need, lambda: "--weighting none sums nothing" if statistics else "give a machine with more")
    return need.line()


def logits_by_block(kind: TaskType, net: PreTrainedModel, tokens: int, calibration_tokens: int) -> int:
    """Return the bytes that losses over a vocabulary make of a chunk, behind the last block.

    Args:
        kind: of the task.
        net: dense, without values.
        tokens: of the largest batch of an evaluation, which compares two models.
        calibration_tokens: of the largest part of the calibration, if it goes back; else 0.
    """
    both = logits_bytes(kind, [net, net], tokens, graph=False)
    return max(both, logits_bytes(kind, [net], calibration_tokens, graph=True))
