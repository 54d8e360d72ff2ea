"""Stored configs: the values that commands take, and the meaning of older values today."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from inspect import signature
from typing import Any

from lit_compress import methods
from lit_compress.export.choices import Choices
from lit_compress.utils.errors import UserError
from lit_compress.utils.removed import without_removed


def checked_config(what: str, stored: Any) -> dict[str, Any]:
    """Return the plain values of known keys in a stored config, as this version writes it.

    The file may be somebody else's. So it names no class except the method, which only the command line may import, and
    it gives no consent to run code.

    Args:
        what: the file, the start of error messages.
        stored: its content.

    Raises:
        UserError: it has no method, something else where groups of options belong, or a class among the options of the
            data or the export.
    """
    return plain_config(what, checked_groups(what, stored))


_CLASS = ("class_path", "init_args", "dict_kwargs")  # how the parser knows a class


def plain_config(what: str, config: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    """Return the known keys of a config of today's form, without consent to run code and without classes."""
    kept: dict[str, Any] = {
        name: config[name] for name in ("seed_everything", "checkpoint_every", "max_skipped") if name in config
    }
    init = _plain(config["model"]["init_args"], f"{what}: model" if strict else None)
    kept |= {name: _plain(config.get(name, {}), f"{what}: {name}") for name in ("data", "export")}
    trainer = _plain(config.get("trainer", {}), None)
    return kept | {"model": {"class_path": config["model"]["class_path"], "init_args": init}, "trainer": trainer}


def _plain(values: dict[Any, Any], what: str | None) -> dict[str, Any]:
    """Return the numbers, strings, booleans and nulls among ``values``, and lists and groups of these.

    Raises:
        UserError: there is something else, such as a class; begins with ``what``. None: it is left out.
    """
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(name, str) and name not in _CLASS and "." not in name:
            if isinstance(value, dict):
                if not set(_CLASS) & value.keys():
                    kept[name] = _plain(value, what and f"{what}.{name}")
            elif all(one is None or isinstance(one, str | int | float) for one in _flat(value)):
                kept[name] = value
        if what and name not in kept:
            raise UserError(f"{what}.{name} is no plain value; a stored config cannot name classes")
    return kept


def _flat(value: Any) -> Iterator[Any]:
    """Yield the values in nested lists."""
    for one in value if isinstance(value, list) else ():
        yield from _flat(one)
    if not isinstance(value, list):
        yield value


def checked_groups(what: str, stored: Any, strict: bool = False) -> dict[str, Any]:
    """Return a stored config as this version writes it, with all that it names.

    Raises:
        UserError: it has no method, or something else where groups of options belong; begins with ``what``. With
            ``strict`` also if an option had an effect that this version lacks.
    """
    model = stored.get("model") if isinstance(stored, dict) else None
    if not (isinstance(model, dict) and isinstance(model.get("class_path"), str) and model.get("init_args")):
        raise UserError(f"{what} names no method with its options; it is broken")
    groups = {
        "model.init_args": model["init_args"],
        **{name: stored.get(name, {}) for name in ("data", "export", "trainer")},
    }
    groups |= {"model.prune": model["init_args"].get("prune") or {}} if isinstance(model["init_args"], dict) else {}
    if broken := next((name for name, value in groups.items() if not isinstance(value, dict)), None):
        raise UserError(f"{what} has no options in {broken}; it is broken")
    return bring_up_to_date(stored, strict)


def _usual(method: type[Any], name: str) -> Any:
    """Return the default of an argument of a method's constructor, or of one that it passes ``**common`` on to."""
    signatures = (signature(vars(kind)["__init__"]).parameters for kind in method.__mro__ if "__init__" in vars(kind))
    return next(parameters[name].default for parameters in signatures if name in parameters)


_NEW = ("parameters", "lora")  # of a retraining; earlier versions trained all parameters


def bring_up_to_date(config: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    """Return a stored config with the names and the meaning of today, if an earlier version wrote it.

    Exports had no choices; a single file was split by the seed of the run; gates had other names; a rank was allowed
    with any density; distances of hidden states were relative in one method; a retraining trained all parameters.
    Options that were removed are left out, or refused if ``strict`` and they had an effect.
    """
    config.setdefault("export", asdict(Choices()))
    if isinstance(config.get("data"), dict) and "seed_everything" in config:
        config["data"].setdefault("split_seed", config["seed_everything"])
    model = config["model"]
    model["init_args"] = without_removed(model["init_args"], strict)
    config["export"] = without_removed(config["export"], strict)
    method, init = getattr(methods, model["class_path"].rpartition(".")[2], None), model["init_args"]
    former, gates = getattr(method, "former_gates", {}), (init.get("prune") or {}).get("gates")
    if gates:
        init["prune"]["gates"] = [former.get(name, name) if isinstance(name, str) else name for name in gates]
    if init.get("density") is not None and (init.get("rank") is not None or init.get("rank_ratio") is not None):
        init["density"] = signature(method).parameters["density"].default if method else None
    if isinstance(init.get("distillation"), dict):
        init["distillation"].setdefault("relative", model["class_path"].endswith(".SecondOrder"))
    if isinstance(init.get("retrain"), dict) and method:
        usual = asdict(_usual(method, "retrain"))
        init["retrain"] = {name: usual[name] for name in _NEW if name in usual} | init["retrain"]
    return config
