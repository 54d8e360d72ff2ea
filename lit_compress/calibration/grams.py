"""Sums of second moments: of dense vectors as a Gram matrix, of one-hot vectors as counts."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_compress.utils.devices import place_of_sums

UNSEEN = 0.1  # occurrences of a token that does not occur
BLOCK = 512  # rows of a block of the lower triangle; smaller ones save more products, larger ones are faster each


class Gram:
    """The sum of v v^T over vectors v [n]; the block-wise lower triangle is kept.

    Args:
        size: n.
        dtype: of the sum.
        device: where it is.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.size, self.ends = size, [min(start + BLOCK, size) for start in range(0, size, BLOCK)]
        numbers = self.numbers(size)
        self.flat = torch.zeros(sum(numbers), dtype=dtype, device=device)  # one tensor, so that one reduction serves
        self.strips = [part.view(-1, end) for part, end in zip(self.flat.split(numbers), self.ends, strict=True)]

    @staticmethod
    def numbers(size: int) -> list[int]:
        """Return how many numbers each strip of the triangle has."""
        return [min(BLOCK, size - start) * min(start + BLOCK, size) for start in range(0, size, BLOCK)]

    def add(self, rows: Tensor) -> None:
        """Add ``rows`` [tokens, n]; the products are in their dtype."""
        for strip, end in zip(self.strips, self.ends, strict=True):
            strip += (rows[:, end - len(strip) : end].mT @ rows[:, :end]).to(strip)

    def whole(self, scale: float = 1.0) -> Tensor:
        """Return the sum times ``scale``, symmetric float64 [n, n] on the CPU."""
        matrix = torch.zeros(self.size, self.size, dtype=torch.float64)
        for strip, end in zip(self.strips, self.ends, strict=True):
            start, wide = end - len(strip), strip.cpu().to(matrix)
            matrix[start:end, :start], matrix[:start, start:end] = wide[:, :start], wide[:, :start].T
            matrix[start:end, start:end] = (wide[:, start:] + wide[:, start:].T) / 2
        return matrix.mul_(scale)


class Counts:
    """How often each of n tokens occurs: the second moment of the one-hot inputs of a table, which is diagonal.

    Args:
        size: n, rows of the table.
        device: where the counts are.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.size, self.flat = size, torch.zeros(size, dtype=torch.float64, device=place_of_sums(device))

    def add(self, rows: Tensor) -> None:
        """Count the tokens ``rows``, int [tokens, 1]."""
        self.flat += torch.bincount(rows.flatten(), minlength=self.size).to(self.flat.device)

    def whole(self, scale: float = 1.0) -> Tensor:
        """Return the diagonal of the moment, float64 [n] on the CPU: the counts, of all a little more, times ``scale``.

        A token that does not occur counts as :data:`UNSEEN` of an occurrence, so that its row is still approximated.
        """
        return (self.flat.cpu() + UNSEEN) * scale
