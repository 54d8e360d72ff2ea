"""No option and no recipe of version 0.2.0 changes or is lost without a word; see golden/options.py."""

from __future__ import annotations

import pytest
from golden import options
from quick import quick_runs

FROZEN = options.frozen()


@pytest.fixture(scope="module", autouse=True)
def quick():
    with quick_runs():
        yield


def test_every_command_has_its_options():
    now = {command: set(options.of_command(command)) for command in FROZEN["commands"]}
    lost = {command: sorted(set(names) - now[command]) for command, names in FROZEN["commands"].items()}
    assert {command: names for command, names in lost.items() if names} == {}


@pytest.mark.parametrize("method", FROZEN["methods"])
def test_a_method_has_its_defaults(method):
    assert changed(FROZEN["methods"][method], options.of_method(method)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FROZEN["recipes"])
def test_a_recipe_has_its_values(recipe):
    assert changed(FROZEN["recipes"][recipe], options.of_recipe(recipe)) == {}


def changed(before, now):
    """Return the values that differ, or that one of both lacks: {option: (before, now)}."""
    lacks = "not there"
    return {name: (before.get(name, lacks), now.get(name, lacks)) for name in sorted(before.keys() | now.keys())
            if before.get(name, lacks) != now.get(name, lacks)}  # fmt: skip
