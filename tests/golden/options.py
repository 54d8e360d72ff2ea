"""All options and the config of every recipe, as version 0.2.0 had them.

``python -m tests.golden.options`` wrote options.json. An option that is there is an option today with the same default,
or a line refuses it and says what to do. A recipe gives every option that is left the same value as before.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOM = Path(__file__).parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOM.parent))

import conftest  # noqa: E402, F401  one thread, no network
from quick import quick_runs  # noqa: E402

from lit_compress import methods  # noqa: E402
from lit_compress.__main__ import COMMANDS  # noqa: E402
from lit_compress.__main__ import main as run_command  # noqa: E402
from lit_compress.cli.options import CommandLine  # noqa: E402
from lit_compress.cli.recipes import shipped  # noqa: E402
from lit_compress.run.folder import flatten  # noqa: E402

FILE = ROOM / "options.json"
_FOREIGN = ("trainer.", "config", "help", "print_config")  # Lightning's own
# option -> its default in version 0.2.0 and the one of today, which the changelog names
CHANGED = {"export.dtype": ("float32", "auto")}
OF_RECIPES = {  # of one recipe; what is not there is the default
    "quickstart.yaml": {"model.dense.epochs": (4, "not there"), "model.prune.epochs": (2, 1)}
}


def of_command(command: str) -> list[str]:
    """Return the options that the help text of a command names, without dashes."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        run_command([command, "--help"])
    found = re.findall(r"--([a-z]\w*(?:\.\w+)*)", said.getvalue())
    return sorted({name for name in found if not name.startswith(_FOREIGN)})


def config_of(*words: str) -> dict[str, Any]:
    """Return what a command line gives every option but Lightning's, by dotted name."""
    config = flatten(CommandLine(list(words), "plan").dump())
    plain = {name.replace(".init_args", ""): value for name, value in config.items()}
    return {name: value for name, value in sorted(plain.items()) if not name.startswith(_FOREIGN)}


def of_method(name: str) -> dict[str, Any]:
    """Return the defaults of a method."""
    return config_of("--model", name, "--data.task", "sst2")


def of_recipe(file: str) -> dict[str, Any]:
    """Return the values of a recipe's row that are not the defaults of its method."""
    config = config_of("--config", file)
    usual = of_method(config["model.class_path"].rpartition(".")[2])
    return {name: value for name, value in config.items() if name not in usual or usual[name] != value}


def frozen() -> dict[str, Any]:
    """Return the record of version 0.2.0: ``commands``, ``methods`` and ``recipes``."""
    record: dict[str, Any] = json.loads(FILE.read_text())
    return record


def make() -> None:
    """Write the record of this version."""
    with quick_runs():
        record: dict[str, dict[str, Any]] = {
            "commands": {command: of_command(command) for command in COMMANDS},
            "methods": {name: of_method(name) for name in sorted(methods.__all__) if name != "Method"},
            "recipes": {file: of_recipe(file) for file in shipped() if not file.startswith("compare")},
        }
    lines = [
        f'"{group}": {{\n' + ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        + "\n}" for group, entries in record.items()
    ]  # fmt: skip
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    make()
