"""Models whose layers keep equal numbers of heads and neurons: ordinary models with another configuration.

Which numbers a configuration has is in the record of the architecture. Where the width of a head follows from the width
of hidden states (BERT, GPT-2), heads stay, and neurons go alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from lit_compress.models.accounting import dense_site_params
from lit_compress.models.architectures import get_architecture
from lit_compress.models.shapes import without_values
from lit_compress.models.sites import SubLayer, head_width, size_at, sublayers
from lit_compress.models.surgery import as_linears, describe
from lit_compress.numerics.structures import uniform_options
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LayerShape = Literal["free", "uniform"]  # of a compressed model: whether all layers have the same numbers of units


@dataclass(frozen=True)
class UniformGroup:
    """Sub-layers whose number of units is one number of the configuration.

    Attributes:
        parts: the sub-layers.
        units: number of heads (with grouped queries of keys) or neurons of each in the dense model.
        counts: which numbers may be kept, rising.
        price: weights that one unit has in all of the parts.
    """

    parts: tuple[SubLayer, ...]
    units: int
    counts: tuple[int, ...]
    price: int

    @property
    def removed(self) -> torch.Tensor:
        """How many units go from each part for every count, int64 [counts]."""
        return self.units - torch.tensor(self.counts)


def uniform_groups(net: PreTrainedModel, step: int = 1) -> list[UniformGroup]:
    """Return the groups of sub-layers of the dense ``net`` that may lose units, neurons in steps of ``step``.

    Raises:
        UserError: the configuration of its architecture has none of these numbers.
    """
    record, groups = get_architecture(net), list[UniformGroup]()
    for field, parts in _by_field(net).items():
        units = parts[0].count(net)
        counts = tuple(range(step, units, step))
        if field in record.heads_fields:
            counts = tuple(count for count in range(1, units) if _resized(net, _heads(net, parts[0], count)))
        groups.append(UniformGroup(tuple(parts), units, (*counts, units), sum(part.price(net) for part in parts)))
    if not groups:
        raise UserError(
            f"model.shape: 'uniform' is not for '{net.config.model_type}', whose configuration has no number of "
            "neurons; nearest: free"
        )
    return groups


def even_counts(net: PreTrainedModel, density: float, step: int = 1) -> dict[str, int]:
    """Return by last matrix how many units each sub-layer keeps, near the same share of heads and of neurons.

    ``density``, of the weights of all sites of the dense ``net``, is not exceeded; neurons go in steps of ``step``.

    Raises:
        UserError: so few weights are not possible, or :func:`uniform_groups`.
    """
    groups, total = uniform_groups(net, step), dense_site_params(net)
    savings = [(group.price * group.removed).double() for group in groups]
    losses = [loss * group.removed / group.units for loss, group in zip(savings, groups, strict=True)]
    options = uniform_options(losses, savings, (1 - density) * total)
    if options is None:
        least = 1 - sum(float(loss.max()) for loss in savings) / total
        raise UserError(
            f"model.density: {density:.4g} cannot be reached with model.shape uniform, which leaves every layer of "
            f"'{net.config.model_type}' heads and neurons; the smallest is {least + 5e-5:.4f}"
        )
    return kept_by_part(groups, options)


def kept_by_part(groups: list[UniformGroup], options: list[int]) -> dict[str, int]:
    """Return by last matrix how many units each sub-layer keeps, for an option of every group."""
    pairs = zip(groups, options, strict=True)
    return {part.last: group.counts[option] for group, option in pairs for part in group.parts}


def ordinary_config(net: PreTrainedModel) -> PreTrainedConfig | None:
    """Return the configuration with which the library's own class has the matrices of the fused ``net``.

    None if there is none: it has layers of another kind, of different sizes or of none, or more biases.
    """
    if any(spec["kind"] != "sized" for spec in describe(net).values()):
        return None
    record, sizes = get_architecture(net), dict[str, int]()
    for field, parts in _by_field(net).items():
        widths = {size_at(net, part.last)[1] for part in parts}
        if len(widths) > 1 or 0 in widths:  # without heads or neurons it is no model of the family
            return None
        if field not in record.heads_fields:
            sizes[field] = widths.pop()
        elif (queries := widths.pop() // head_width(net, "decoder")) != getattr(net.config, field):
            sizes |= _heads(net, parts[0], queries * parts[0].heads // getattr(net.config, field))
    if (config := _resized(net, sizes)) is None:
        return None
    ordinary = without_values(lambda: as_linears(type(net)(config)))
    own, others = ({name: value.shape for name, value in of.named_parameters()} for of in (net, ordinary))
    return config if own == others else None


def _by_field(net: PreTrainedModel) -> dict[str, list[SubLayer]]:
    """Return field of the configuration -> the sub-layers whose number of units it is."""
    record, by_field = get_architecture(net), dict[str, list[SubLayer]]()
    fields = {"ffn": record.neurons_field, "attention": next(iter(record.heads_fields), None)}
    for part in sublayers(net, removable=False):
        if field := fields[part.kind]:
            by_field.setdefault(field.format(stack=part.stack), []).append(part)
    return by_field


def _heads(net: PreTrainedModel, part: SubLayer, count: int) -> dict[str, int]:
    """Return the fields of a model whose attentions keep ``count`` heads of keys, with the queries of each."""
    queries, keys = get_architecture(net).heads_fields
    of_each = getattr(net.config, queries) // part.heads
    return {queries: count * of_each, keys: count, "head_dim": head_width(net, "decoder")}


def _resized(net: PreTrainedModel, sizes: dict[str, Any]) -> PreTrainedConfig | None:
    """Return the configuration of ``net`` with other numbers; None if its class refuses them."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        return type(net.config).from_dict(net.config.to_dict() | sizes)
    except (StrictDataclassError, ValueError):
        return None
