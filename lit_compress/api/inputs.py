"""The user's models and data: objects are written to disk and become options of the commands.

A model object is written as ``save_pretrained`` writes it, with its tokenizer; a data set as ``save_to_disk`` does.
Files for one call are in a temporary folder. Files of a run that can be continued are in the cache, under a hash of
their content, so that the same objects continue the same run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lit_compress.cli.recipes import CUSTOM
from lit_compress.data.encode import content_key, digest_of, tokenizer_key
from lit_compress.data.sources import DEV
from lit_compress.models.files import FLOAT, MERGE, quantization_method
from lit_compress.utils.cache import build_once, cache_folder, short_hash
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    Model: TypeAlias = PreTrainedModel | str | Path
    Tokenizer: TypeAlias = PreTrainedTokenizerBase | None
    Data: TypeAlias = Dataset | DatasetDict | Mapping[str, Dataset] | str | Path | None

# argument of a function -> option
COLUMNS = {"kind": "data.custom.kind", "text": "data.custom.text", "label": "data.custom.label"}


def brought(
    model: Model, tokenizer: Tokenizer, data: Data, options: dict[str, Any], temporary: Path | None,
    whole: str | None = None,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Return a model as a folder or a name, and the options of the data.

    Args:
        model, tokenizer, data: as of the functions.
        options: of the function, from which ``task``, ``kind``, ``text`` and ``label`` are taken.
        temporary: where to write; None: the cache.
        whole: a single data set is this split as a whole; None: it is divided into training, dev and test rows.

    Raises:
        UserError: something is of a type that is not known here, or does not fit.
    """
    written = named(model, tokenizer) or str(_write_model(model, tokenizer, temporary))
    asked = {name: options.pop(name, None) for name in ("task", *COLUMNS)}
    task, own = asked.pop("task") or CUSTOM, {name: value for name, value in asked.items() if value is not None}
    if task != CUSTOM and own:
        raise UserError(f"{next(iter(own))}: task '{task}' has its own columns and labels; leave one out")
    if data is None and task == CUSTOM:
        raise UserError(
            "data: it is missing; give a Dataset, a DatasetDict, a file or a folder, or the task whose data is on "
            "the hub, e.g. task='sst2'"
        )
    if data is not None and not isinstance(data, str | Path):
        splits = splits_of(data, whole)
        keys = {} if temporary else {name: content_key(rows) for name, rows in sorted(splits.items())}
        data = build_once((temporary or cache_folder() / f"brought-{short_hash(keys)}") / "data", splits.save_to_disk)
    columns = {COLUMNS[name]: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
    return written, {"data.task": task, "data.path": data and str(data), **columns}


def _write_model(model: Any, tokenizer: Tokenizer, temporary: Path | None) -> Path:
    if hasattr(model.config, "structure"):
        raise UserError("model: it is compressed already; give the model it was made from")
    if getattr(model, "_hf_peft_config_loaded", False):  # of which save_pretrained writes the adapter alone
        raise UserError(f"model: it has a PEFT adapter, which is no part of its weights; {MERGE}")
    if type(model).__module__.partition(".")[0] != "transformers":  # its files would be read as those of another class
        raise UserError(f"model: {type(model).__name__} is no class of transformers; give one, or a folder")
    if settings := getattr(model.config, "quantization_config", None):
        raise UserError(f"model: it is quantized ({quantization_method(settings)}); {FLOAT}")

    def fill(folder: Path) -> None:
        dtype = model.config.dtype
        model.save_pretrained(folder)
        model.config.dtype = dtype  # of which transformers makes a text
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
    """Return data sets by split, refuse those without rows; whoever reads them says which splits are known."""
    import datasets

    given = {whole or "train": data} if isinstance(data, datasets.Dataset) else data
    if not isinstance(given, Mapping) or not all(isinstance(rows, datasets.Dataset) for rows in given.values()):
        raise UserError(
            f"data: a {type(data).__name__} is no Dataset or DatasetDict of the library datasets, no file and no "
            "folder; Dataset.from_list, from_dict or from_pandas make one"
        )
    if (empty := next((name for name, rows in given.items() if not len(rows)), None)) is not None:
        raise UserError(f"data: the split '{empty}' has no rows")
    if len({DEV.get(str(name), str(name)) for name in given}) < len(given):
        raise UserError(f"data: two of the splits {', '.join(map(str, given))} are the same; leave one")
    return datasets.DatasetDict({str(name): rows for name, rows in given.items()})


def write_tokenizer(config: PreTrainedConfig, tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer next to a configuration, which keeps the name on the hub that the model came from."""
    tokenizer.save_pretrained(folder)
    name, path = str(getattr(config, "_name_or_path", "") or ""), folder / "config.json"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"_name_or_path": name}, indent=2) + "\n")


def _model_key(model: PreTrainedModel, tokenizer: Any) -> str:
    """Return a hash of all weights, of the configuration, of how the model writes and of the tokenizer."""
    values = sorted(model.state_dict().items())
    digest = digest_of((f"{name} {value.dtype} {tuple(value.shape)}", value) for name, value in values)
    longest = tokenizer.model_max_length
    own: list[Any] = [longest] if longest < (getattr(model.config, "max_position_embeddings", None) or 0) else []
    own += [tokenizer.chat_template] if tokenizer.chat_template else []
    own += [model.generation_config.to_json_string()] if getattr(model, "generation_config", None) else []
    return short_hash(digest, sorted(model.config.to_dict().items(), key=str), tokenizer_key(tokenizer), *own)
