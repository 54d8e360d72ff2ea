"""Removal of heads and neurons of a net of which one block at a time is in memory (units.py).

What goes is chosen in one queue over all blocks, so of every sub-layer the order and the costs of its units are kept.
The update of what stays (U) depends on which units go, so the second moment of their inputs is kept, too, and the
matrix is updated when its block is read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.calibration.grams import Gram
from lit_compress.calibration.kronecker import KroneckerFactors
from lit_compress.models.sites import SubLayer, sublayers
from lit_compress.numerics.structures import RemovalPath
from lit_compress.stages.by_block import Changes, stored_tensors
from lit_compress.stages.kronecker import biased_sites
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.units import (
    Units,
    choose_uniform,
    choose_units,
    cut_removed,
    find_units,
    unit_inputs,
    update_rest,
)
from lit_compress.stages.weighting import Weighted
from lit_compress.utils.files import atomic_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class BlockUnits(Changes):
    """Heads and neurons: of every block one file with the orders, the costs and the moments of the inputs.

    Attributes:
        settings: the weighting.
        rule: has the density.
    """

    name = "units"

    settings: Weighted
    rule: RankRule

    @property
    def parts(self) -> dict[str, SubLayer]:
        """The sub-layers, by last matrix."""
        return {part.last: part for part in sublayers(self.shapes, removable=False)}

    @property
    def sites(self) -> list[str]:
        """The last matrices of the sub-layers."""
        return list(self.parts)

    def bytes(self) -> int:
        """Return the size of the moments."""
        modules: list[Any] = [self.shapes.get_submodule(name) for name in self.sites]
        return 4 * sum(sum(Gram.numbers(module.in_features)) for module in modules)

    def biased(self) -> frozenset[str]:
        """Return the sites whose bias takes over the mean of the inputs."""
        return biased_sites(self.shapes) if self.settings.centred else frozenset()

    def write(self, number: int, block: nn.Module, found: dict[str, KroneckerFactors]) -> None:
        """Find the order in which the units of a block would go, and write its file."""
        from safetensors.torch import save_file

        settings, rule = self.settings, self.rule
        with self.lent(number, block, list(found)):
            units = find_units(
                self.shapes, found, self.biased(), (settings.input_damping, settings.gradient_damping),
                partial(rule.unit_price, self.shapes), settings.weighting == "kfac", rule.round_to, rule.uniform,
            )  # fmt: skip
        tensors = {}
        for name, unit in units.items():
            kept = found[name].stored_inputs() | {"costs": unit.path.costs, "sizes": unit.path.sizes().long()}
            kept["order"] = torch.cat([torch.zeros(0, dtype=torch.int64), *unit.path.steps])
            tensors |= {f"{name}.{key}": value for key, value in kept.items()}
        found.clear()
        with atomic_file(self.path(number)) as temporary:
            save_file(tensors, temporary)

    def choose(self) -> tuple[dict[str, Tensor], float]:
        """Return the units that go by last matrix, and the estimate of what that adds to an example's loss."""
        units = {name: unit for number in range(len(self.blocks)) for name, unit in self._units(number).items()}
        whole = self.rule.total(self.shapes)
        saving = whole * (1 - self.rule.density)
        if self.rule.uniform:
            return choose_uniform(self.shapes, units, saving, self.rule.round_to)
        return choose_units(units, saving, {}, {})

    def told(self, chosen: dict[str, Tensor]) -> dict[str, Any]:
        """Return how many heads or neurons are left."""
        counts = {name: len(unit_inputs(self.shapes, part)) for name, part in self.parts.items()}
        return {"units": {name: counts[name] - len(gone) for name, gone in chosen.items()}}

    def change(self, chosen: dict[str, Tensor], net: PreTrainedModel, number: int, values: bool) -> None:
        """Remove heads and neurons of a block, and the sub-layers that have none left."""
        own = {name: chosen[name] for name in self.of_one(number, chosen)}
        if values:
            stored = stored_tensors(self.path(number))
            moments = {name: KroneckerFactors.of_stored_inputs(_of(name, stored)) for name in own}
            update_rest(net, moments, own, self.biased(), self.settings.input_damping)
        cut_removed(net, own, self.rule.uniform)

    def _units(self, number: int) -> dict[str, Units]:
        """Return the units of a block, from its file."""
        found, parts = {}, self.parts
        stored = stored_tensors(self.path(number), (".costs", ".order", ".sizes"))
        for name in self.of_one(number, parts):
            if not (kept := _of(name, stored)):
                continue
            part, path = parts[name], RemovalPath(kept["order"].split(kept["sizes"].tolist()), kept["costs"])
            count = len(unit_inputs(self.shapes, part))
            found[name] = Units(part, path, self.rule.unit_price(self.shapes, part, count), count)
        return found


def _of(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a site by what they are."""
    return {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
