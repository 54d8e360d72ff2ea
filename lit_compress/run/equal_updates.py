"""The same number of training steps for every method of a comparison, however many stages it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm

from lit_compress.utils.errors import UserError

MOST_PIECES = 1000  # epochs into which the steps are divided, if the user does not set a number


def divide(updates: int, epochs: int | None, splits: Sequence[Mapping[str, float]], batches: int) -> tuple[int, int]:
    """Return the number of epochs over all stages after the teacher, and the training steps of each.

    Every method has the same number of epochs, all of the same length, so a stage's share must be whole epochs.

    Args:
        updates: training steps over all stages.
        epochs: as asked for; None: the fewest that fit.
        splits: shares of the stages of all methods that are trained.
        batches: of one epoch of the training data.

    Raises:
        UserError: it cannot be done; the message has the nearest number that can.
    """
    step = lcm(1, *(int(sum(split.values())) for split in splits if any(split.values())))
    fits = [n for n in range(step, MOST_PIECES * step + 1, step) if updates % n == 0 and updates // n <= batches]
    if epochs is None:
        if not fits:
            raise UserError(
                f"config: updates: {updates} cannot be divided into epochs of at most {batches} steps each, a "
                f"multiple of {step} in number; nearest: updates {_near(updates, step, batches)}"
            )
        return fits[0], updates // fits[0]
    if epochs in fits:
        return epochs, updates // epochs
    hint = f"nearest: epochs {min(fits, key=lambda n: abs(n - epochs))}" if fits else "change updates"
    raise UserError(
        f"config: epochs: {epochs} with updates {updates}: epochs must divide the steps into parts of at most "
        f"{batches} (one pass over the data), and be a multiple of {step} for the stages' shares; {hint}"
    )


def _near(updates: int, step: int, batches: int) -> int:
    parts = step * -(-updates // (batches * step))  # the fewest epochs that are short enough
    return parts * max(1, min(batches, round(updates / parts)))
