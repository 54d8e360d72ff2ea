"""Kronecker factors of the Fisher information of a net's sites: second moments of their inputs and of their gradients.

For the matrix of a site, y = W x, over the tokens of all examples and all its uses in a forward (second-order
compression, section 1; K-FAC, Martens & Grosse 2015, arXiv 1503.05671; the expansion over tokens is that of
Eschenhagen et al. 2023, arXiv 2311.00636):

    A = E_token[x x^T] [in, in],    m = E_token[x] [in],    G = T E_token[d d^T] [out, out]

with d the gradient of one example's loss at a token's output and T the tokens (times uses) of an example, so that
tr(G (W - X) A (W - X)^T) is 2 dL of an example, on one scale for all sites, encoder's and decoder's. The loss is the
negative log-likelihood under labels that are drawn from the net, exact or true (numerics/sampled_labels.py).

Both moments are summed batch by batch: A in the forward, G in one backward that computes no gradient of any weight.
Only the lower triangle, in blocks, is computed and kept. A batch goes through the net in parts of at most 512 tokens:
the graph of more takes more memory than all sums (BERT-base: 0.7 GB of sums, 0.2 GB of graph). Nothing depends on how
examples are put into batches, on padding, or on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.calibration.fisher import _frozen, row_parts
from lit_compress.calibration.grams import Counts, Gram
from lit_compress.models.sites import Site, find_sites, shared_inputs
from lit_compress.numerics.sampled_labels import Labels, fisher_losses
from lit_compress.tasks import TaskType, task_type
from lit_compress.utils.devices import double, place_of_sums
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 512  # of one forward, padding included; one example at least

Rows = dict[str, Tensor]
Uses = dict[str, set[int]]  # site -> numbers of its uses in a forward


@dataclass(frozen=True)
class KroneckerFactors:
    """The moments of one site, or of a table. Those of sites that read the same input share the sum of A.

    Attributes:
        mean: m [in], float64, on the CPU; empty for a table.
        tokens: how many inputs were summed, over all examples and uses.
        examples: how many examples.
    """

    mean: Tensor
    tokens: int
    examples: int
    _inputs: Gram | Counts | None
    _gradients: Gram | None

    @property
    def outputs(self) -> int:
        """How many outputs the site has."""
        assert self._gradients is not None, "no gradients"
        return self._gradients.size

    def released(self) -> KroneckerFactors:
        """Return the same without the sums, whose memory is free when nothing else has them."""
        return replace(self, _inputs=None, _gradients=None)

    def stored_inputs(self) -> dict[str, Tensor]:
        """Return what :meth:`of_stored_inputs` makes the moments of the inputs of a site from, to be kept in a file."""
        assert isinstance(self._inputs, Gram), "released, or of a table"
        return {"mean": self.mean, "tokens": torch.tensor(self.tokens), "inputs": self._inputs.flat}

    @staticmethod
    def of_stored_inputs(tensors: Mapping[str, Tensor]) -> KroneckerFactors:
        """Return the moments of the inputs alone, without gradients."""
        gram = Gram(len(tensors["mean"]), tensors["inputs"].dtype)
        gram.flat.copy_(tensors["inputs"])
        return KroneckerFactors(tensors["mean"], int(tensors["tokens"]), 0, gram, None)

    def inputs(self) -> Tensor:
        """Return A = E_token[x x^T], float64 [in, in], for a table its diagonal [in]; made anew at every call."""
        assert self._inputs is not None, "released"
        return self._inputs.whole(1 / self.tokens)

    def gradients(self) -> Tensor:
        """Return G = T E_token[d d^T], the sum over the tokens of an example, float64 [out, out], made anew."""
        assert self._gradients is not None, "released, or collect_kronecker(labels=None) has no gradients"
        return self._gradients.whole(1 / self.examples)


def collect_kronecker(
    net: PreTrainedModel,
    batches: Iterable[Rows],
    kind: TaskType | str,
    sites: Sequence[str] | None = None,
    *,
    labels: Labels | None = "drawn",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    table: str | None = None,
    reduce: Callable[[Tensor], object] | None = None,
) -> dict[str, KroneckerFactors]:
    """Return the Kronecker factors of the Fisher information of every site, on the examples of ``batches``.

    The net runs where it is, in evaluation mode and its own dtype (float32 or float64), not wrapped by any strategy;
    afterwards it is as it was. What stands at a site may be a Linear or what has replaced it.

    Args:
        net: a fine-tuned net with its task's head.
        batches: as :class:`lit_compress.data.datamodule.PaddedBatches` makes them, ``index`` included; rows whose index
            is -1 are left out. Ranks may have different numbers of batches; an example should be on one rank only.
        kind: of the task; or its name, for the usual one.
        sites: their names; None for all. Calls for a part of them each, one after the other, need less memory.
        labels: ``drawn`` from the net, one for every distribution; ``exact``, the expectation over the classes, for one
            distribution per example, in classes - 1 backward passes; ``true``, those of the data, which only these
            need. None: no gradients, only the inputs, in forwards only.
        seed: of the draws, which depend on it and on an example's index.
        dtype: of the sums; None for the net's.
        device: where the sums are.
        table: name of the table of token embeddings, to collect its factors as those of a matrix [width, tokens].
        reduce: in-place all-reduce (SUM) over ranks with other examples; called at the end, for every sum.

    Raises:
        UserError: a site is not one of the net's, labels are missing, there are no examples, no gradient reaches a
            site, or inputs or gradients are inf or NaN.

    A site with fewer tokens than inputs has a singular A, which a note says; a decomposition damps it.
    """
    chosen = _named(net, sites)
    assert net.dtype in (torch.float32, torch.float64), net.dtype
    sums = _Sums(net, chosen, dtype or net.dtype, device, labels is not None, table)
    task, loose = task_type(kind), None
    with _frozen(net), torch.set_grad_enabled(labels is not None), torch.autocast(net.device.type, enabled=False):
        for rows in (part for batch in batches for part in _parts(task, _real_rows(task, batch, net.device, labels))):
            loose = _loose_uses(net, task, rows, chosen) if loose is None else loose
            sums.examples += len(rows["index"])
            single = {} if len(rows["index"]) == 1 else {name: site for name, site in chosen.items() if loose[name]}
            joint = [*filter(None, [table]), *(name for name in chosen if name not in single)]
            _add(net, task, rows, joint, sums, loose, labels, seed)
            for i in range(len(rows["index"])) if single else ():
                row = {name: column[i : i + 1] for name, column in rows.items()}
                _add(net, task, row, list(single), sums, loose, labels, seed)
    if reduce is not None:
        sums.reduce(reduce)
    return sums.result()


def _named(net: PreTrainedModel, names: Sequence[str] | None) -> dict[str, Site]:
    """Return the sites called ``names``, in forward order."""
    sites = {site.name: site for site in find_sites(net)}
    if names is not None and not names:
        raise UserError(f"sites: none was named; {nearest('', sites)}")
    for name in names or ():
        if name not in sites:
            raise UserError(f"sites: '{name}' is no site of the net; {nearest(name, sites)}")
    return {name: site for name, site in sites.items() if names is None or name in names}


def _real_rows(task: TaskType, batch: Rows, device: torch.device, labels: Labels | None) -> Rows:
    """Return the columns of ``batch`` on ``device``, without the rows that only fill it up."""
    if "labels" not in batch and (labels == "true" or task.reads_labels):
        hint = "this task's nets read them" if task.reads_labels else "drawn labels need none"
        raise UserError(f"labels: the data has none, only {', '.join(batch)}; {hint}")
    real = batch["index"] >= 0
    return {name: column[real].to(device) for name, column in batch.items()}


def _parts(task: TaskType, rows: Rows) -> Iterator[Rows]:
    """Yield ``rows`` in parts of at most :data:`TOKENS` tokens."""
    return row_parts(task, rows, TOKENS)


class _Sums:
    """The sums of all sites, and the number of tokens and examples.

    Args:
        net: the net.
        sites: by name.
        dtype: of the sums.
        device: where they are.
        gradients: whether those are summed, too.
        table: name of a table of embeddings, or None.
    """

    def __init__(
        self,
        net: PreTrainedModel,
        sites: dict[str, Site],
        dtype: torch.dtype,
        device: torch.device | str,
        gradients: bool,
        table: str | None = None,
    ) -> None:
        self.sites, self.table, self.examples = sites, table, 0
        place = place_of_sums(device)
        self.grams: dict[str, Gram | Counts] = {}
        self.outer: dict[str, Gram] = {}
        self.leader = {name: name for name in sites}  # the site whose A a site shares
        for group in shared_inputs(net):
            inside = [name for name in group if name in sites]
            self.leader.update(dict.fromkeys(inside, inside[0] if inside else ""))
        self.means: dict[str, Tensor] = {}  # sum of the inputs, and last their number
        for name in sites:
            module: Any = net.get_submodule(name)
            if self.leader[name] == name:
                self.grams[name] = Gram(module.in_features, dtype, device)
                self.means[name] = torch.zeros(module.in_features + 1, dtype=torch.float64, device=place)
            if gradients:
                self.outer[name] = Gram(module.out_features, dtype, device)
        if table:
            module = net.get_submodule(table)
            self.leader[table], self.grams[table] = table, Counts(module.num_embeddings, device)
            self.means[table] = torch.zeros(1, dtype=torch.float64, device=place)  # only the number of tokens
            if gradients:
                self.outer[table] = Gram(module.embedding_dim, dtype, device)
        self.device = net.device

    def add_inputs(self, name: str, x: Tensor) -> None:
        """Add the inputs [tokens, in] of a use of site ``name``, unless another site does."""
        if self.leader[name] == name:
            self.grams[name].add(x)
            if name != self.table:
                self.means[name][:-1] += double(x).sum(0).to(self.means[name].device)
            self.means[name][-1] += len(x)

    def reduce(self, reduce: Callable[[Tensor], object]) -> None:
        """Sum everything over the ranks, where the net is."""
        examples = torch.tensor([float(self.examples)], dtype=torch.float64)
        for total in (examples, *self.means.values(), *(g.flat for g in (*self.grams.values(), *self.outer.values()))):
            there = total.to(self.device)
            reduce(there)
            total.copy_(there)
        self.examples = int(examples)

    def result(self) -> dict[str, KroneckerFactors]:
        """Return the factors of every site, checked."""
        if not self.examples:
            raise UserError("calibration: there are no examples; give at least 1")
        found = {}
        for name, leader in self.leader.items():
            tokens = int(self.means[leader][-1])
            found[name] = KroneckerFactors(
                self.means[leader][:-1].cpu() / tokens, tokens, self.examples, self.grams[leader], self.outer.get(name)
            )
            self._check(name, found[name])
        return found

    def _check(self, name: str, factors: KroneckerFactors) -> None:
        gradients, inputs = self.outer.get(name), self.grams[self.leader[name]]
        for gram, what in ((inputs, "inputs"), (gradients, "gradients")):
            if gram is not None and not gram.flat.isfinite().all():
                raise UserError(f"calibration: {what} at '{name}' are inf or NaN; give a net with a finite loss")
        if gradients is not None and not gradients.flat.any():
            raise UserError(f"calibration: no gradient reaches '{name}'; leave it out, or give other examples")
        if factors.tokens < inputs.size and self.leader[name] == name != self.table:
            note(
                f"calibration: {factors.tokens} tokens are fewer than the {inputs.size} inputs of '{name}'; "
                "directions without any count only by the damping"
            )


def _add(
    net: PreTrainedModel,
    task: TaskType,
    rows: Rows,
    names: Sequence[str],
    sums: _Sums,
    loose: Uses,
    labels: Labels | None,
    seed: int,
) -> None:
    """Put ``rows`` through ``net`` and back, and add inputs and gradients of the sites ``names`` at their tokens.

    Args:
        net: frozen; the graph begins at the outputs of the first sites.
        task: gives inputs, logits and masks.
        rows: a batch, or one row of it.
        names: of sites, and of the table.
        sums: where they go; has the sites.
        loose: uses whose inputs belong to no row; all their rows count.
        labels: which; None for inputs only.
        seed: of the draws.
    """
    places = [_places(mask) for mask in task.masks(rows)]
    number = dict.fromkeys(names, 0)

    def on_forward(name: str, x: Tensor, output: Tensor) -> None:
        own: Tensor | None = places[0]  # of a table
        if name == sums.table:
            x = x[..., None]
        else:
            own = None if number[name] in loose[name] else _mask_of(sums.sites[name], places)
        number[name] += 1
        sums.add_inputs(name, _tokens(x.detach(), own))
        if labels is not None:
            output.requires_grad_().register_hook(lambda gradient: sums.outer[name].add(_tokens(gradient, own)))

    with _hooked(net, names, on_forward):
        output = task.run(net, rows)
        if labels is None:
            return
        losses = fisher_losses(
            task.logits(output, rows), task.loss, labels, labels=rows.get("labels"), counted=task.counted(rows),
            index=rows["index"], seed=seed,
        )  # fmt: skip
        for i, loss in enumerate(losses):
            if loss.requires_grad:
                loss.backward(retain_graph=i + 1 < len(losses))


def _mask_of(site: Site, masks: Sequence[Tensor]) -> Tensor:
    """Return where tokens are in the inputs of ``site``: of the first stack, or of a decoder."""
    of_encoder = site.stack == "encoder" or (site.cross and site.role in ("k", "v"))
    return masks[0 if of_encoder else 1]


def _places(mask: Tensor) -> Tensor:
    """Return the numbers of the positions that are not 0 in ``mask``, int64; the host waits for how many there are."""
    return mask.flatten().nonzero()[:, 0]


def _tokens(x: Tensor, places: Tensor | None) -> Tensor:
    """Return the rows [tokens, n] of ``x`` [b, length, n] or [b * length, n] at ``places``, by default all."""
    x = x.reshape(-1, x.shape[-1])
    return x if places is None else x.index_select(0, places)


@contextmanager
def _hooked(net: nn.Module, sites: Iterable[str], on_forward: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Call ``on_forward(name, input, output)`` at every use of every site."""

    def hook(name: str) -> Any:
        return lambda _, args, output: on_forward(name, args[0], output)

    handles = [net.get_submodule(name).register_forward_hook(hook(name)) for name in sites]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _loose_uses(net: PreTrainedModel, task: TaskType, rows: Rows, sites: dict[str, Site]) -> Uses:
    """Return the uses of every site whose inputs belong to no row of a batch: DeBERTa's relative positions.

    Found in a forward of the first row, twice.
    """
    twice = {name: torch.cat([column[:1]] * 2) for name, column in rows.items()}
    masks = task.masks(twice)
    number, loose = dict.fromkeys(sites, 0), {name: set[int]() for name in sites}

    def on_forward(name: str, x: Tensor, _: Tensor) -> None:
        mask = _mask_of(sites[name], masks)
        if not (x.shape[:2] == mask.shape or (x.ndim == 2 and len(x) == mask.numel())):
            assert x.shape[0] == 1, (name, x.shape)
            loose[name].add(number[name])
        number[name] += 1

    with _hooked(net, sites, on_forward):
        task.run(net, twice)
    return loose
