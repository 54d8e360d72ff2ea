"""The user's models and data: objects are written to disk and become options of the commands.

A model object is written as ``save_pretrained`` writes it, with its tokenizer; a data set as ``save_to_disk`` does.
Files for one call are in a temporary folder. Files of a run that can be continued are in the cache, under a hash of
their content, so that the same objects continue the same run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lit_compress.cli.recipes import CUSTOM
from lit_compress.data.encode import content_key, digest_of, tokenizer_key
from lit_compress.data.sources import DEV
from lit_compress.models.files import FLOAT, MERGE, quantization_method
from lit_compress.tasks import KINDS, is_list, likely_kind
from lit_compress.utils.cache import build_once, cache_folder, short_hash
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.hub import is_name, model_snapshot

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    Model: TypeAlias = PreTrainedModel | str | Path
    Tokenizer: TypeAlias = PreTrainedTokenizerBase | None
    Data: TypeAlias = Dataset | DatasetDict | Mapping[str, Dataset] | str | Path | None


# how columns of texts are usually called, pairs first
TEXTS = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis"), ("text1", "text2"),
    ("question", "sentence"), ("text",), ("sentence",), ("review",), ("content",), ("document",),
)  # fmt: skip
LABELS = ("label", "labels", "target", "class")


def brought(
    model: Model,
    tokenizer: Tokenizer,
    data: Data,
    asked: Mapping[str, Any],
    temporary: Path | None,
    whole: str | None = None,
    trained: bool | None = True,
) -> tuple[str, dict[str, Any]]:
    """Return a model as a folder or a name, and the options of the data.

    Args:
        model, tokenizer, data: as of the functions.
        asked: ``task`` and columns, as :func:`choose_columns`, so far as the user gave them.
        temporary: where to write; None: the cache.
        whole: a single data set is this split as a whole; None: it is divided into training, dev and test rows.
        trained: the head of the model is trained, so its labels must be the data's. None: a stored config has the
            columns already.

    Raises:
        UserError: something is of a type that is not known here, or does not fit.
    """
    written = named(model, tokenizer) or str(_write_model(model, tokenizer, temporary))
    own = {name: value for name, value in asked.items() if name != "task"}
    task = asked.get("task", CUSTOM)
    if task != CUSTOM and own:
        raise UserError(f"{next(iter(own))}: task '{task}' has its own columns and labels; leave one out")
    if data is None and "task" not in asked:
        raise UserError(
            "data: it is missing; give a Dataset, a DatasetDict, a file or a folder, or the task whose data is on "
            "the hub, e.g. task='sst2'"
        )
    if data is not None and not isinstance(data, str | Path):
        splits = splits_of(data, whole)
        if trained is not None and task == CUSTOM:
            own = choose_columns(own, splits, getattr(model, "config", None) or _read_config(written), trained)
        keys = {} if temporary else {name: content_key(rows) for name, rows in sorted(splits.items())}
        data = build_once((temporary or cache_folder() / f"brought-{short_hash(keys)}") / "data", splits.save_to_disk)
    if isinstance(own.get("text"), str):
        own["text"] = [own["text"]]
    custom = {f"data.custom.{name}": list(v) if isinstance(v, tuple) else v for name, v in own.items() if v}
    return written, {"data.task": task, "data.path": data and str(data), **custom}


def _write_model(model: Any, tokenizer: Tokenizer, temporary: Path | None) -> Path:
    if hasattr(model.config, "structure"):
        raise UserError("model: it is compressed already; give the model it was made from")
    if getattr(model, "_hf_peft_config_loaded", False):  # of which save_pretrained writes the adapter alone
        raise UserError(f"model: it has a PEFT adapter, which is no part of its weights; {MERGE}")
    if settings := getattr(model.config, "quantization_config", None):
        raise UserError(f"model: it is quantized ({quantization_method(settings)}); {FLOAT}")

    def fill(folder: Path) -> None:
        model.save_pretrained(folder)
        write_tokenizer(model.config, tokenizer, folder)

    # called as the last part of where it came from, or as its class
    name = Path(str(getattr(model.config, "_name_or_path", "") or "")).name
    name = re.sub(r"[^\w.-]", "-", name) or type(model).__name__
    place = temporary / "model" if temporary else cache_folder() / f"brought-{_model_key(model, tokenizer)}"
    return build_once(place / name, fill)


def named(model: Any, tokenizer: Any) -> str | None:
    """Return a model that is a folder or a name; None for one in memory with its tokenizer; refuse anything else."""
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    what = f"model: a {type(model).__name__}"
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise UserError(f"tokenizer: '{model}' has its own; leave it out, or give the loaded model as well")
        return str(model)
    if hasattr(model, "merge_and_unload"):
        raise UserError(f"{what} is an adapter; {MERGE}, or pass its result")
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"{what} is no PreTrainedModel of transformers; give one, its folder or its name")
    if tokenizer is None and not hasattr(model, "folder"):  # a compressed one has its own
        raise UserError("tokenizer: it is missing; give the model's, AutoTokenizer.from_pretrained(NAME)")
    if tokenizer is not None and not (isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.is_fast):
        near = "give it as data=..." if isinstance(tokenizer, Dataset | DatasetDict) else "give one"
        raise UserError(f"tokenizer: a {type(tokenizer).__name__} is no fast tokenizer of transformers; {near}")
    return None


def splits_of(data: Any, whole: str | None) -> DatasetDict:
    """Return data sets by the names of splits that the package knows; refuse those without rows."""
    import datasets

    given = {whole or "train": data} if isinstance(data, datasets.Dataset) else data
    if not isinstance(given, Mapping) or not all(isinstance(rows, datasets.Dataset) for rows in given.values()):
        raise UserError(
            f"data: a {type(data).__name__} is no Dataset or DatasetDict of the library datasets, no file and no "
            "folder; Dataset.from_list, from_dict or from_pandas make one"
        )
    by_split = datasets.DatasetDict()
    for name, rows in given.items():
        if not len(rows):
            raise UserError(f"data: the split '{name}' has no rows")
        by_split[DEV.get(str(name), str(name))] = rows
    if len(by_split) < len(given):
        raise UserError(f"data: two of the splits {', '.join(map(str, given))} are the same; leave one")
    if not by_split.keys() & {"train", "validation", "test", "validation_matched"}:
        hint = nearest(next(iter(by_split), ""), ("train", "validation", "test"))
        raise UserError(f"data: no split of '{', '.join(by_split)}' is known; {hint}")
    return by_split


def write_tokenizer(config: PreTrainedConfig, tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer next to a configuration, which keeps the name on the hub that the model came from."""
    tokenizer.save_pretrained(folder)
    name, path = str(getattr(config, "_name_or_path", "") or ""), folder / "config.json"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"_name_or_path": name}, indent=2) + "\n")


def _model_key(model: PreTrainedModel, tokenizer: Any) -> str:
    """Return a hash of all weights, of the configuration and of the tokenizer."""
    values = sorted(model.state_dict().items())
    digest = digest_of((f"{name} {value.dtype} {tuple(value.shape)}", value) for name, value in values)
    return short_hash(digest, sorted(model.config.to_dict().items(), key=str), tokenizer_key(tokenizer))


def _read_config(model: str) -> PreTrainedConfig | None:
    """Return the configuration of a folder or name; None if it cannot be read: whoever loads it says why."""
    from transformers import AutoConfig

    try:
        folder = model_snapshot("model", model).folder if is_name(model) else Path(model).expanduser()
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # no network, no such folder, a broken file
        return None


# ------------------------------------------------------------------------------------------ columns


def choose_columns(
    given: Mapping[str, Any], splits: Mapping[str, Dataset], config: PreTrainedConfig | None, trained: bool
) -> dict[str, Any]:
    """Return ``kind``, ``text``, ``label`` and ``labels`` of the task: as given, else by the data and the model.

    Args:
        given: by the user; ``label`` may be the names of columns of 0 and 1, one for each label.
        splits: data sets by split.
        config: of the model; None if it cannot be read.
        trained: its head is trained on the classes of the data.

    Raises:
        UserError: a column is missing, or several could be meant.
    """
    rows = splits.get("train", next(iter(splits.values())))
    names = rows.column_names
    for option in ("text", "label"):
        value = given.get(option) or ()
        for name in [value] if isinstance(value, str) else value:
            if name not in names:
                raise UserError(f"{option}: the data has no column '{name}'; {nearest(name, names)}")
    label = given.get("label") or next((name for name in LABELS if name in names), None)
    of_columns = next(name for name, meant in KINDS.items() if meant.own_columns)  # one for each label
    several = label is not None and not isinstance(label, str)
    kind = given.get("kind") or (of_columns if several else likely_kind(config, rows, label))
    if kind not in KINDS:
        raise UserError(f"kind: unknown '{kind}'; {nearest(kind, KINDS)}")
    if not (meant := KINDS[kind]).recognised:
        return {**given, "kind": kind}
    head = _classes_of(config) if trained else None
    labels: Sequence[str] | None = None
    if meant.own_columns and not isinstance(label, str):
        labels = head if head and set(head) == set(label or head) and set(head) <= set(names) else None
        label = label or labels
    else:
        label = label or next((name for name in names if hasattr(rows.features[name], "names")), None)
        if meant.classes and isinstance(label, str):
            labels = _classes_in(splits, kind, label, head)
    return {"kind": kind, "text": given.get("text") or _texts(rows, label), "label": label, "labels": labels}


def _texts(rows: Dataset, label: str | Sequence[str] | None) -> Sequence[str]:
    """Return the columns of the texts: usual names, or the only column of texts."""
    others = ("id", "idx", *([label] if label is None or isinstance(label, str) else label))
    found = [name for name, feature in rows.features.items() if _is_text(feature) and name not in others]
    for names in TEXTS:
        if set(names) <= set(found):
            return names
    if len(found) == 1:
        return found
    columns = f"columns: {', '.join(rows.column_names)}"
    if found:
        raise UserError(f"text: which column holds the texts is not clear; name it, e.g. text='{found[0]}'; {columns}")
    tokens = ", only the tokens of texts; give the data before it was tokenised"
    raise UserError(f"text: no column holds texts{tokens if 'input_ids' in rows.features else ''}; {columns}")


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def _classes_in(splits: Mapping[str, Dataset], kind: str, label: str, head: list[str] | None) -> Sequence[str] | None:
    """Return the classes in order: the data's names, or those of the model's ``head``; None: of the training rows.

    Numbers are classes in the model's order.
    """
    feature = splits.get("train", next(iter(splits.values()))).features[label]
    if listed := is_list(feature):
        feature = getattr(feature, "feature", None) or feature[0]
    if names := getattr(feature, "names", None):
        return list(names)
    if not _is_text(feature):
        return head
    columns = (some for some in splits.values() if label in some.features)
    values = [row for some in columns for row in (some[label] if listed else some.unique(label))]
    sign = KINDS[kind].sign_in(values)
    found = {str(value).strip() for row in values for value in KINDS[kind].classes_in(f"data: '{label}'", row, sign)}
    if head and found <= set(head):
        return head
    return None if "train" in splits else sorted(found)


def _classes_of(config: PreTrainedConfig | None) -> list[str] | None:
    """Return the names of a model's classes; their numbers where they have no names."""
    names = None if config is None else [str(name) for _, name in sorted((config.id2label or {}).items())]
    unnamed = names == [f"LABEL_{i}" for i in range(len(names or ()))]
    return [str(i) for i in range(len(names or ()))] if unnamed else names
