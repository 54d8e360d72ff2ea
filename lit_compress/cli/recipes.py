"""Finding the config that ``--config`` names: a file, a recipe, or a row of a recipe.

A recipe is one YAML file for a method: a head, which is a config for LightningCLI, and a table with a row per task.

    model: {class_path: lit_compress.methods.LPAF, init_args: {prune: {learning_rate: 3.0e-5}}}
    tasks:
      sst2: {model.init_args.prune.epochs: 6}

A row's keys are dotted paths. Their values are merged over the head, key by key, and ``data.task`` is the row's name. A
YAML file without ``tasks`` is an ordinary config. The config of a comparison may also have a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import read_yaml, yaml_text

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
COMPARISONS = FOLDER / "compare"


def recipes() -> dict[str, list[str]]:
    """Return the shipped recipes: name and tasks, both sorted; a config without a table has no tasks."""
    return {path.stem: sorted(_table(path, read_yaml("config", path)) or ()) for path in sorted(FOLDER.glob("*.yaml"))}


def method_of(recipe: str) -> str:
    """Return the name of the method of a shipped recipe."""
    model = read_yaml("config", FOLDER / f"{recipe}.yaml").get("model") or {}
    return str(model.get("class_path") if isinstance(model, dict) else model).rpartition(".")[2]


def shipped() -> list[str]:
    """Return the names of all shipped configs: ``<recipe>_<task>.yaml`` for rows, else the file's name."""
    names = recipes().items()
    return [f"{recipe}_{task}.yaml" if task else f"{recipe}.yaml" for recipe, tasks in names for task in tasks or [""]]


def find_config(name: str) -> tuple[Path, str | None]:
    """Return the file for ``name``, and the task if ``name`` names a recipe's row.

    Raises:
        UserError: there is no such file or shipped config; the message names the nearest.
    """
    path, stem = Path(name).expanduser(), name.removesuffix(".yaml")
    if path.is_file():
        return path.resolve(), None
    if path.name == name:
        if (FOLDER / f"{stem}.yaml").is_file():
            return FOLDER / f"{stem}.yaml", None
        fitting = [file for file in FOLDER.glob("*.yaml") if stem.startswith(f"{file.stem}_")]
        for file in sorted(fitting, key=lambda file: len(file.stem), reverse=True):
            task = stem.removeprefix(f"{file.stem}_")
            if task in (_table(file, read_yaml("config", file)) or ()):
                return file, task
    names = [*shipped(), *(f"{recipe}.yaml" for recipe, tasks in recipes().items() if tasks)]
    raise UserError(f"config: no file or shipped config '{name}'; {_near(name, names)}")


def resolve_config(name: str, task: str | None = None) -> tuple[str, str | None]:
    """Return the value for the parser's ``--config``, and a note if a recipe has no row for ``task``.

    Args:
        name: a path, or the name of a shipped config.
        task: the value of ``--data.task``, which chooses the row unless ``name`` does; None if it is not given.

    Returns:
        The path of a config, or the text of the config made from a recipe; the note, or None.

    Raises:
        UserError: no config has this name, the file is unreadable, or no row is chosen.
    """
    path, row = find_config(name)
    config = read_yaml("config", path)
    table = _table(path, config)
    if table is None:
        return str(path), None
    head = {key: value for key, value in config.items() if key != "tasks"}
    task = row or task or _default_task(head, table)
    if task is None:
        raise UserError(f"config: '{name}' has a row per task; choose one with --data.task: {', '.join(table)}")
    merged = merge_row(head, {**table.get(task, {}), "data.task": task})
    return yaml_text(merged), None if task in table else _no_row(path, task, table)


def _near(name: str, names: Iterable[str]) -> str:
    """Return the end of a message on an unknown config; the ending .yaml makes no two names alike."""
    hint = nearest(Path(name).name.removesuffix(".yaml"), (known.removesuffix(".yaml") for known in names))
    return hint.replace("'?", ".yaml'?")


def shipped_comparisons() -> dict[str, tuple[Path, str | None]]:
    """Return file and row of every config of ``compare``; their names are ``<file>_<task>.yaml``, or the file's."""
    rows = ((file, task) for file in sorted(COMPARISONS.glob("compare*.yaml"))
            for task in _table(file, read_yaml("config", file)) or [None])  # fmt: skip
    return {f"{file.stem}_{task}.yaml" if task else file.name: (file, task) for file, task in rows}


def resolve_comparison(name: str, task: str | None = None) -> tuple[Path, dict[str, Any], str | None]:
    """Return the config of a comparison: its file, its content with the row of a task, and a note on it.

    Args:
        name: a path, or the name of a shipped config: ``compare_sst2.yaml`` is the row sst2 of compare.yaml.
        task: the value of ``--data.task``, which chooses the row unless ``name`` does; None if it is not given.

    Returns:
        The file; its content; a note if the file has rows but none for ``task``, else None.

    Raises:
        UserError: no config has this name, the file is unreadable, or no row is chosen.
    """
    full, shipped = f"{name.removesuffix('.yaml')}.yaml", shipped_comparisons()
    file = next((path for path in (Path(name).expanduser(), COMPARISONS / full) if path.is_file()), None)
    if file is None:
        if full not in shipped:
            raise UserError(f"config: no file or shipped comparison '{name}'; {_near(name, shipped)}")
        file, task = shipped[full]
    content = read_yaml("config", file)
    if (table := _table(file, content)) is None:
        return file, content, None
    if task is None:
        raise UserError(f"config: '{name}' has a row per task; choose one with --data.task: {', '.join(table)}")
    head = {key: value for key, value in content.items() if key != "tasks"}
    merged = merge_row(merge_row(head, table.get(task, {})), {"options": {"data.task": task}})
    return file, merged, None if task in table else _no_row(file, task, table)


def _no_row(path: Path, task: str, table: dict[str, Any]) -> str:
    return f"{path.name} has no row for task '{task}'; its head is used; rows: {', '.join(table)}"


def merge_row(head: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``head`` with the values of a row.

    Args:
        head: a config.
        row: values by dotted path; a mapping is merged key by key, any other value replaces the head's.
    """
    for path, value in row.items():
        for key in reversed(str(path).split(".")):
            value = {key: value}
        head = _merge(head, value)
    return head


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return ``below`` with the values of ``above``; where both have a mapping, the two are merged."""
    both = {key for key in above if isinstance(above[key], dict) and isinstance(below.get(key), dict)}
    return {**below, **{key: _merge(below[key], above[key]) if key in both else above[key] for key in above}}


def _default_task(head: dict[str, Any], table: dict[str, Any]) -> str | None:
    """Return the task of a recipe if no task is given: that of the head, or of the only row; else None."""
    data = head.get("data")
    if isinstance(data, dict) and data.get("task"):
        return str(data["task"])
    return next(iter(table)) if len(table) == 1 else None


def _table(path: Path, config: Any) -> dict[str, dict[str, Any]] | None:
    """Return the rows of a recipe by task; None if the config has no table.

    Raises:
        UserError: the table or a row is not a mapping.
    """
    if not isinstance(config, dict) or "tasks" not in config:
        return None
    table = config["tasks"]
    if not isinstance(table, dict) or not table:
        raise UserError(f"config: tasks of '{path}' is no table; write one row per task, 'sst2: {{OPTION: VALUE}}'")
    for task, row in table.items():
        if not isinstance(row, dict | None):
            raise UserError(f"config: row '{task}' of '{path}' is '{row}'; write '{task}: {{OPTION: VALUE}}'")
    return {str(task): row or {} for task, row in table.items()}
