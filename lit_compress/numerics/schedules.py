"""The schedules of the methods, as pure functions of the number of completed optimizer steps.

None of them keeps a counter, so a resumed run needs only its step. Integers are divided last: the values at the
ends of a schedule are exact, also when the number of steps is odd.
"""

from __future__ import annotations

from lit_compress.utils.errors import UserError


def cubic(step: int, total: int, start: int, end: int, final: float) -> float:
    """Return the density after ``step`` optimizer steps: constant, a cubic fall, constant again (LPAF Eq. 5).

    1 before ``start``; ``final`` in the last ``end`` steps; in between
    ``final + (1 - final) * ((total - end - step) / (total - end - start)) ** 3``.

    Args:
        step: completed optimizer steps, t.
        total: optimizer steps of the whole stage, T.
        start: number of steps before the fall, t_i.
        end: number of steps after the fall, t_f.
        final: density at the end, v_f, in [0, 1]; 0 for weights that are all removed.

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


def linear_decay_to_zero(step: int, total: int, initial: float) -> float:
    """Return the probability of the sparse matrix in mixed-rank retraining (LPAF Sec. 4.3; max(0, p_init - d t)).

    Linear from ``initial`` at step 0 to exactly 0 at ``total / 2`` (d = 2 p_init / T), then 0. With an odd
    ``total`` the first step at 0 is ``(total + 1) // 2``.

    Args:
        step: completed optimizer steps.
        total: optimizer steps of the whole stage, above 0.
        initial: p_init, in [0, 1].
    """
    assert total > 0 and 0.0 <= initial <= 1.0, (total, initial)
    return initial * (max(0, total - 2 * step) / total)


def linear_warmup_decay(step: int, total: int, warmup: int) -> float:
    """Return the factor in [0, 1] of the learning rate: linear warm-up, then linear to 0 at ``total``.

    The same values as ``get_linear_schedule_with_warmup`` of transformers.

    Args:
        step: completed optimizer steps.
        total: optimizer steps of the whole stage.
        warmup: steps of warm-up, 0 to ``total``.
    """
    assert 0 <= warmup <= total, (warmup, total)
    if step < warmup:
        return step / warmup
    return max(0, total - step) / max(1, total - warmup)


def linear_to(step: int, start: int, length: int, initial: float, final: float) -> float:
    """Return the target density: ``initial`` up to ``start``, then linear to ``final`` at start + length.

    Args:
        step: completed optimizer steps.
        start: step at which the target begins to move.
        length: number of steps of the move; 0 for a jump.
        initial: density before.
        final: density after.
    """
    if step >= start + length:
        return final
    return initial + (final - initial) * (max(0, step - start) / max(1, length))
