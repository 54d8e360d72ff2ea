"""Linears that the record of an architecture does not name."""

from __future__ import annotations

from torch import nn

from lit_compress.models.sites import blocks, find_sites


def unplaced(net) -> list[str]:
    """Return the names of the Linears inside the blocks of ``net`` that are no sites in its record."""
    sites = {site.name for site in find_sites(net)}
    inside = [f"{name}.{path}" for *_, name, block in blocks(net) for path, module in block.named_modules()
              if isinstance(module, nn.Linear)]  # fmt: skip
    return [name for name in inside if name not in sites]
