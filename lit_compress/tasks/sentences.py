"""How a sentence model makes a vector of the states of its tokens: one record, read from the model's folder.

The folder is one of sentence-transformers: ``modules.json`` names the steps after the model, each with a folder of its
own. These can be represented: Pooling, Normalize. Others are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_compress.numerics.vectors import POOLINGS
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import read_json, write_json

STATES, VECTORS = "last_hidden_state", "sentence_embedding"  # of programs: per token, per text
LENGTHS = ("query_length", "document_length")  # of encode_query and encode_document
SETTINGS = "config_sentence_transformers.json"
OWN = "sentence_transformers."  # how types of modules begin that are the library's
_CAN = "Pooling and Normalize, in this order, can be kept"
# keys of the pooling that older versions of sentence-transformers read: what they begin with, their ends
OLDER, OLDER_NAMES = "pooling_mode_", {"cls_token": "cls", "mean_tokens": "mean"}


@dataclass(frozen=True)
class Pooling:
    """How a text's vector is made of the states of its tokens."""

    tokens: str = "mean"  # one of ``POOLINGS``
    normalize: bool = True  # predictions and exports divide vectors by their length; losses and metrics always do
    dim: int | None = None  # first components that are kept of the finished vector; None: all
    prompt: str = ""  # is put before every text
    lower: bool = False  # texts are read in lower case, whatever the tokenizer does
    max_length: int | None = None  # tokens of the longest text that the model reads; None: nothing says it
    # for exports: how vectors are compared, all (name, prompt) and the name of the one above, (key, tokens) of LENGTHS
    similarity: str = "cosine"
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    lengths: tuple[tuple[str, int], ...] = field(default=(), repr=False)  # the repr is in fingerprints of data

    def __post_init__(self) -> None:
        if self.tokens not in POOLINGS:
            raise UserError(f"data.pooling: unknown '{self.tokens}'; {nearest(self.tokens, POOLINGS)}")


def read_pooling(folder: Path, option: str) -> Pooling | None:
    """Return how the sentence model in a folder makes vectors; None if the folder does not say it.

    Raises:
        UserError: its files are broken, or name something that :class:`Pooling` cannot represent; the message begins
            with ``option``, which named the folder.
    """
    modules = read_modules(folder, option)
    if modules is None:
        return None
    what = f"{option}: '{folder}'"
    for _, path in modules:
        if not (folder / str(path)).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{what} names a module outside of its folder, '{path}' (modules.json)")
    names = [name for name, _ in modules]
    usual = ["Transformer", "Pooling", *["Normalize"] * ("Normalize" in names)]
    if names != usual:
        raise UserError(f"{what} makes vectors by {', '.join(names)} (modules.json); {_CAN}")
    if modules[0][1]:
        raise UserError(f"{what} has its model in '{modules[0][1]}'; save it again with sentence-transformers 6")
    first = read_object(folder / modules[1][1] / "config.json", what)
    older = [key.removeprefix(OLDER) for key, on in first.items() if key.startswith(OLDER) and on]
    tokens = first.get("pooling_mode") or [OLDER_NAMES.get(key, key) for key in older] or "mean"
    if not first.get("include_prompt", True):
        raise UserError(f"{what} leaves the prompt out of the pooling (include_prompt), which no export can; {_CAN}")
    settings = read_object(folder / SETTINGS, what, {})
    own = [read_object(path, what) for path in sorted(folder.glob("sentence_*_config.json"))]
    read = own[0] if own else {}
    limit = read_object(folder / "tokenizer_config.json", what, {}).get("model_max_length")
    limit = limit if isinstance(limit, int) and limit < 1_000_000 else None  # larger: nothing says it
    try:
        method = ((read.get("modality_config") or {}).get("text") or {}).get("method_output_name", STATES)
        if method != STATES:
            raise UserError(f"pools '{method}' of its model; nearest: {STATES}")
        prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
        if default is not None and default not in prompts:
            raise UserError(f"default_prompt_name '{default}' is none of its prompts; {nearest(default, prompts)}")
        return Pooling(
            tokens if isinstance(tokens, str) else "+".join(tokens), "Normalize" in names, settings.get("truncate_dim"),
            prompts.get(default) or "", bool(read.get("do_lower_case")),
            read.get("max_seq_length") or limit, settings.get("similarity_fn_name") or "cosine",
            tuple((name, text or "") for name, text in prompts.items()), default,
            tuple((key, read[key]) for key in LENGTHS if read.get(key) is not None),
        )  # fmt: skip
    except UserError as error:  # a pooling that is not known
        raise UserError(f"{what}: {str(error).removeprefix('data.pooling: ')}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{what}: a file of sentence-transformers in it is broken ({error})") from error


def read_modules(folder: Path, option: str) -> list[tuple[str, str]] | None:
    """Return (class, folder) of the steps that ``modules.json`` names; None if there is no such file.

    Classes of other packages keep the package's name.

    Raises:
        UserError: the file is broken.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    try:
        modules = [(item["type"], item["path"]) for item in read_json(option, path, list)]
        return [(name.rpartition(".")[2] if name.startswith(OWN) else name, place) for name, place in modules]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{option}: '{folder}': its modules.json is broken") from error


def read_object(path: Path, what: str, usual: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of a JSON file; ``usual`` if it is not there."""
    return usual if usual is not None and not path.is_file() else read_json(what, path, dict)


def write_pooling(folder: Path, width: int, max_length: int, pooling: Pooling) -> None:
    """Write ``modules.json`` and the folders it names, so that ``SentenceTransformer(folder)`` gives the same vectors.

    The model's states have ``width`` numbers; texts longer than ``max_length`` tokens are cut.
    """
    names = ["Transformer", "Pooling", *["Normalize"] * pooling.normalize]
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names) if i)]
    write_json(folder / "modules.json", [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ])  # fmt: skip
    (folder / paths[1]).mkdir(exist_ok=True)
    said = {f"{OLDER}{key}": OLDER_NAMES.get(key, key) == pooling.tokens for key in (*OLDER_NAMES, "lasttoken")}
    write_json(folder / paths[1] / "config.json", {"word_embedding_dimension": width, **said})
    lengths = {"max_seq_length": max_length, **dict(pooling.lengths)}
    write_json(folder / "sentence_bert_config.json", {**lengths, "do_lower_case": pooling.lower})
    write_json(folder / SETTINGS, {
        "prompts": dict(pooling.prompts), "default_prompt_name": pooling.default_prompt,
        "similarity_fn_name": pooling.similarity, **({} if pooling.dim is None else {"truncate_dim": pooling.dim}),
    })  # fmt: skip
