"""What keeps a comparison fair: the options of ``fit`` that it does not take, and the keys in their place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import yaml

from lit_compress.utils.errors import UserError

# options that a comparison gives its runs, or that end them early, as regular expressions -> what to do in their place
_REFUSED = {
    r"model|model\.class_path": "give methods",
    r"model\.(density|rank|rank_ratio|budget)": "give budgets",
    r"model\.teacher": "give its folder as teacher",
    r"model\.dense\..*": "give it in teacher",
    r"model\.\w+\.epochs": "give updates or split",
    r"model\.\w+\.learning_rate": "give learning_rates",
    r"trainer\.((min|max)_(steps|epochs)|max_time|limit_train_batches|fast_dev_run)": "give updates",
    r"trainer\.callbacks\.duration": "give updates",  # of a Timer
    r"run_dir|trainer\.default_root_dir": "give --out",
    r"seed_everything": "give seeds",
    r"data\.hold_out": "give hold_out",
    r"ckpt_path": "leave it out",
    r"c|config": "give the options in it one by one",
}
# those that one method may not have alone: other rows, other batches, or more epochs to choose from
_SHARED = (
    r"data\..*|device|trainer\.(accelerator|devices|num_nodes|accumulate_grad_batches)"
    r"|trainer\.(limit_val_batches|val_check_interval)"
)


def check_options(options: Mapping[str, Any], where: str = "") -> None:
    """Refuse the first option that a comparison does not take.

    Args:
        options: of ``fit``, by name or in groups.
        where: the key of the config that has them; "" for the command line. A teacher's training has its own length.

    Raises:
        UserError: such an option; says what to give in its place.
    """
    for name, value in _each(options):
        if where == "teacher" and name.startswith(("trainer.", "model.dense.")):
            continue
        place = f"config: {where}: {name}" if where else name
        if advice := in_its_place(name):
            raise UserError(f"{place}: compare does not take it; {advice}")
        if name.startswith("trainer.callbacks") and "EarlyStopping" in str(value):
            raise UserError(f"{place}: EarlyStopping ends some runs before others; give updates")
        if where not in ("", "options", "teacher") and re.fullmatch(_SHARED, name):
            raise UserError(f"{place} is the same for all methods; give it in options")


def in_its_place(option: str) -> str | None:
    """Return what to do in place of an option that a comparison does not take; None if it takes the option."""
    return next((advice for pattern, advice in _REFUSED.items() if re.fullmatch(pattern, option)), None)


def _each(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names, without the parts for configs alone, and values of options, also of those inside of groups."""
    for key, value in options.items():
        name = f"{before}{key}".removesuffix("+").replace(".init_args", "")
        yield name, value
        with suppress(yaml.YAMLError):
            value = yaml.safe_load(value) if isinstance(value, str) and value.startswith(("{", "[")) else value
        for inside in value if isinstance(value, list) else [value]:
            if isinstance(inside, dict):
                yield from _each(inside, f"{name}.")
