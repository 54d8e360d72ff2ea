"""Stored configs: the values that commands take, and the meaning of older values today."""

from __future__ import annotations

from typing import Any

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
        UserError: as :func:`checked_groups`, or there is a class among the options of the data or the export.
    """
    return plain_config(what, checked_groups(what, stored))


_CLASS = {"class_path", "init_args", "dict_kwargs"}  # how the parser knows a class
_ALONE = ("seed_everything", "checkpoint_every", "max_skipped")  # in no group
_TRAINING = ("optimizer", "lr_scheduler")  # classes that train a stage


def plain_config(what: str, config: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    """Return the known keys of a config of today's form, without consent to run code and without classes.

    Optimizers and schedules are left out: what reads a stored config trains nothing. A class among the options of the
    data or the export is refused, with ``strict`` also one among the method's.
    """
    kept: dict[str, Any] = {name: config[name] for name in _ALONE if name in config}
    init = _plain(config["model"]["init_args"], f"{what}: model" if strict else None)
    kept |= {name: _plain(config.get(name, {}), f"{what}: {name}") for name in ("data", "export")}
    trainer = _plain(config.get("trainer", {}), None)
    return kept | {"model": {"class_path": config["model"]["class_path"], "init_args": init}, "trainer": trainer}


def _plain(values: dict[Any, Any], what: str | None) -> dict[str, Any]:
    """Return the numbers, strings, booleans and nulls among ``values``, and lists and groups of these.

    Anything else, such as a class, is refused by ``what``; None: it is left out.
    """
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if name in _TRAINING:
            continue
        group = isinstance(value, dict) and not _CLASS & value.keys()
        if isinstance(name, str) and name not in _CLASS and "." not in name and (group or _is_plain(value)):
            kept[name] = _plain(value, what and f"{what}.{name}") if group else value
        elif what:
            raise UserError(f"{what}.{name} is no plain value; a stored config cannot name classes")
    return kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def checked_groups(what: str, stored: Any, strict: bool = False) -> dict[str, Any]:
    """Return a stored config as this version writes it, with all that it names.

    Raises:
        UserError: it has no method, or something else where groups of options belong; begins with ``what``. With
            ``strict`` also if an option had an effect that this version lacks.
    """
    model = stored.get("model") if isinstance(stored, dict) else None
    if not (isinstance(model, dict) and isinstance(model.get("class_path"), str) and model.get("init_args")):
        raise UserError(f"{what} names no method with its options; it is broken")
    groups = {"model.init_args": model["init_args"], **{name: stored.get(name, {}) for name in ("data", "trainer")}}
    if "export" not in stored:
        raise UserError(f"{what} is of a version before 0.2, which this one does not read; make the run again")
    prune = model["init_args"].get("prune") if isinstance(model["init_args"], dict) else None
    groups |= {"export": stored["export"], "model.prune": prune or {}}
    if broken := next((name for name, value in groups.items() if not isinstance(value, dict)), None):
        raise UserError(f"{what} has no options in {broken}; it is broken")
    if "seed_everything" in stored and "data" in stored:
        stored["data"].setdefault("split_seed", stored["seed_everything"])  # 0.2 split a single file by this seed
    model["init_args"] = without_removed(model["init_args"], strict)
    stored["export"] = without_removed(stored["export"], strict, "export")
    return stored  # type: ignore[no-any-return]
