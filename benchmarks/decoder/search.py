"""One search over whole sub-layers, heads and neurons, after SPDY and ZipLM: the rows ``search`` of run.py and, for
encoders, of second_order/untrained.py.

Every sub-layer has a few sizes, down to none. The steps:

    table    The divergence of the model in which one sub-layer alone has a smaller size, for every sub-layer and size.
             K-FAC's path says which heads and neurons go, and its update repairs the rest: the local refinement.
    draws    The sizes of all sub-layers by dynamic programming: the sum of c_i l_i is least, for l_i of the table and
             a random coefficient c_i of each sub-layer, within the density. Losses of sub-layers that go as a whole
             count by a factor in addition, since refinement repairs these best. The divergence of the whole model
             judges the draws of a factor; each draw changes some coefficients of the best one before.
    finals   The best model of every factor is refined for a few steps, on texts that do not judge. The divergence
             after that decides.

SPDY (Frantar and Alistarh, ICML 2022, https://arxiv.org/abs/2201.13096) has coefficients and dynamic programming; ZipLM
(https://arxiv.org/abs/2302.04089) prunes heads and neurons so. The factors and the finals are ours. 8 texts of the
calibration judge a decoder, the same that choose whole blocks. The table is kept in ``--work`` and read again; it is of
one model and one calibration.
"""

from __future__ import annotations

import copy
import json
import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.decoder.texts import JUDGES
from lit_compress.calibration.moments import KroneckerFactors
from lit_compress.calibration.statistics import frozen, real_rows
from lit_compress.calibration.walk import calibration_parts
from lit_compress.models.accounting import dense_site_params
from lit_compress.models.cut import cut_units
from lit_compress.models.sites import blocks, held_part, sublayers
from lit_compress.numerics.kronecker import centred, change_of_bias
from lit_compress.numerics.structures import inverse_moment, without_inputs
from lit_compress.stages.compression import CALIBRATION_SEED
from lit_compress.stages.refinement import refine_net
from lit_compress.stages.units import UnitRemoval, unit_inputs
from lit_compress.utils.files import write_json
from lit_compress.utils.progress import track

REFINED_ON, STEPS = 16, 10  # texts and steps a block of the finals
EIGHTHS = (7, 6, 5, 4, 2, 0)  # of the neurons that a feed-forward network may keep
ALIGNED = 64  # numbers of neurons are multiples of it
FACTORS, DRAWS = (1.0, 0.5, 0.25, 0.125), 16  # of the losses of removed sub-layers; models of each that are judged
SPREAD, CHANGED = 0.5, 0.1  # of the logarithms of coefficients; share of them that a draw changes
Sizes = dict[str, int]  # last matrix of a sub-layer -> units that stay


def best_sizes(losses: Sequence[Sequence[float]], prices: Sequence[Sequence[int]], limit: int) -> list[int]:
    """Return an option for every group so that the sum of the losses is least, and that of the prices within ``limit``.

    Raises:
        ValueError: the cheapest options cost more.

    >>> best_sizes([[0, 1, 5], [0, 2, 4]], [[9, 2, 0], [4, 2, 0]], 4)
    [1, 1]
    """
    least = torch.zeros(limit + 1, dtype=torch.float64)  # of the groups so far, by what they may cost together
    choices = []
    for loss, price in zip(losses, prices, strict=True):
        options = torch.full((len(loss), limit + 1), math.inf, dtype=torch.float64)
        for option, (own, cost) in enumerate(zip(loss, price, strict=True)):
            if cost <= limit:
                options[option, cost:] = least[: limit + 1 - cost] + own
        least, choice = options.min(0)
        choices.append(choice)
    if least[limit] == math.inf:
        raise ValueError(f"nothing costs {limit} or less")
    found: list[int] = []
    for choice, price in zip(reversed(choices), reversed(prices), strict=True):
        found.append(int(choice[limit]))
        limit -= price[found[-1]]
    return found[::-1]


class Searched(UnitRemoval):
    """Heads, neurons and whole sub-layers at the ``sizes`` of a search."""

    def __init__(self, rule: Any, settings: Any) -> None:
        super().__init__(replace(rule, uniform=False), settings)
        self.sizes: Sizes = {}
        self._repaired: dict[tuple[str, int], tuple[Tensor, Tensor | None]] = {}  # last matrices and their biases

    def plan(self, net: Any, measured: Any = None) -> dict[str, Tensor]:
        """Return the units that stay, bool [units], by last matrix."""
        units = self.units(net, measured)
        return {
            name: units[name].without(units[name].count - size) if size else torch.zeros(units[name].count) > 0
            for name, size in self.sizes.items()
        }

    @torch.no_grad()
    def fill(self, net: Any, plan: dict[str, Tensor], measured: Any) -> None:
        """Update the rest of the last matrices; remove units, and sub-layers without any."""
        for part in sublayers(net, gated=False):
            kept = plan.get(part.last)
            layer = net.get_submodule(part.last)
            if kept is None or kept.all() or (layer.bias is None and not kept.any()):
                continue
            key = (part.last, int(kept.sum()))
            if key not in self._repaired:
                stored: Any = {k: measured[f"{part.last}.{k}"] for k in ("mean", "tokens", "inputs")}
                moment, weight = KroneckerFactors.of_stored_inputs(stored), layer.weight.double()
                mean = None if layer.bias is None else moment.mean
                inverse = inverse_moment(centred(moment.inputs(), mean), part.last)
                new = without_inputs(weight, inverse, unit_inputs(net, part)[~kept].flatten())
                bias = None if mean is None else (layer.bias + change_of_bias(weight, new, mean)).float()
                self._repaired[key] = new.float(), bias
            weight, bias = self._repaired[key]
            layer.weight.copy_(weight)
            if bias is not None:
                layer.bias.copy_(bias)
        cut_units(net, plan, whole=True)


class Judge:
    """The divergence of changed models from the dense one on some texts; the dense states are kept."""

    def __init__(self, net: Any, batches: Any, kind: Any) -> None:
        self.net, self.kind, cpu = net.eval(), kind, torch.device("cpu")
        self.rows = [real_rows(kind, batch, cpu, None) for batch in batches]
        self.names, self.answers = [name for *_, name, _ in blocks(net)], list[Tensor]()
        self.states: list[dict[str, Any]] = [{} for _ in self.rows]
        with torch.no_grad():
            for rows, kept in zip(self.rows, self.states, strict=True):
                hooks = [
                    net.get_submodule(name).register_forward_hook(lambda *a, n=name, k=kept: k.update({n: a[-1]}))
                    for name in self.names
                ]
                self.answers.append(kind.logits(kind.run(net, rows), rows))
                for hook in hooks:
                    hook.remove()

    def loss(self, other: Any, first: str | None = None) -> float:
        """Return the mean divergence of a text; blocks before ``first`` are as in the dense model."""
        before = self.names[: self.names.index(first)] if first else []
        total = 0.0
        with torch.no_grad():
            for rows, kept, theirs in zip(self.rows, self.states, self.answers, strict=True):
                for name in before:
                    vars(other.get_submodule(name))["forward"] = lambda *_, _kept=kept[name], **__: _kept
                answer = self.kind.logits(self.kind.run(other, rows), rows)
                total += float(self.kind.divergence(answer, theirs, rows))
        return total / sum(len(rows["index"]) for rows in self.rows)


def changed(net: Any, removal: Searched, measured: Any, sizes: Sizes) -> Any:
    """Return the model at some sizes, in evaluation mode; it shares with ``net`` all tensors that are not changed."""
    own = {id(value) for name in sizes for value in net.get_submodule(name).parameters()}
    shared = {id(p): p for values in (net.parameters(), net.buffers()) for p in values if id(p) not in own}
    small, removal.sizes = copy.deepcopy(net, shared).eval(), sizes
    removal.fill(small, removal.plan(net, measured), measured)
    return small


def sizes_of(net: Any, removal: Searched, measured: Any) -> dict[str, list[int]]:
    """Return the sizes of every sub-layer by last matrix, the dense one first; the first attention keeps a head."""
    parts, units = sublayers(net, gated=False), removal.units(net, measured)
    held, sizes = held_part(parts), {}
    for part in (part for part in parts if part.last in units):
        count = units[part.last].count
        fewer = range(count - 1, -1, -1) if part.kind == "attention" else [e * count // 8 for e in EIGHTHS]
        if part.kind == "ffn":
            fewer = [size - size % ALIGNED for size in fewer]
        sizes[part.last] = [count, *(size for size in dict.fromkeys(fewer) if size or part != held)]
    return sizes


def table(net: Any, removal: Searched, measured: Any, judge: Judge, file: Path) -> dict[str, dict[int, float]]:
    """Return the divergence by sub-layer and size; finished sub-layers are read from ``file``."""
    sizes = sizes_of(net, removal, measured)
    known = json.loads(file.read_text()) if file.exists() else {}
    places = {part.last: part.block for part in sublayers(net, gated=False)}
    for name in track([name for name in sizes if name not in known], "one sub-layer smaller", len(sizes) - len(known)):
        small = [size for size in sizes[name][1:]]
        losses = [judge.loss(changed(net, removal, measured, {name: size}), places[name]) for size in small]
        known[name] = {str(size): loss for size, loss in zip(sizes[name], [0.0, *losses], strict=True)}
        write_json(file, known)
    return {name: {int(size): loss for size, loss in known[name].items()} for name in sizes}


class Draws:
    """Models by dynamic programming with random coefficients, judged one after the other.

    Args:
        losses: the table.
        prices: weights of a unit by sub-layer.
        limit: weights that may stay.
        factor: by which losses of sub-layers that go as a whole count.
    """

    def __init__(
        self, losses: dict[str, dict[int, float]], prices: dict[str, int], limit: float, factor: float
    ) -> None:
        step = math.gcd(*(size * prices[name] for name, own in losses.items() for size in own))
        self.names, self.sizes = list(losses), [list(own) for own in losses.values()]
        self.costs = [[size * prices[name] // step for size in own] for name, own in losses.items()]
        self.losses = [
            [max(loss, 0.0) * (1 if size else factor) for size, loss in own.items()] for own in losses.values()
        ]
        self.limit = int(limit / step + 1e-9)

    def at(self, coefficients: Sequence[float]) -> Sizes:
        """Return the sizes of all sub-layers for some coefficients."""
        weighted = [[value * c for value in own] for own, c in zip(self.losses, coefficients, strict=True)]
        found = best_sizes(weighted, self.costs, self.limit)
        return {name: own[option] for name, own, option in zip(self.names, self.sizes, found, strict=True)}

    def best(self, loss: Any, number: random.Random) -> tuple[float, Sizes]:
        """Return the least loss of the judged models, and its sizes."""
        best, kept, known = math.inf, [1.0] * len(self.names), dict[str, float]()
        for draw in range(DRAWS):
            own = [c * math.exp(number.gauss(0, SPREAD)) if draw and number.random() < CHANGED else c for c in kept]
            sizes = self.at(own)
            if (key := str(sizes)) not in known:
                known[key] = loss(sizes)
            if known[key] < best:
                best, kept = known[key], own
        return best, self.at(kept)


def search(
    folder: Path, net: Any, removal: Searched, measured: Any, data: Any, kind: Any,
    judged: int = JUDGES, refined: int = REFINED_ON,
) -> dict[str, Any]:  # fmt: skip
    """Set the sizes of all sub-layers at the density of ``removal``; return facts about the search.

    ``judged`` and ``refined`` are numbers of texts that judge, and that the finals are refined on.
    """
    start = time.process_time()
    folder.mkdir(parents=True, exist_ok=True)
    with frozen(net):
        judge = Judge(net, data.calibration_dataloader(judged, CALIBRATION_SEED, "prune.examples"), kind)
        losses = table(net, removal, measured, judge, folder / "table.json")
        prices = {name: unit.price for name, unit in removal.units(net, measured).items()}
        limit, number, finals = removal.rule.density * dense_site_params(net), random.Random(0), list[dict[str, Any]]()
        for factor in track(FACTORS, "draws", len(FACTORS)):
            before, sizes = Draws(losses, prices, limit, factor).best(
                lambda own: judge.loss(changed(net, removal, measured, own)), number
            )
            finals.append({"factor": factor, "before": before, "sizes": sizes})
    known: dict[str, float] = {}
    texts = data.calibration_dataloader(judged + refined, CALIBRATION_SEED, "prune.examples")
    judges = {str(text.tolist()) for rows in judge.rows for text in rows["input_ids"]}
    rows = calibration_parts(kind, _others(texts, judges), None)
    for final in finals:
        if (key := str(final["sizes"])) not in known:
            small, removal.sizes = copy.deepcopy(net), final["sizes"]
            removal.fill(small, removal.plan(net, measured), measured)
            with tempfile.TemporaryDirectory() as states:
                refine_net(net, small, kind, rows, STEPS, Path(states), torch.device("cpu"))
            known[key] = judge.loss(small.eval())
        final["after"] = known[key]
        print(final["factor"], final["before"], final["after"], list(final["sizes"].values()), flush=True)
    removal.sizes = min(finals, key=lambda final: final["after"])["sizes"]
    return {"search": {"finals": finals, "seconds": time.process_time() - start}}


def _others(batches: Any, judges: set[str]) -> Any:
    """Yield the examples that do not judge."""
    for rows in batches:
        left = torch.tensor([str(text.tolist()) not in judges for text in rows["input_ids"]])
        if left.any():
            yield {name: column[left] for name, column in rows.items()}
