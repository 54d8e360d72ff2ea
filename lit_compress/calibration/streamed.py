"""Kronecker factors of a net whose sums are too large to be in memory at once: each part has a pass of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING

from lit_compress.calibration.kronecker import KroneckerFactors, group_bytes
from lit_compress.models.sites import shared_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Collect = Callable[[Sequence[str]], dict[str, KroneckerFactors]]


class StreamedFactors(MutableMapping[str, KroneckerFactors]):
    """Kronecker factors that are collected when one of their part is first asked for; those of other parts go then.

    Whoever asks for them in forward order, and for the sums of each part only then, causes one pass per part.

    Args:
        collect: function of names that returns their factors, in one pass.
        parts: the names that are collected together.
    """

    def __init__(self, collect: Collect, parts: Sequence[Sequence[str]]) -> None:
        self.collect, self.parts = collect, parts
        self._known: dict[str, KroneckerFactors] = {}

    def __getitem__(self, name: str) -> KroneckerFactors:
        """Return the factors of site ``name``; without sums if those of another part were asked for since."""
        if name not in self._known:
            part = next((part for part in self.parts if name in part), None)
            if part is None:
                raise KeyError(name)
            self._known = {known: factors.released() for known, factors in self._known.items()}
            self._known |= self.collect(part)
        return self._known[name]

    def __setitem__(self, name: str, factors: KroneckerFactors) -> None:
        """Replace the factors of a site that has been asked for."""
        self._known[name] = factors

    def __delitem__(self, name: str) -> None:
        """Forget the factors of a site."""
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        """Return the names of all sites."""
        return (name for part in self.parts for name in part)

    def __len__(self) -> int:
        """Return the number of sites."""
        return sum(len(part) for part in self.parts)


def parts_within(net: PreTrainedModel, limit: float, table: str | None = None) -> list[list[str]]:
    """Return the sites of ``net`` in parts whose sums take at most ``limit`` bytes each, in forward order.

    Sites that read the same input stay together. The table, if it is collected, too, is in the first part.
    """
    parts: list[list[str]] = [[table] if table else []]
    left = limit
    for group in shared_inputs(net):
        needs = group_bytes(net, group)
        if needs > left and any(name != table for name in parts[-1]):
            parts.append([])
            left = limit
        parts[-1] += group
        left -= needs
    return parts
