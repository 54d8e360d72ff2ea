"""The schedules of the methods, as pure functions of the number of completed optimizer steps.

None of them keeps a counter, so a resumed run needs only its step. Integers are divided last: the values at the
ends of a schedule are exact, also when the number of steps is odd.
"""

from __future__ import annotations

from lit_compress.utils.errors import UserError


def cubic(step: int, total: int, start: int, end: int, final: float) -> float:
    """Return the density after ``step`` of ``total`` steps: constant, a cubic fall, constant again (LPAF Eq. 5).

    It is 1 before ``start`` and ``final``, in [0, 1], in the last ``end`` steps; in between
    ``final + (1 - final) * ((total - end - step) / (total - end - start)) ** 3``.

    Raises:
        UserError: no step is left for the fall.
    """
    if total - end - start <= 0:
        hint = f"valid: together at most {total - 1}, or fractions" if total > 0 else "valid: total of at least 1"
        raise UserError(
            f"prune.start + prune.end: {start} + {end} steps leave no step of total={total} to prune; {hint}"
        )
    assert 0.0 <= final <= 1.0, final
    if step < start:
        return 1.0
    if step >= total - end:
        return final
    remaining = (total - end - step) / (total - end - start)
    return final + (1.0 - final) * remaining**3


def linear_warmup_decay(step: int, total: int, warmup: int) -> float:
    """Return the factor in [0, 1] of the learning rate: ``warmup`` rising steps, then linear to 0 at ``total``.

    The same values as ``get_linear_schedule_with_warmup`` of transformers.
    """
    assert 0 <= warmup <= total, (warmup, total)
    if step < warmup:
        return step / warmup
    return max(0, total - step) / max(1, total - warmup)


def linear_to(step: int, start: int, length: float, initial: float, final: float) -> float:
    """Return ``initial`` up to step ``start``, then a line to ``final`` of ``length`` steps; 0 is a jump."""
    if step >= start + length:
        return final
    return initial + (final - initial) * (max(0, step - start) / max(1, length))
