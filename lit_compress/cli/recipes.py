"""Configs: finding what ``--config`` names (a file, a recipe, or a row of a recipe), and merging several.

A recipe is one YAML file for a method: a head, which is a config for LightningCLI, and a table with a row per task.

    model: {class_path: lit_compress.methods.LPAF, init_args: {prune: {learning_rate: 3.0e-5}}}
    tasks:
      sst2: {model.init_args.prune.epochs: 6}

A row's keys are dotted paths. Their values are merged over the head, key by key, and ``data.task`` is the row's name. A
YAML file without ``tasks`` is an ordinary config. The config of a comparison may also have a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_compress.cli import catalogue
from lit_compress.cli.catalogue import PACKAGE
from lit_compress.cli.words import Line, check_names
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import read_yaml
from lit_compress.utils.progress import note
from lit_compress.utils.removed import without_removed

DEFAULT_METHOD = "SecondOrder"
CUSTOM = "custom"  # the task of the user's own
FOLDER = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
COMPARISONS = FOLDER / "compare"


def recipes(folder: Path = FOLDER) -> dict[str, list[str]]:
    """Return the shipped recipes: name and tasks, both sorted; a config without a table has no tasks."""
    return {path.stem: sorted(_table(path, read_yaml("config", path)) or ()) for path in sorted(folder.glob("*.yaml"))}


def shipped(folder: Path = FOLDER) -> list[str]:
    """Return the names of all shipped configs: ``<recipe>_<task>.yaml`` for rows, else the file's name."""
    names = recipes(folder).items()
    return [f"{recipe}_{task}.yaml" if task else f"{recipe}.yaml" for recipe, tasks in names for task in tasks or [""]]


def _find(name: str, folder: Path) -> tuple[Path, str | None]:
    """Return the file for ``name``, and the task if ``name`` names a recipe's row; refuse what is neither."""
    path, stem, known = Path(name).expanduser(), name.removesuffix(".yaml"), recipes(folder)
    if path.is_file():
        return path.resolve(), None
    rows = {f"{recipe}_{task}": (recipe, task) for recipe, tasks in known.items() for task in tasks}
    if stem in known or stem in rows:
        recipe, task = (stem, None) if stem in known else rows[stem]
        return folder / f"{recipe}.yaml", task
    hint = nearest(path.name.removesuffix(".yaml"), [*rows, *known]).replace("'?", ".yaml'?")
    raise UserError(f"config: no file or shipped config '{name}'; {hint}")


def resolve_config(name: str, task: str | None = None, folder: Path = FOLDER) -> dict[str, Any]:
    """Return the content of a config: of a recipe the head, with the row for ``task`` over it if there is one.

    Args:
        name: a path, or the name of a shipped config.
        task: the value of ``--data.task``, which chooses the row unless ``name`` does; None if it is not given.
        folder: of the shipped configs: of recipes, or :data:`COMPARISONS`.

    Raises:
        UserError: no config has this name, the file is unreadable, or no row is chosen.
    """
    path, row = _find(name, folder)
    config = read_yaml("config", path)
    if not isinstance(config, dict):
        raise UserError(f"config: '{name}' holds no options; write OPTION: VALUE")
    if (table := _table(path, config)) is None:
        return config
    data = config.get("data")
    only = next(iter(table)) if len(table) == 1 else None
    if (task := row or task or (isinstance(data, dict) and data.get("task")) or only) is None:
        raise UserError(f"config: '{name}' has a row per task; choose one with --data.task: {', '.join(table)}")
    head = {key: value for key, value in config.items() if key != "tasks"}
    if task not in table:
        note(f"{path.name} has no row for task '{task}'; its head is used; rows: {', '.join(table)}")
    named = {"options": {"data.task": task}} if folder == COMPARISONS else {"data.task": task}
    return merge_row(merge_row(head, table.get(task, {})), named)


def merge_row(head: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a config with a row's values by dotted path; a mapping is merged key by key."""
    for path, value in row.items():
        for key in reversed(str(path).split(".")):
            value = {key: value}
        head = _merge(head, value)
    return head


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return ``below`` with the values of ``above``; where both have a mapping, the two are merged."""
    both = {key for key in above if isinstance(above[key], dict) and isinstance(below.get(key), dict)}
    return {**below, **{key: _merge(below[key], above[key]) if key in both else above[key] for key in above}}


def _table(path: Path, config: Any) -> dict[str, dict[str, Any]] | None:
    """Return the rows of a recipe by task; None if the config has no table; refuse what is no mapping."""
    if not isinstance(config, dict) or "tasks" not in config:
        return None
    table = config["tasks"]
    if not (table and isinstance(table, dict) and all(isinstance(row, dict | None) for row in table.values())):
        raise UserError(f"config: tasks of '{path}' is no table; write one row per task, 'sst2: {{OPTION: VALUE}}'")
    return {str(task): row or {} for task, row in table.items()}


# ------------------------------------------------------------------------------------------ the configs of a command


def inferred_task(line: Line, named: bool = False) -> str | None:
    """Return the task that options name, or the user's own where they give its columns or (not ``named``) a file."""
    path = None if named else line.last("data.path")
    own = any(name.startswith("data.custom.") for name in line.names) or (path and Path(path).expanduser().is_file())
    return line.last("data.task") or (CUSTOM if own else None)


def merged_configs(line: Line, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of all configs of a command line, merged, with the method; ``model`` is always a mapping.

    A method takes over the values of a config for another one that are its options as well.

    Args:
        line: the command line, whose objects from Python are merged as well; its texts are the parser's.
        base: the first config, which all others override.

    Raises:
        UserError: a config cannot be used.
    """
    merged, task = dict(base or {}), inferred_task(line, named=True)
    for name, text in line.options:
        if name == "config":
            merged = _over(merged, without_removed(resolve_config(text, task), strict=True))
    if (method := line.last("model")) is not None:
        merged = _over(merged, {"model": method})
    elif line.last("model.backbone") and not (line.last("config") or merged.get("model") or line.command == "compare"):
        merged["model"] = {"class_path": DEFAULT_METHOD}
        note(f"model: {DEFAULT_METHOD}, the default; --model NAME takes another")
    for name, value in line.options:
        if not isinstance(value, str):
            merged = merge_row(merged, {re.sub(r"^model\.", "model.init_args.", name): value})
    data = merged.get("data") or {}
    if task or (isinstance(data, dict) and not data.get("task") and (task := inferred_task(line))):
        merged = merge_row(merged, {"data.task": task})
    return {**merged, "model": merged.get("model") or {}}


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return a config with another over it; if that has another method, its options alone are left of the first's."""
    if isinstance(above.get("model"), str):
        above = {**above, "model": {"class_path": above["model"]}}
    old, new = below.get("model"), above.get("model")
    name = new.get("class_path") if isinstance(new, dict) else None
    if name and isinstance(old, dict) and name != old.get("class_path") and (known := catalogue.of_method(name)):
        init = old.get("init_args")
        kept = {key: v for key, v in flat(init if isinstance(init, dict) else {}) if f"model.{key}" in known}
        below = {**below, "model": {"class_path": name, "init_args": merge_row({}, kept)}}
    return _merge(below, above)


def check_config(config: dict[str, Any], method: str | None) -> None:
    """Refuse keys of a merged config that are no options of ``method``, and values where groups of options belong."""
    model = config["model"]
    groups = {name: config.get(name, {}) for name in ("model", "data", "trainer", "export")}
    groups |= {"model.init_args": model.get("init_args", {})} if isinstance(model, dict) else {}
    for name, value in groups.items():
        if not isinstance(value, dict):
            raise UserError(f"config: {name} is {value!r:.80}; give its options as a mapping, e.g. {name}: {{}}")
    for key in sorted(model.keys() - {"class_path", "init_args"}):
        moved = f"model.{key}" in catalogue.names(method)
        hint = f"did you mean 'init_args.{key}'?" if moved else nearest(key, ["init_args"])
        raise UserError(f"config: unknown key 'model.{key}'; {hint}")
    check_names("fit", [(name, "{" if value is None else str(value)) for name, value in flat(config)], method)


def flat(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of a config; a class with its arguments is one value."""
    for key, value in values.items():
        name = f"{before}{key}"
        group = isinstance(value, dict) and (name == "model" or "class_path" not in value)
        if group and not name.startswith("trainer."):
            yield from flat(value, f"{name}.")
        elif name not in ("model.class_path", "model.init_args.task"):
            yield name, value
