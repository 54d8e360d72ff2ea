"""Code that a model brings in its own folder: transformers runs it, with all rights of the user, only if it is trusted.

Nothing here asks: the option ``--trust_remote_code`` decides for the whole process. The code of a trusted model goes
wherever the model goes, because no other class computes the same. ``what``, option and value, begins every message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lit_compress.models.sites import Config, Model
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import json_of
from lit_compress.utils.progress import note

MODULE = "modeling_compressed"  # the modelling file of an export
DENSE = "dense_auto_map"  # in the configuration of an export: the classes of the model that it was made from
_MAPS = ("auto_map", DENSE)
_FILES = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")  # that have them
_KERNELS = ("attn_implementation", "experts_implementation")  # with a slash: a repository of compiled code
_trusted = False


def trust_code(trusted: bool) -> None:
    """Let this process run the code of models, or not."""
    global _trusted
    _trusted = trusted


def trusts_code() -> bool:
    """Return whether this process runs the code of models."""
    return _trusted


def check_code(what: str, folder: Path) -> None:
    """Refuse a model with code of its own that is not trusted, or that is in another repository.

    Classes that transformers has by the same name were taken over by it: they are used, and the code is not needed. A
    tokenizer is read from ``tokenizer.json`` without its code. Notes say both.
    """
    import transformers

    config = read_settings(folder / "config.json")
    named = _classes(config.get("auto_map")) | (_classes(config.get(DENSE)) if is_exported(folder) else {})
    own = sorted({ref for auto, ref in named.items() if auto == "AutoConfig" or auto.startswith("AutoModel")})
    own = [ref for ref in own if ref.partition(".")[0] != MODULE]
    of_words = sorted(set(_classes(read_settings(folder / "tokenizer_config.json").get("auto_map")).values()))
    keys = _MAPS if _trusted else (DENSE,)  # a model that is not trusted forgets the other, see forget_code
    if elsewhere := next((ref for ref in references(folder, keys) if "--" in ref), None):
        repository, _, file = elsewhere.partition("--")
        raise UserError(
            f"{what}: its code is in the repository '{repository}', whose revision nothing names; put "
            f"{file.partition('.')[0]}.py next to its config.json, and take '{repository}--' out of auto_map there"
        )
    if _trusted and find_spec("kernels"):
        return
    if kernel := next((ref for ref in references(folder, _KERNELS) if "/" in ref), None):
        raise UserError(f"{what} asks for the compiled code '{kernel}', which is not run; take it out of config.json")
    if _trusted:
        return
    files = [f"{ref.rpartition('--')[2].partition('.')[0]}.py" for ref in (*own, *of_words)]
    if strange := [ref for ref in own if not hasattr(transformers, ref.rpartition(".")[2])]:
        raise UserError(
            f"{what} has code of its own ({files[own.index(strange[0])]}), which is not run; read it, then "
            "--trust_remote_code runs it with all your rights"
        )
    if own:
        note(f"{what}: its code ({files[0]}) is not run; transformers has the class {own[0].rpartition('.')[2]}")
    if of_words:
        note(f"{what}: the code of its tokenizer ({files[-1]}) is not run; tokenizer.json is read without it")


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
    """Take the code that a model's files name out of them, if it is not trusted; an export keeps its modelling file.

    Nobody may get from us a folder that names code which we did not write.
    """
    for name in () if _trusted else _FILES:
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


def own_class(what: str, config: Config, auto_class: str) -> str | None:
    """Return the name of a trusted model's own class for the library's ``auto_class``; None if it has none.

    A configuration that is not trusted forgets its code, so that no file names code that is not next to it. Code that
    has classes of other types alone is refused.
    """
    config.__dict__.pop(DENSE, None)  # of exports alone, whose configurations are read elsewhere
    if not _trusted:
        config.__dict__.pop("auto_map", None)
        return None
    named = _classes(getattr(config, "auto_map", None))
    if any(name.startswith("AutoModel") for name in named) and auto_class not in named:
        raise UserError(f"{what} has code of its own, and no class for {auto_class} in it ({', '.join(sorted(named))})")
    return named[auto_class].rpartition(".")[2] if auto_class in named else None


def file_of(net: Model) -> str | None:
    """Return the name, without suffix, of the file that a model's class is from; None for a class of transformers."""
    package, _, file = type(net).__module__.rpartition(".")
    return file if package.startswith("transformers_modules") else None


def save_code(net: Model, folder: Path) -> None:
    """Write the code that a model brought, if any, into ``folder``: its file and those that it imports."""
    from transformers.dynamic_module_utils import custom_object_save

    if file_of(net):
        custom_object_save(net, folder)
