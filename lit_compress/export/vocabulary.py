"""Smaller tables of token embeddings: fewer rows, for the pieces that the data needs, or rows of 8-bit integers.

The tokenizer is cut as the JSON of the tokenizers library. A kept piece keeps its place in the order, so that special
tokens in front keep their ids. On the given texts the small tokenizer returns the same pieces:

- WordPiece takes the longest piece that fits; removing others changes nothing where the longest is kept.
- BPE applies the best merge that it finds; with each kept piece stay the merges that make it.
- Unigram takes the path with the best score; it stays, and all that is removed are other paths.

It spells other words with single characters or bytes, which are all kept; a piece is kept whole if it has a character
that is no piece of its own. An output layer over the vocabulary loses the same rows as the table.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_compress.data.datamodule import DataModule
from lit_compress.data.facts import changed_inputs, pieces_missed, token_counts
from lit_compress.layers import Int8Embedding, SizedEmbedding
from lit_compress.models.accounting import random_inputs
from lit_compress.models.padding import usable_positions
from lit_compress.models.sites import Model
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import replace, with_same_parameters
from lit_compress.tasks import task_type_of_net
from lit_compress.utils.errors import UserError
from lit_compress.utils.types import Tokenizer

_OPTION = "export: --vocabulary data"
MISSED = 0.1  # share of training texts that are left out in the count, and are spelled otherwise, at most
TOLERANCE = 1e-5  # largest difference of logits with fewer tokens, relative above 1
_BIAS = "final_logits_bias"  # BART's, a buffer next to the output layer
_UNUSED = re.compile(r"[\[<]unused_?\d+[\]>]")  # places that BERT and others leave free
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")

Json = dict[str, Any]


def tokens_kept(net: Model, data: DataModule) -> int:
    """Return how many tokens :func:`cut_vocabulary` keeps; of ``net`` only the configuration is read, no labels.

    Raises:
        UserError: the kind of tokenizer cannot be cut.
    """
    texts = data.read_by(data.tokenizer)
    texts.reads_labels = False
    return len(cut_tokenizer(data.tokenizer, _used(net, texts))[1])


def _used(net: Model, data: DataModule) -> set[int]:
    """Return the tokens of the training texts and of all prompts, and the first ones, as many as other texts need.

    Of a tenth of the training texts at most :data:`MISSED` have a piece that is in neither, without this tenth.
    """
    size, written = net.config.vocab_size, net.can_generate()
    used = {*token_counts(data.train_tokens(), size, written).nonzero().flatten().tolist(), *special_ids(net)}
    missed = pieces_missed(data.train_tokens(), size, written).sort(descending=True).values.tolist()
    first = [*missed, -1][int(MISSED * len(missed))]
    used |= {number for _, text in data.record.pooling.prompts for number in data.tokenizer(text)["input_ids"]}
    names = data.tokenizer.convert_ids_to_tokens(list(range(first + 1)))
    return used | {number for number, name in enumerate(names) if name and not _UNUSED.fullmatch(name)}


def cut_vocabulary(net: Model, data: DataModule) -> tuple[Model, DataModule, dict[str, Any]]:
    """Return ``net`` and ``data`` with a smaller tokenizer, and the report's entry on it.

    Returns:
        The model; the data as the small tokenizer reads it; ``rows`` kept ``of`` so many; the number of training
        ``inputs``, and how many of them have ``changed`` (none, except for words that the big tokenizer did not know);
        the same for ``dev_inputs`` and ``dev_changed``.

    Raises:
        UserError: the tokenizer or the model cannot be cut.
    """
    size = net.config.vocab_size
    tokenizer, kept = cut_tokenizer(data.tokenizer, _used(net, data))
    small = keep_tokens(net, kept)
    other = data.read_by(tokenizer)
    facts: dict[str, Any] = {"rows": len(kept), "of": size}
    before, after = ((d.train_tokens(), d.val_dataloader()[0].dataset.encoded) for d in (data, other))
    for prefix, first, second in zip(("", "dev_"), before, after, strict=True):
        facts |= {f"{prefix}inputs": len(first), f"{prefix}changed": changed_inputs(first, second, kept)}
    return small, other, facts


def cut_tokenizer(tokenizer: Tokenizer, used: Iterable[int]) -> tuple[Tokenizer, list[int]]:
    """Return a tokenizer with the pieces that the ids ``used`` and unknown words need, and the old id of each new one.

    Raises:
        UserError: the kind of tokenizer cannot be cut.
    """
    from tokenizers import Tokenizer

    state: Json = json.loads(tokenizer.backend_tokenizer.to_str())
    kept, small = _cut(state, set(used), set(tokenizer.all_special_tokens)), copy.deepcopy(tokenizer)
    small._tokenizer = Tokenizer.from_str(json.dumps(state))
    return small, kept


def _cut(state: Json, used: set[int], special: set[str]) -> list[int]:
    """Cut the vocabulary of a tokenizer's ``state`` in place; return the old id of each new one.

    Pieces of the model come first, in their order, then added tokens that are no pieces of it, as the library has it.
    """
    model, vocab = state["model"], state["model"]["vocab"]
    if (kind := model.get("type")) not in _KINDS:
        raise UserError(f"{_OPTION}: a tokenizer of type {kind} cannot be cut; those that can: {', '.join(_KINDS)}")
    for name in ("end_of_word_suffix", "continuing_subword_prefix") if kind == "BPE" else ():
        if model.get(name):
            raise UserError(f"{_OPTION}: BPE with {name} '{model[name]}' cannot be cut; BPE without one can")
    vocabulary = {piece: i for i, (piece, _) in enumerate(vocab)} if kind == "Unigram" else dict(vocab)
    added = {token["content"]: int(token["id"]) for token in state["added_tokens"]}
    needed = {piece for piece, number in vocabulary.items() if number in used and piece not in added}
    needed |= _KINDS[kind](model, needed) | {piece for piece in vocabulary if _BYTE.fullmatch(piece)}
    unknown, number = model.get("unk_token"), model.get("unk_id")
    if kind == "Unigram":
        unknown = None if number is None else vocab[number][0]
    needed |= (special | set(added) | {unknown}) & vocabulary.keys()
    pieces = sorted(needed, key=vocabulary.__getitem__)
    others = sorted((number, content) for content, number in added.items() if content not in vocabulary)
    names = [*pieces, *(content for _, content in others)]
    ids = {name: number for number, name in enumerate(names)}
    old = [*(vocabulary[piece] for piece in pieces), *(number for number, _ in others)]
    if kind == "Unigram":
        scores = dict(vocab)
        model["vocab"] = [[piece, scores[piece]] for piece in pieces]
        model["unk_id"] = ids.get(unknown)
    else:
        model["vocab"] = {piece: ids[piece] for piece in pieces}
    if kind == "BPE":
        model["merges"] = [[a, b] for a, b in model["merges"] if {a, b, a + b} <= needed]
    for token in state["added_tokens"]:
        token["id"] = ids[token["content"]]
    state["added_tokens"].sort(key=lambda token: token["id"])
    _renumber(state.get("post_processor") or {}, {number: i for i, number in enumerate(old)})
    state["padding"] = state["truncation"] = None  # arguments of the last call
    return old


def _renumber(processor: Json, new: dict[int, int]) -> None:
    """Give the special tokens that a post-processor inserts their new ids, in place."""
    for part in processor.get("processors", ()):
        _renumber(part, new)
    for token in processor.get("special_tokens", {}).values():
        token["ids"] = [new[number] for number in token["ids"]]
    for name in {"sep", "cls"} & processor.keys():  # of BertProcessing and RobertaProcessing: token, id
        processor[name][1] = new[processor[name][1]]


def _of_wordpiece(model: Json, used: set[str]) -> set[str]:
    prefix = model.get("continuing_subword_prefix") or ""

    def letters(piece: str) -> list[str]:
        inner = piece.startswith(prefix) and piece != prefix
        text = piece.removeprefix(prefix) if inner else piece
        return [f"{prefix}{letter}" if inner or i else letter for i, letter in enumerate(text)]

    return _spelling(model["vocab"], letters)


def _of_unigram(model: Json, used: set[str]) -> set[str]:
    pieces = [piece for piece, _ in model["vocab"]]
    worst = min(model["vocab"], key=lambda item: item[1])[0]  # an unknown character costs a little more than this piece
    return _spelling(pieces, list) | {worst}


def _of_bpe(model: Json, used: set[str]) -> set[str]:
    """Merge the characters of all ``used`` pieces again, and return all that is merged."""
    ranks = {(a, b): rank for rank, (a, b) in reversed(list(enumerate(model["merges"])))}
    needed = {piece for piece in model["vocab"] if len(piece) == 1}
    for piece in used:
        parts = [] if _BYTE.fullmatch(piece) else list(piece)
        while mergeable := [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]:
            _, i = min(mergeable)
            whole = parts[i] + parts[i + 1]
            needed |= {parts[i], parts[i + 1], whole}
            parts[i : i + 2] = [whole]
    return needed & model["vocab"].keys()


_KINDS: dict[str, Callable[[Json, set[str]], set[str]]] = {
    "WordPiece": _of_wordpiece, "BPE": _of_bpe, "Unigram": _of_unigram,
}  # fmt: skip


_BANNED = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")  # settings of generation


def _spelling(pieces: Iterable[str], letters: Callable[[str], list[str]]) -> set[str]:
    """Return the pieces of one letter, and those with a letter that is no piece."""
    parts = {piece: letters(piece) for piece in pieces}
    single = {piece for piece, own in parts.items() if len(own) <= 1}
    return single | {piece for piece, own in parts.items() if not single.issuperset(own)}


def special_ids(net: Model) -> set[int]:
    """Return the ids of tokens that the configurations of ``net`` name."""
    named = [value for config in _configurations(net) for value in _named(config).values()]
    ids = {number for value in named for number in (value if isinstance(value, list) else [value])}
    return {number for number in ids if 0 <= number < net.config.vocab_size}


@torch.no_grad()
def keep_tokens(net: Model, kept: Sequence[int]) -> Model:
    """Return a copy of ``net`` that has only the tokens ``kept``, all :func:`special_ids` among them, in this order.

    Raises:
        UserError: the copy does not compute the same logits (some architectures number positions by a token's id).
    """
    small, rows = with_same_parameters(net), torch.tensor(kept)
    cut_rows(small, kept)
    new = {old: number for number, old in enumerate(kept)}
    for config in _configurations(small):
        for name, value in _named(config).items():  # ids that never were rows (-1: none) stay
            ids = [new.get(n, n) for n in value] if isinstance(value, list) else new.get(value, value)
            setattr(config, name, ids)
        if biases := getattr(config, "sequence_bias", None):
            pairs = biases.items() if isinstance(biases, dict) else biases
            config.sequence_bias = [[[new[n] for n in ids], by] for ids, by in pairs if new.keys() >= {*ids}] or None
        for name in _BANNED:  # a word of which a token has no row cannot be written
            words = [word if isinstance(word, list) else [word] for word in getattr(config, name, None) or ()]
            left = [[new[n] for n in word] for word in words if new.keys() >= {*word}]
            if words:
                setattr(config, name, (left if name == "bad_words_ids" else [n for word in left for n in word]) or None)
    with tempfile.TemporaryDirectory() as work:  # modules have ids of their own, which they read from the configuration
        save_net(small, Path(work))
        small = load_net(Path(work))
    # a random batch of kept tokens
    inputs = random_inputs(small, 3, min(23, usable_positions(net.config) or 23), seed=2, padded=True)
    before = {name: rows[value] if name.endswith("input_ids") else value for name, value in inputs.items()}
    with torch.inference_mode():
        expected, cut = net.eval()(**before), small.eval()(**inputs)
    pairs = [(expected[name], cut[name]) for name in task_type_of_net(small.config).results]
    pairs = [(e if e.shape == c.shape else e[..., rows], c) for e, c in pairs]
    difference = max(float((c - e).abs().max() / e.abs().max().clamp_min(1)) for e, c in pairs)
    if not difference <= TOLERANCE:
        raise UserError(
            f"{_OPTION}: with fewer tokens the logits of {type(net).__name__} differ by {difference:.1e}; nothing was "
            "exported; leave the option out"
        )
    return small


@torch.no_grad()
def cut_rows(small: Model, kept: Sequence[int]) -> None:
    """Cut the table of ``small``, and its output layer over the vocabulary, to the rows ``kept``, in place."""
    rows, new = torch.tensor(kept), {old: number for number, old in enumerate(kept)}
    tables = [small.get_input_embeddings(), *filter(None, [small.get_output_embeddings()])]
    values = {
        value: nn.Parameter(value[rows].contiguous())
        for table in tables
        for name, value in table.named_parameters(recurse=False)
        if name in ("weight", "left", "bias") and len(value) == small.config.vocab_size
    }
    for module in small.modules():  # some tensors have several owners
        for name, value in list(module.named_parameters(recurse=False)):
            if value in values:
                setattr(module, name, values[value])
                padding = new.get(getattr(module, "padding_idx", -1))
                sizes = {"num_embeddings": len(kept), "out_features": len(kept), "padding_idx": padding}
                vars(module).update({size: number for size, number in sizes.items() if hasattr(module, size)})
    if isinstance(bias := getattr(small, _BIAS, None), Tensor):
        setattr(small, _BIAS, bias[:, rows].contiguous())
    small.config.vocab_size = len(kept)


def _configurations(net: Model) -> list[Any]:
    return [net.config, *([net.generation_config] if net.can_generate() and net.generation_config else [])]


def _named(config: Any) -> dict[str, int | list[int]]:
    """Return the settings that are ids of tokens, e.g. ``pad_token_id``; a list may be one of several ends."""
    fields = {n: v for n, v in config.to_dict().items() if n.endswith("token_id")}
    return {n: v for n, v in fields.items() if isinstance(v, int) or (isinstance(v, list) and v)}


def check_table(net: Model) -> str:
    """Return the name of the table of token embeddings, which can be made smaller.

    Raises:
        UserError: its tensor has other uses, or it is no plain table.
    """
    table = net.get_input_embeddings()
    uses = [name for name, p in net.named_parameters(remove_duplicate=False) if p is getattr(table, "weight", None)]
    if type(table) not in (nn.Embedding, SizedEmbedding) or len(uses) != 1:
        raise UserError(
            f"export: --embeddings int8: the table of token embeddings of '{net.config.model_type}' has other uses (an "
            "output layer, a second stack), or its own forward; leave it out"
        )
    return uses[0].removesuffix(".weight")


@torch.no_grad()
def shrink_table(net: Model) -> Tensor:
    """Replace the table of token embeddings by rows of 8-bit integers, in place; return its error / its norm.

    Raises:
        UserError: as :func:`check_table`.
    """
    name = check_table(net)
    before = net.get_parameter(f"{name}.weight").detach()
    replace(net, name, Int8Embedding.from_table(before))
    after = net.get_submodule(name)(torch.arange(len(before), device=before.device))
    return (after - before).norm() / before.norm()
