"""Kronecker factors of the Fisher information of a model's sites: second moments of inputs and of gradients.

For the matrix of a site, y = W x, over the tokens of all examples and all its uses in a forward (second-order
compression, section 1; K-FAC, Martens & Grosse 2015, arXiv 1503.05671; the expansion over tokens is from Eschenhagen et
al. 2023, arXiv 2311.00636):

    A = E_token[x x^T] [in, in],    m = E_token[x] [in],    G = T E_token[d d^T] [out, out]

with d the gradient of one example's loss at a token's output and T the tokens (times uses) of an example, so that
tr(G (W - X) A (W - X)^T) is 2 dL of an example, on one scale for all sites, encoder's and decoder's. The loss is the
negative log-likelihood under labels that are drawn from the model, or exact (numerics/sampled_labels.py).

For vectors of whole texts (sentence models) every text counts once: A and m are means over the texts of a text's mean.
The loss of a vector, a mean over T tokens, reaches each of them by about 1 / T: a text's sum of d d^T x x^T is in
proportion to its mean of x x^T. In a mean over all tokens a long text would count more.

Both moments are summed batch by batch: A in the forward, G in one backward that computes no gradient of any weight.
Only the lower triangle, in blocks, is computed and kept. A batch goes through the model in parts of at most 512 tokens:
the graph of more takes more memory than all sums (BERT-base: 0.7 GB of sums, 0.2 GB of graph). Nothing depends on how
examples are put into batches, on padding, or on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_compress.calibration.statistics import Batch, Collector, Statistic, tokens_at
from lit_compress.models.sites import Model, shared_inputs, size_at
from lit_compress.numerics.sampled_labels import fisher_loss
from lit_compress.tasks import TaskType
from lit_compress.utils.devices import double, place_of_sums
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note

BLOCK = 512  # rows of a block of the lower triangle; smaller ones save more products, larger ones are faster each


class Gram:
    """The sum of v v^T over vectors v [size]; the block-wise lower triangle is kept."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.size, self.ends = size, [min(start + BLOCK, size) for start in range(0, size, BLOCK)]
        numbers = [(end - start) * end for start, end in zip([0, *self.ends], self.ends, strict=False)]
        self.flat = torch.zeros(sum(numbers), dtype=dtype, device=device)  # one tensor, so that one reduction serves
        self.strips = [part.view(-1, end) for part, end in zip(self.flat.split(numbers), self.ends, strict=True)]

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


@dataclass(frozen=True)
class KroneckerFactors:
    """The moments of one site. Sites that read the same input share the sum of A.

    Attributes:
        mean: m [in], float64, on the CPU.
        tokens: how many inputs were summed, over all examples and uses; those of a text as one where texts count.
        examples: how many examples.
    """

    mean: Tensor
    tokens: float
    examples: int
    _inputs: Gram
    _gradients: Gram | None

    def stored_inputs(self) -> dict[str, Tensor]:
        """Return the sums for a file, from which :meth:`of_stored_inputs` makes the moments of a site's inputs."""
        return {"mean": self.mean, "tokens": torch.tensor(self.tokens), "inputs": self._inputs.flat}

    @staticmethod
    def of_stored_inputs(tensors: Mapping[str, Tensor]) -> KroneckerFactors:
        """Return the moments of the inputs alone, without gradients."""
        gram = Gram(len(tensors["mean"]), tensors["inputs"].dtype)
        gram.flat.copy_(tensors["inputs"])
        return KroneckerFactors(tensors["mean"], float(tensors["tokens"]), 0, gram, None)

    def inputs(self) -> Tensor:
        """Return A = E_token[x x^T], float64 [in, in]; made again at every call."""
        return self._inputs.whole(1 / self.tokens)

    def gradients(self) -> Tensor:
        """Return G = T E_token[d d^T], the sum over the tokens of an example, float64 [out, out], made again."""
        assert self._gradients is not None, "Moments(labels=None) has no gradients"
        return self._gradients.whole(1 / self.examples)


@dataclass(frozen=True)
class Moments(Statistic):
    """The Kronecker factors of sites, which hold Linears or their replacements.

    A site with fewer tokens than inputs has a singular A, which a note says; a decomposition damps it.

    Attributes:
        labels: ``drawn`` from the model, one for every distribution; ``exact``, the expectation over two classes.
            None: no gradients, only the second moments of the inputs.
        by_text: every text counts once in A and m, however long it is; False: every token.
    """

    by_text: bool = False
    title = "Kronecker factors"

    def collector(self, net: Any, names: Sequence[str], device: torch.device | str) -> MomentSums:
        """Return empty sums."""
        return MomentSums(net, names, device, self.labels is not None, self.by_text)

    def loss(self, task: TaskType, logits: Any, rows: Batch) -> Tensor:
        """Return the loss whose gradients give the Fisher information."""
        assert self.labels == "drawn" or self.labels == "exact", self.labels
        counted, index = task.counted(rows), rows["index"]
        return fisher_loss(logits, task.loss, self.labels, counted=counted, index=index, seed=self.seed)


def lengths(where: Tensor | None, shape: torch.Size, texts: int) -> Tensor:
    """Return the tokens of the text of each token, int64 [tokens], for inputs of a shape [b, length] or [b * length].

    Args:
        where: places of the tokens among all, int64; None for all.
        texts: how many there are, b.
    """
    places = torch.arange(shape.numel()) if where is None else where
    text = places // (shape.numel() // texts)
    return text.new_zeros(texts).index_add_(0, text, torch.ones_like(text))[text]  # bincount lets the host wait


class MomentSums(Collector):
    """The sums of sites, and the number of tokens and examples.

    Sums are of the model's dtype, on ``device``. Gradients are summed only if they are asked for.
    """

    by_token = True

    def __init__(
        self, net: Any, names: Sequence[str], device: torch.device | str, gradients: bool, by_text: bool = False
    ) -> None:  # fmt: skip
        self.with_gradients, self.by_text = gradients, by_text
        place = place_of_sums(device)
        self.grams: dict[str, Gram] = {}
        self.outer: dict[str, Gram] = {}
        self.leader = {name: name for name in names}  # the site whose A a site shares
        for group in shared_inputs(net):
            inside = [name for name in group if name in names]
            self.leader.update(dict.fromkeys(inside, inside[0] if inside else ""))
        self.means: dict[str, Tensor] = {}  # sum of the inputs, their weight and their number
        for name in names:
            outputs, inputs = size_at(net, name)
            if self.leader[name] == name:
                self.grams[name] = Gram(inputs, net.dtype, device)
                self.means[name] = torch.zeros(inputs + 2, dtype=torch.float64, device=place)
            if gradients:
                self.outer[name] = Gram(outputs, net.dtype, device)

    def use(self, name: str, x: Tensor, output: Tensor, where: Tensor | None, rows: int) -> None:
        """Add the inputs, unless another site does, and the gradient as soon as it is known."""
        if self.leader[name] == name:
            inputs = tokens_at(x.detach(), where)
            count, sums = [len(inputs)] * 2, self.means[name]
            if self.by_text:
                weights, count[0] = lengths(where, x.shape[:-1], rows).to(inputs).reciprocal()[:, None], rows
                sums[:-2] += double(inputs * weights).sum(0).to(sums.device)
                inputs = inputs * weights.sqrt()
            else:
                sums[:-2] += double(inputs).sum(0).to(sums.device)
            self.grams[name].add(inputs)
            sums[-2:] += torch.tensor(count, device=sums.device)
        if self.with_gradients:
            add = self.outer[name].add
            output.requires_grad_().register_hook(lambda gradient: add(tokens_at(gradient, where)))

    def totals(self) -> Iterator[Tensor]:
        """Yield the sums of all sites."""
        yield from self.means.values()
        yield from (gram.flat for gram in (*self.grams.values(), *self.outer.values()))

    def result(self) -> dict[str, KroneckerFactors]:
        """Return the factors of every site, checked."""
        factors = {}
        for name, leader in self.leader.items():
            inputs, outer = self.grams[leader], self.outer.get(name)
            *_, weight, tokens = self.means[leader].tolist()
            for gram, what in ((inputs, "inputs"), (outer, "gradients")):
                if gram is not None and not gram.flat.isfinite().all():
                    raise UserError(f"calibration: {what} at '{name}' are inf or NaN; give a model with a finite loss")
            if outer is not None and not outer.flat.any():
                raise UserError(f"calibration: no gradient reaches '{name}'; leave it out, or give other examples")
            if tokens < inputs.size and leader == name:
                note(
                    f"calibration: {tokens:.0f} tokens are fewer than the {inputs.size} inputs of '{name}'; directions "
                    "without any count only by the damping"
                )
            mean = self.means[leader][:-2].cpu() / weight
            factors[name] = KroneckerFactors(mean, weight, self.examples, inputs, outer)
        self.grams, self.outer = {}, {}
        return factors


def parts_within(net: Model, statistic: Moments, limit: float) -> list[list[str]]:
    """Return the sites that are asked in parts whose sums take at most ``limit`` bytes each, in forward order.

    Sites that read the same input stay together.
    """
    asked, parts = statistic.names(net), list[list[str]]([[]])
    left = limit
    for group in shared_inputs(net):
        own = [name for name in group if name in asked]
        needs = statistic.bytes(net, own)
        if needs > left and parts[-1]:
            parts.append([])
            left = limit
        parts[-1] += own
        left -= needs
    return parts
