"""Other estimates of the Fisher information than K-FAC's: what is chosen by them, and what that adds to the loss.

    python -m benchmarks.second_order.estimates --teachers DIR --data DATA_DIR --tasks stsb [--only kfac ...]
        [--work DIR]

Teachers, data and held-out rows are those of untrained.py; 512 training texts calibrate. At the matrix of a site, an
example has the gradient D = sum_t d_t x_t^T over its T tokens. The inputs x end with a 1, for the bias. The estimate
is A (x) G with

- ``kfac``: A = E_token[x x^T], G = E[sum_t d_t d_t^T], as in lit_compress/calibration/moments.py;
- ``length``: A = E[mean_t x_t x_t^T], so that a token counts 1 / T, and the same G;
- ``reduce``: A = E[(mean_t x_t) (mean_t x_t)^T], G = E[(sum_t d_t) (sum_t d_t)^T] (K-FAC-reduce, arXiv 2311.00636);
- ``nearest``: the product nearest to E[vec(D) vec(D)^T], by two rounds from K-FAC's of A = E[D^T G D] / |G|^2 and
  G = E[D A D^T] / |A|^2 (GFWSVD, arXiv 2505.17974, by power iteration over the examples). Sites with the same input
  are one matrix in it;
- ``ladder``: K-FAC's order of heads and neurons, with costs that are rescaled to measured divergences: of each
  sub-layer, some shares of its units are removed alone and the divergence on 256 training texts is taken (the idea of
  ZipLM, arXiv 2302.04089). For heads and neurons only.

The estimated loss is compared with the mean divergence on the held-out rows. Writes
benchmarks/second_order/results/estimates/<task>-<variant>-<removed>.json; existing ones are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.second_order.estimate import estimated_loss
from benchmarks.second_order.untrained import DENSITIES, HELD_OUT, REMOVES, Untrained
from lit_compress.calibration.moments import Gram, KroneckerFactors, Moments, MomentSums
from lit_compress.calibration.statistics import tokens_at

STUDY = "second_order/estimates"
VARIANTS = ("kfac", "ladder", "length", "reduce", "nearest")
TEXTS, LADDER_TEXTS, ROUNDS = 512, 256, 2
SHARES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)  # of a sub-layer's units that are removed


@dataclass(frozen=True)
class Tokens:
    """What the sites with one input have seen.

    Attributes:
        inputs: [tokens, in + 1], the last of each is 1.
        gradients: [tokens, out], of all sites one after the other.
        examples: the example of each token, int64 [tokens], not falling.
        sites: the outputs of each site, by name.
    """

    inputs: Tensor
    gradients: Tensor
    examples: Tensor
    sites: dict[str, int]


class EveryToken(Moments):
    """K-FAC's passes over the examples, of which the tokens are kept and not their moments."""

    def collector(self, net: Any, names: Sequence[str], device: torch.device | str) -> TokenList:
        """Return empty lists."""
        return TokenList(net, names, device, True)


class TokenList(MomentSums):
    """The inputs of every group of sites, the gradients of every site, and the examples."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._inputs: dict[str, list[Tensor]] = {name: [] for name in self.grams}
        self._examples: dict[str, list[Tensor]] = {name: [] for name in self.grams}
        self._gradients: dict[str, list[Tensor]] = {name: [] for name in self.leader}
        self._seen = dict.fromkeys(self.grams, 0)

    def use(self, name: str, x: Tensor, output: Tensor, where: Tensor | None, rows: int) -> None:
        """Keep the inputs, unless another site does, and the gradient as soon as it is known."""
        if self.leader[name] == name:
            rows, length = x.shape[:2]
            at = torch.arange(rows * length) if where is None else where
            self._examples[name].append(at // length + self._seen[name])
            self._seen[name] += rows
            self._inputs[name].append(tokens_at(x.detach(), where).clone())
        add = self._gradients[name].append
        output.requires_grad_().register_hook(lambda gradient: add(tokens_at(gradient, where).clone()))

    def totals(self) -> Iterator[Tensor]:
        """Yield nothing: there is one process."""
        yield from ()

    def result(self) -> dict[str, Any]:
        """Return the :class:`Tokens` of every group of sites."""
        found = {}
        for name, inputs in self._inputs.items():
            x = torch.cat(inputs)
            own = {site: torch.cat(self._gradients.pop(site)) for site, lead in self.leader.items() if lead == name}
            found[name] = Tokens(
                torch.cat([x, torch.ones(len(x), 1)], 1), torch.cat([*own.values()], 1),
                torch.cat(self._examples[name]), {site: gradients.shape[1] for site, gradients in own.items()},
            )  # fmt: skip
            inputs.clear()
        return found


@dataclass(frozen=True)
class OtherFactors(Moments):
    """The Kronecker factors of a variant, from all tokens.

    Attributes:
        variant: a name; see the module. The ``ladder`` has none.
    """

    variant: str = "kfac"

    def collector(self, net: Any, names: Sequence[str], device: torch.device | str) -> TokenFactors:
        """Return empty lists."""
        return TokenFactors(self.variant, net, names, device, True)


class TokenFactors(TokenList):
    """The tokens, of which the result is the factors of a variant."""

    def __init__(self, variant: str, *args: Any) -> None:
        super().__init__(*args)
        self._variant = variant

    def result(self) -> dict[str, Any]:
        """Return the :class:`KroneckerFactors` of every site."""
        return {
            name: own for tokens in super().result().values() for name, own in factors(self._variant, tokens).items()
        }


def sums(rows: Tensor, examples: Tensor) -> Tensor:
    """Return the sum of the tokens of each example [examples, n] of ``rows`` [tokens, n]."""
    return torch.zeros(int(examples[-1]) + 1, rows.shape[1], dtype=rows.dtype).index_add_(0, examples, rows)


def quadratic(rows: Tensor, left: Tensor, right: Tensor, examples: Tensor) -> Tensor:
    """Return E[R^T (L N^T) R] over examples, [n, n], with R, L, N an example's tokens of the three."""
    parts = torch.bincount(examples).tolist()
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=rows.dtype)
    for r, a, b in zip(*(tensor.split(parts) for tensor in (rows, left, right)), strict=True):
        total.addmm_(r.T, (a @ b.T) @ r)
    return (total + total.T) / (2 * len(parts))


def product(variant: str, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return A [in + 1, in + 1] and G [out, out] of a variant, float64; see the module."""
    x, d, examples = tokens.inputs.double(), tokens.gradients.double(), tokens.examples
    lengths = torch.bincount(examples)
    count = len(lengths)
    inputs, gradients = x.T @ x / len(x), d.T @ d / count
    if variant == "length":
        scaled = x / lengths[examples, None].sqrt()
        inputs = scaled.T @ scaled / count
    if variant == "reduce":
        means, summed = sums(x, examples) / lengths[:, None], sums(d, examples)
        inputs, gradients = means.T @ means / count, summed.T @ summed / count
    for _ in range(ROUNDS if variant == "nearest" else 0):
        inputs = quadratic(x, d @ gradients, d, examples) / gradients.square().sum()
        gradients = quadratic(d, x @ inputs, x, examples) / inputs.square().sum()
    return inputs, gradients


def factors(variant: str, tokens: Tokens) -> dict[str, KroneckerFactors]:
    """Return the Kronecker factors of sites as a compression reads them: the 1 of the inputs gives their mean."""
    inputs, gradients = product(variant, tokens)
    scale = float(inputs[-1, -1])
    gram, start, found = gram_of(inputs[:-1, :-1] / scale), 0, {}
    for site, size in tokens.sites.items():
        own = gradients[start : start + size, start : start + size] * scale
        found[site] = KroneckerFactors(inputs[:-1, -1] / scale, 1, 1, gram, gram_of(own))
        start += size
    return found


def gram_of(matrix: Tensor) -> Gram:
    """Return the sum that is the symmetric ``matrix`` [n, n]."""
    gram = Gram(len(matrix), torch.float64)
    for strip, end in zip(gram.strips, gram.ends, strict=True):
        strip.copy_(matrix[end - len(strip) : end, :end])
    return gram


def rescaled(costs: Tensor, levels: Sequence[tuple[int, float]]) -> Tensor:
    """Return the costs of steps whose sums are twice the measured divergences.

    Args:
        costs: of each step, [steps].
        levels: how many steps were taken, rising, and the divergence after them; the last level has all steps. A
            divergence below an earlier one counts as that one.

    Returns:
        The costs, float64 [steps]; between two levels in the proportions of ``costs``.
    """
    made, before, highest = costs.double().clamp_min(1e-12), 0, 0.0
    for end, found in levels:
        part = made[before:end]
        made[before:end] = part / part.sum() * 2 * max(found - highest, 1e-9)
        before, highest = end, max(found, highest)
    return made


class Estimates:
    """One task: its tokens, and what is chosen by each variant.

    Args:
        options: of the script.
        task: name.
    """

    def __init__(self, options: Any, task: str) -> None:
        from lit_compress.calibration.statistics import whole

        self.made, self.options, self.task = Untrained(options, task), options, task
        self.dense, self.kind = self.made.dense.eval(), self.made.parts.method.kind
        self.held = list(self.made.held.val_dataloader()[0])
        self.expected = self.logits(self.dense, self.held)
        self._measured: dict[tuple[str, str], dict[str, Tensor]] = {}
        texts = list(self.made.parts.data.calibration_dataloader(options.texts))
        self.tokens = whole(self.dense, EveryToken(labels="drawn"), texts, self.kind, device="cpu")

    @torch.no_grad()
    def logits(self, net: Any, batches: Sequence[dict[str, Tensor]]) -> list[Any]:
        """Return the answers to ``batches``."""
        return [self.kind.logits(self.kind.run(net.eval(), batch), batch) for batch in batches]

    def divergences(self, net: Any, batches: Sequence[dict[str, Tensor]], expected: Sequence[Any]) -> list[float]:
        """Return the divergence of each example's answer from the dense model's."""
        return [
            self.kind.divergence(ours[i : i + 1], theirs[i : i + 1], {k: v[i : i + 1] for k, v in batch.items()})
            for ours, theirs, batch in zip(self.logits(net, batches), expected, batches, strict=True)
            for i in range(len(theirs))
        ]

    def compression(self, removes: str, density: float) -> Any:
        """Return the compression at a density."""
        from lit_compress.cli.factorizing import one_shot_stage

        stage = one_shot_stage(self.made.command_line(removes, self.made.folders[0]).build().at(density).method)
        return stage.compression

    def measured(self, variant: str, removes: str) -> dict[str, Tensor]:
        """Return the measurements of all matrices by a variant."""
        if variant == "ladder":
            return self.laddered(self.measured("kfac", removes))
        if (variant, removes) not in self._measured:
            from lit_compress.models.sites import sublayers

            found = {name: own for tokens in self.tokens.values() for name, own in factors(variant, tokens).items()}
            if removes == "structures":
                found = {part.last: found[part.last] for part in sublayers(self.dense, removable=False)}
            parts = self.compression(removes, max(DENSITIES)).measure(self.dense, list(found), found)
            self._measured = {(variant, removes): {k: v for _, tensors in parts for k, v in tensors.items()}}
        return self._measured[variant, removes]

    def laddered(self, measured: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return measurements of heads and neurons whose costs are rescaled."""
        batches = list(self.made.parts.data.calibration_dataloader(self.options.ladder_texts))
        expected, made = self.logits(self.dense, batches), dict(measured)
        compression = self.compression("structures", max(DENSITIES))
        for name in (key.removesuffix(".costs") for key in measured if key.endswith(".costs")):
            ends, levels = measured[f"{name}.sizes"].cumsum(0), [(0, 0.0)]
            for share in SHARES:
                steps = int((ends <= share * ends[-1] + 1e-9).sum())
                if steps > levels[-1][0]:
                    net, order = copy.deepcopy(self.dense), measured[f"{name}.order"]
                    stay = torch.ones(len(order), dtype=torch.bool).index_fill(0, order[: ends[steps - 1]], False)
                    compression.fill(net, {name: stay}, measured)
                    levels.append((steps, mean(self.divergences(net, batches, expected))))
            made[f"{name}.costs"] = rescaled(measured[f"{name}.costs"], levels[1:])
        return made

    def result(self, variant: str, removes: str) -> dict[str, Any]:
        """Return what is chosen by a variant at all densities, and what that adds to the loss of held-out rows."""
        from lit_compress.evaluation.evaluate import evaluate
        from lit_compress.stages.compression import compress

        parts, rows, device = self.made.parts, {}, torch.device("cpu")
        for density in self.options.densities:
            compression, measured = self.compression(removes, density), self.measured(variant, removes)
            net = compress(self.dense, compression, parts.method.task, parts.data, device, keep=True, measured=measured)
            found = self.divergences(net, self.held, self.expected)
            key = parts.data.record.metrics[0]
            rows[f"{density:g}"] = {
                "estimated": estimated_loss(self.dense, compression, measured), "measured": mean(found),
                "error": stdev(found) / len(found) ** 0.5,
                "metric": evaluate(net.eval(), self.made.held, sure=True)[f"val/{key}"],
            }  # fmt: skip
        return {"rows": rows, "held_out": sum(map(len, self.expected)), "texts": self.options.texts}


def main() -> None:
    """Make what is missing."""
    parser = common.parser(
        STUDY, __doc__, "data", "teachers", tasks=tuple(HELD_OUT), only=VARIANTS,
        work=Path("runs/second_order_untrained"),
    )  # fmt: skip
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--ladder_texts", type=int, default=LADDER_TEXTS)
    options = parser.parse_args()
    options.list = None
    torch.set_num_threads(options.threads)
    for task in options.tasks:
        todo = [
            (variant, removes) for removes in REMOVES for variant in options.only
            if not (variant == "ladder" and removes == "components")
            and common.missing(options, f"{task}-{variant}-{removes}")
        ]  # fmt: skip
        made = Estimates(options, task) if todo else None
        for variant, removes in todo:
            assert made is not None
            name = f"{task}-{variant}-{removes}"
            facts = {"name": name, "task": task, "variant": variant, "removes": removes, "threads": options.threads}
            common.write(options, name, facts | made.result(variant, removes) | common.frame())
            print(name, flush=True)


if __name__ == "__main__":
    main()
