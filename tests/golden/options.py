"""All options and the config of every recipe, as version 0.2.0 had them.

Version 0.2.0 wrote options.json. An option that is there is an option today with the same default, or a line refuses it
and says what to do. A recipe gives every option that is left the same value as before.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from pathlib import Path
from typing import Any

from lit_compress.__main__ import main as run_command
from lit_compress.cli.lines import read_line
from lit_compress.cli.options import CommandLine
from lit_compress.run.folder import flatten

FILE = Path(__file__).with_name("options.json")
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
    return of_line(CommandLine(read_line("plan", words)))


def of_line(line: CommandLine) -> dict[str, Any]:
    """Return what a parsed command line gives every option but Lightning's."""
    config = flatten(line.dump())
    plain = {name.replace(".init_args", ""): value for name, value in config.items()}
    return {name: value for name, value in sorted(plain.items()) if not name.startswith(_FOREIGN)}


@functools.cache
def of_method(name: str) -> dict[str, Any]:
    """Return the defaults of a method."""
    return config_of("--model", name, "--data.task", "sst2")


def of_recipe(line: CommandLine) -> dict[str, Any]:
    """Return the values of a parsed row of a recipe that are not the defaults of its method."""
    config = of_line(line)
    usual = of_method(config["model.class_path"].rpartition(".")[2])
    return {name: value for name, value in config.items() if name not in usual or usual[name] != value}


def frozen() -> dict[str, Any]:
    """Return the record of version 0.2.0: ``commands``, ``methods`` and ``recipes``."""
    record: dict[str, Any] = json.loads(FILE.read_text())
    return record
