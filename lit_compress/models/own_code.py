"""Code that a model brings in its own folder, which transformers would run with all rights of the user: it never runs.

Nor does anything that is written here name it. ``what``, option and value, begins every message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lit_compress.utils.errors import UserError
from lit_compress.utils.files import json_of
from lit_compress.utils.progress import note
from lit_compress.utils.types import Config

MODULE = "modeling_compressed"  # the modelling file of an export
_MAPS = ("auto_map", "dense_auto_map")  # the second: in exports of earlier versions, of the dense model
_FILES = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")  # that have them
_KERNELS = ("attn_implementation", "experts_implementation")  # with a slash: a repository of compiled code
# names in a configuration -> largest number: of what is built one by one, and of what tensors are made of
_COUNTS = re.compile(r"(num|n|max)_.*layers|.*_layers|num_(hidden_)?groups|inner_group_num|num_labels")
_SIZES = re.compile(r".*(_size|_dim|_width|_heads|_embeddings|_buckets|_features|d_model|d_ff|d_kv)|dim")
MOST_COUNTED, MOST_SIZED = 4096, 2**24


def check_code(what: str, folder: Path) -> None:
    """Refuse a model with code of its own.

    Classes that transformers has by the same name were taken over by it: they are used, and the code is not needed. A
    tokenizer is read from ``tokenizer.json`` without its code. Notes say both.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if kernel := next((ref for ref in references(folder, _KERNELS) if "/" in ref), None):
        raise UserError(f"{what} asks for the compiled code '{kernel}', which is not run; take it out of config.json")
    config = read_settings(folder / "config.json")
    named = [pair for key in _MAPS for pair in _classes(config.get(key)).items()]
    own = sorted({ref for auto, ref in named if auto == "AutoConfig" or auto.startswith("AutoModel")})
    own = [ref for ref in own if ref.partition(".")[0] != MODULE]
    of_words = sorted(set(_classes(read_settings(folder / "tokenizer_config.json").get("auto_map")).values()))
    files = [f"{ref.rpartition('--')[2].partition('.')[0]}.py" for ref in (*own, *of_words)]
    known = config.get("model_type") in CONFIG_MAPPING_NAMES
    if strange := [ref for ref in own if not (known and hasattr(transformers, ref.rpartition(".")[2]))]:
        raise UserError(
            f"{what} has code of its own ({files[own.index(strange[0])]}), which is not run; give a model whose class "
            "transformers has"
        )
    if own:
        note(f"{what}: its code ({files[0]}) is not run; transformers has the class {own[0].rpartition('.')[2]}")
    if of_words:
        read = "; tokenizer.json is read without it" if (folder / "tokenizer.json").is_file() else ""
        note(f"{what}: the code of its tokenizer ({files[-1]}) is not run{read}")


def read_config(what: str, folder: Path, **values: Any) -> Config:
    """Read the configuration of a model, without the code that it names; ``values`` replace some of its own.

    Raises:
        UserError: it is no JSON object, or its numbers alone would fill the memory.
    """
    from transformers import AutoConfig

    with suppress(OSError, ValueError):  # the library says what is wrong
        if not isinstance(given := json_of(folder / "config.json"), dict):
            raise UserError(f"{what}: its config.json is no JSON object")
        for name, value in given.items():
            most = MOST_COUNTED if _COUNTS.fullmatch(name) else MOST_SIZED if _SIZES.fullmatch(name) else None
            if most is not None and isinstance(value, int | float) and not abs(value) <= most:
                raise UserError(f"{what}: {name} in its config.json is {value}, above {most}, the largest valid value")
    config: Config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **values)
    for key in _MAPS:
        config.__dict__.pop(key, None)
    return config


def is_exported(folder: Path) -> bool:
    """Return whether a folder is an export with a modelling file, whose configuration has keys of ours."""
    return (folder / f"{MODULE}.py").is_file() and (folder / "structure.json").is_file()


def references(folder: Path, keys: Sequence[str] = _MAPS) -> Iterator[str]:
    """Yield all code that the files of a model name, at any depth, under these keys."""
    for name in _FILES:
        yield from _below(read_settings(folder / name), keys)


def _below(value: Any, keys: Sequence[str], inside: bool = False) -> Iterator[str]:
    """Yield the strings in a JSON value that are below one of ``keys``; all of them if it is ``inside`` one."""
    if inside and isinstance(value, str):
        yield value
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, child in value.items() if isinstance(value, dict) else ():
        yield from _below(child, keys, inside or key in keys)


def forget_code(folder: Path) -> None:
    """Take the code that a model's files name out of them; an export keeps its modelling file.

    Nobody may get from us a folder that names code which we did not write.
    """
    for name in _FILES:
        content = read_settings(folder / name)
        ours = {auto: ref for auto, ref in _classes(content.get("auto_map")).items() if ref.startswith(f"{MODULE}.")}
        kept = _without_code(content) | ({"auto_map": ours} if ours else {})
        if kept != content:
            (folder / name).write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_code(child) for key, child in value.items() if key not in _MAPS}
    return [_without_code(child) for child in value] if isinstance(value, list) else value


def read_settings(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if it is not there or broken: whoever needs it says so."""
    try:
        content = json_of(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _classes(auto_map: Any) -> dict[str, str]:
    """Return the classes that an ``auto_map`` names, ``file.Class``, by the class of transformers that looks for it."""
    if isinstance(auto_map, str | list):  # of tokenizers, in older files
        auto_map = {"AutoTokenizer": auto_map}
    pairs = auto_map.items() if isinstance(auto_map, dict) else ()
    plain = {name: next(filter(None, ref), None) if isinstance(ref, list) else ref for name, ref in pairs}
    return {name: ref for name, ref in plain.items() if isinstance(ref, str)}
