"""The names of options, as users type them: of methods, the data, the export and the Trainer."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from inspect import Parameter, signature

import lightning.pytorch as pl

from lit_compress import methods
from lit_compress.data.datamodule import DataModule
from lit_compress.export.choices import Choices
from lit_compress.methods import Method

_LINKED = {"model.task", "data.backbone", "data.teacher", "data.seed"}  # follow from other options, cannot be given


def option_names(method: type[Method] | None = None) -> list[str]:
    """Return all options of a method (None: of all methods), the data and the trainer, as users type them."""
    keys = [
        "run_dir", "ckpt_path", "checkpoint_every", "max_skipped", "trust_remote_code",
        "seed_everything", "config", "print_config", "model",
    ]  # fmt: skip
    kinds = [method] if method else [getattr(methods, name) for name in methods.__all__]
    others = (("data", DataModule), ("export", Choices), ("trainer", pl.Trainer))
    for prefix, parameters in [
        *(("model", parameters_of(kind)) for kind in kinds),
        *((prefix, signature(kind).parameters) for prefix, kind in others),
    ]:
        for option, parameter in parameters.items():
            keys.append(f"{prefix}.{option}")
            if is_dataclass(parameter.default):
                keys += [f"{prefix}.{option}.{field.name}" for field in fields(parameter.default)]
    return sorted(set(keys) - _LINKED)


def parameters_of(kind: type[Method]) -> dict[str, Parameter]:
    """Return the options of a method by name: the parameters of its constructor and its base classes.

    They have the order in which a run uses them: own values after the density, own settings between the dense stage's
    and the distillation's.
    """
    options: dict[str, Parameter] = {}
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = list(signature(vars(base)["__init__"]).parameters.values())[1:]
            options = {p.name: p for p in parameters if p.kind is not Parameter.VAR_KEYWORD} | options
        if base is Method:
            break
    common = list(signature(Method).parameters)

    def place(name: str) -> float:
        if name in common:
            return common.index(name)
        return common.index("dense" if is_dataclass(options[name].default) else "density") + 0.5

    return {name: options[name] for name in sorted(options, key=place)}


def method_names() -> list[str]:
    """Return the names of the shipped methods."""
    return [name for name in methods.__all__ if name != "Method"]
