"""Options and commands that earlier versions had: each is refused in one line that says what to do."""

from __future__ import annotations

from typing import Any

from lit_compress.utils.errors import UserError

# last part of the option -> the value that is always used now, and what to do in place of another
REMOVED: dict[str, tuple[Any, str]] = {
    "refit": (False, "factorize --refine STEPS fits the blocks to the dense model's outputs"),
}

# last part of the option, one of its values -> what to do in its place
VALUES = {
    ("axis", "element"): "both is as good, and one SVD",
    ("format", "torch"): "--format onnx writes a program, torch.export.export one of the loaded folder",
}
# command -> what to do in its place
COMMANDS = {"analyze": "`python -m benchmarks.analysis KIND MODEL OUT` in a clone of the repository draws the figures"}


def removed(option: str) -> str | None:
    """Return one line on an option that was removed, named in full or by its last part; None for any other."""
    _, advice = REMOVED.get(option.rpartition(".")[2], (None, None))
    return advice and f"{option}: this option was removed in version 0.3; {advice}"


def removed_value(option: str, value: str) -> str | None:
    """Return one line on a value that was removed from an option, or None."""
    advice = VALUES.get((option.rpartition(".")[2].rpartition("--")[2], value))
    return advice and f"{option} '{value}': this value was removed in version 0.3; {advice}"


def without_removed(values: dict[str, Any]) -> dict[str, Any]:
    """Return stored options without those that were removed.

    Raises:
        UserError: one of them has another value than the one that is always used now, or an option a removed value.
    """
    kept = {}
    for name, value in values.items():
        if name in REMOVED:
            if value != REMOVED[name][0]:
                raise UserError(f"{name}: {value!r} was removed in version 0.3; {REMOVED[name][1]}")
            continue
        if isinstance(value, str) and (line := removed_value(name, value)):
            raise UserError(line)
        kept[name] = without_removed(value) if isinstance(value, dict) else value
    return kept
