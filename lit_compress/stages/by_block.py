"""Compression of a net of which one block at a time is in memory; what is found of a block goes to disk.

Ranks under one budget need the singular values of all matrices, and the moments of a block are gone before the last
matrix is known. So of every matrix the singular values are kept, and as many components as could be stored at all;
together they are no more than the net. Which of them stay is decided when all are there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lit_compress.calibration.fisher import Fisher
from lit_compress.calibration.kronecker import KroneckerFactors
from lit_compress.models.accounting import dense_site_params
from lit_compress.models.block_net import empty
from lit_compress.models.sites import find_sites
from lit_compress.models.surgery import factorize, replace
from lit_compress.numerics.ranks import largest_rank
from lit_compress.stages.kronecker import biased_sites, change_of_bias
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.weighting import KRONECKER, Weighted, weigh
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_weighting(settings: Weighted, rule: RankRule) -> None:
    """Refuse what cannot be done block by block.

    Raises:
        UserError: the weighting needs the whole net or a file, or matrices would be changed beyond their factors.
    """
    if settings.weighting not in (*KRONECKER, "fisher", "none"):
        raise UserError(
            f"--by_block: weighting '{settings.weighting}' reads the scores of the whole net; nearest: fisher"
        )
    if settings.weighting == "fisher" and settings.axis == "element":
        raise UserError("--by_block: axis 'element' has no singular values to keep; nearest: both")
    if settings.weighting == "fisher" and settings.estimator != "per_example":
        raise UserError(f"--by_block: estimator '{settings.estimator}' needs whole batches; nearest: per_example")
    if settings.removes == "both":
        raise UserError(
            "--by_block: retrain.removes 'both' calibrates the whole net twice; nearest: structures, or components"
        )
    if settings.refit:
        raise UserError("--by_block: retrain.refit true needs both nets in memory; nearest: false")
    if rule.scope == "all":
        raise UserError("--by_block: scope 'all' factorizes the table of tokens, which is in no block; nearest: blocks")
    if rule.price != "parameters":
        raise UserError(f"--by_block: price '{rule.price}' is measured on the whole net; nearest: parameters")
    if rule.keeps_all:
        raise UserError("--by_block: at density 1 nothing is factorized; nearest: 0.9")


@dataclass(frozen=True)
class Kept(ABC):
    """What is kept on disk of every block until all are there.

    Attributes:
        folder: of the files.
        shapes: the whole dense net, without values.
        blocks: names of the blocks.
    """

    name: ClassVar[str]  # of the files

    folder: Path
    shapes: PreTrainedModel
    blocks: Sequence[str]

    def path(self, number: int) -> Path:
        """Return the file of a block, which is written last."""
        return self.folder / f"{self.name}-{number:05}.safetensors"

    def done(self, number: int) -> bool:
        """Say whether a block has its file."""
        return self.path(number).is_file()

    def of_one(self, number: int, names: Iterable[str]) -> list[str]:
        """Return those of the ``names`` that are in a block."""
        return [name for name in names if name.startswith(f"{self.blocks[number]}.")]

    @contextmanager
    def lent(self, number: int, block: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """Give the sites ``names`` of ``shapes`` their weights, on the CPU, for a while; give up those of the block."""
        for name in names:
            weight = block.get_parameter(f"{name.removeprefix(f'{self.blocks[number]}.')}.weight")
            replace(self.shapes, f"{name}.weight", nn.Parameter(weight.detach().cpu()))  # type: ignore[arg-type]
        empty(block)
        yield
        for name in names:
            empty(self.shapes.get_submodule(name))

    @property
    @abstractmethod
    def sites(self) -> list[str]:
        """Names of the sites whose moments are needed."""

    @abstractmethod
    def bytes(self) -> int:
        """Return how many bytes the files take at most."""

    @abstractmethod
    def write(self, number: int, block: nn.Module, found: dict[str, Any]) -> None:
        """Write the files of a block.

        Args:
            number: of the block.
            block: with its values, which are given up.
            found: by site, what the weighting needs; {} for none. It is given up, too.
        """

    @abstractmethod
    def choose(self) -> tuple[dict[str, Any], float]:
        """Return what goes or stays by site, when all files are there, and what that adds to an example's loss."""

    @abstractmethod
    def told(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """Return the field of the report that says what was chosen."""


class Changes(Kept):
    """What is kept to change every block by itself, in place; what is outside the blocks stays as it is."""

    @abstractmethod
    def change(self, chosen: dict[str, Any], net: PreTrainedModel, number: int, values: bool) -> None:
        """Change a block of a dense net as was chosen, in place.

        Args:
            chosen: by :meth:`choose`.
            net: whose other blocks may be without values, changed or not.
            number: of the block.
            values: False where the block has shapes only.
        """


@dataclass(frozen=True)
class BlockFactors(Changes):
    """Low rank: of every block one file with singular values and means of inputs, of every matrix its components.

    Attributes:
        settings: the weighting.
        rule: for the ranks.
    """

    name = "factors"

    settings: Weighted
    rule: RankRule

    @property
    def sites(self) -> list[str]:
        """All sites."""
        return [site.name for site in find_sites(self.shapes)]

    def bytes(self) -> int:
        """Return the size of as many components as make every matrix smaller."""
        return 4 * dense_site_params(self.shapes)

    def of_matrix(self, number: int, name: str) -> Path:
        """Return the file of the components of a matrix, or stack, of a block."""
        return self.folder / f"components-{number:05}" / f"{name}.safetensors"

    def centred(self) -> frozenset[str]:
        """Return the sites whose bias takes over the mean of the inputs."""
        if self.settings.weighting not in KRONECKER or not self.settings.centred:
            return frozenset()
        return biased_sites(self.shapes, self.rule.stacks(self.shapes))

    def members(self, number: int) -> dict[str, tuple[str, ...]]:
        """Return {first site: all sites} of the matrices and stacks of a block."""
        stacks = self.rule.stacks(self.shapes)
        inside = {name for names in stacks.values() for name in names[1:]}
        return {name: stacks.get(name, (name,)) for name in self.of_one(number, self.sites) if name not in inside}

    def write(self, number: int, block: nn.Module, found: dict[str, KroneckerFactors] | dict[str, Fisher]) -> None:
        """Decompose the matrices of a block and write its files; matrices and moments are given up one by one."""
        from safetensors.torch import save_file

        moments = {name: value for name, value in found.items() if isinstance(value, KroneckerFactors)}
        fisher = {name: value for name, value in found.items() if isinstance(value, Fisher)}
        means = {f"{name}.mean": value.mean for name, value in moments.items()}
        found.clear()
        stacks = self.rule.stacks(self.shapes)
        decomposer = weigh(self.settings, self.shapes, fisher, moments, self.folder, stacks, release=True)
        even = self.rule.allocate(self.shapes) if self.rule.allocation == "uniform" else None
        sigma: dict[str, Tensor] = {}
        for name, names in self.members(number).items():
            if even is not None and name not in even:
                continue
            weight = self._take_weight(block, number, names)
            kept = max(1, largest_rank(*weight.shape)) if even is None else even[name]
            svd = decomposer.svd(name, weight, kept)
            left, right = svd.factors(kept)
            sigma[f"{name}.sigma"] = svd.sigma
            del svd, weight
            path = self.of_matrix(number, name)
            path.parent.mkdir(exist_ok=True)
            with atomic_file(path) as temporary:
                save_file({f"{name}.left": left.cpu(), f"{name}.right": right.cpu()}, temporary)
            del left, right
        with atomic_file(self.path(number)) as temporary:
            save_file(sigma | means, temporary)

    def _take_weight(self, block: nn.Module, number: int, names: Sequence[str]) -> Tensor:
        """Return the weight of a matrix, or the rows of a stack of some, which the block then has no more."""
        start = f"{self.blocks[number]}."
        modules: list[Any] = [block.get_submodule(name.removeprefix(start)) for name in names]
        weights = [module.weight.detach() for module in modules]
        for module in modules:
            empty(module)
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    # ------------------------------------------------------------------------------------ when all are there

    def choose(self) -> tuple[dict[str, int], float]:
        """Return {site: rank}, and the estimate of what factors of these ranks add to an example's loss."""
        sigma = {
            key.removesuffix(".sigma"): value
            for number in range(len(self.blocks))
            for key, value in stored_tensors(self.path(number), ".sigma").items()
        }
        ranks = self.rule.allocate(self.shapes, lambda name, _: sigma[name])
        return ranks, sum(float(sigma[name][rank:].square().sum()) for name, rank in ranks.items()) / 2

    def told(self, chosen: dict[str, int]) -> dict[str, Any]:
        """Return the ranks."""
        return {"ranks": chosen}

    def change(self, chosen: dict[str, int], net: PreTrainedModel, number: int, values: bool) -> None:
        """Put factors in the places of a block's matrices."""
        own = {name: chosen[name] for name in self.of_one(number, chosen)}
        stacks = self.rule.stacks(self.shapes)
        if not values:
            factorize(net, own, _shapes_only, stacks=stacks)
            return
        found = self.of_block(number)
        factorize(net, own, found.factors, bias_change=found.bias_change, stacks=stacks)

    def of_block(self, number: int) -> StoredFactors:
        """Return the factors of a block's matrices."""
        tensors = stored_tensors(self.path(number))
        for path in (self.of_matrix(number, name) for name in self.members(number)):
            tensors |= stored_tensors(path) if path.is_file() else {}
        return StoredFactors(tensors, self.centred())


def _shapes_only(name: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors without values."""
    return weight.new_empty(weight.shape[0], rank), weight.new_empty(rank, weight.shape[1])


def stored_tensors(path: Path, ends: str | tuple[str, ...] = "") -> dict[str, Tensor]:
    """Return the tensors of a file whose names have one of these ends."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key).clone() for key in file.keys() if key.endswith(ends)}  # noqa: SIM118


@dataclass(frozen=True)
class StoredFactors:
    """The factors of one block's matrices, as :func:`~lit_compress.models.surgery.factorize` asks for them.

    Attributes:
        tensors: of the block's file.
        centred: sites whose bias takes over the mean of the inputs.
    """

    tensors: Mapping[str, Tensor]
    centred: frozenset[str]

    def factors(self, name: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return left [out, rank] and right [rank, in] of the matrix of site ``name``."""
        left, right = self.tensors[f"{name}.left"], self.tensors[f"{name}.right"]
        return left[:, :rank].contiguous().to(weight.device), right[:rank].contiguous().to(weight.device)

    def bias_change(self, name: str, weight: Tensor, approx: Tensor) -> Tensor | None:
        """Return what the bias [out] gets, as :meth:`KroneckerDecomposer.bias_change`."""
        mean = self.tensors.get(f"{name}.mean") if name in self.centred else None
        return None if mean is None else change_of_bias(weight, approx, mean)
