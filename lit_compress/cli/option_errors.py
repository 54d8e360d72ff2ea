"""Mistakes in options, in one line: the typed value, the error, the nearest valid value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher, get_close_matches

from lit_compress.cli.option_names import method_names, option_names, parameters_of
from lit_compress.methods import Method
from lit_compress.stages.base import Training
from lit_compress.utils.errors import nearest
from lit_compress.utils.removed import removed, removed_value


def explain(text: str, method: type[Method] | None, own: Sequence[str]) -> str:
    """Return one line for a parser's message: the option, its value, the nearest valid one.

    Args:
        text: the message.
        method: that the command line or its configs name.
        own: options that only the command has.
    """
    if match := re.search(r"unrecognized arguments: (\S+)", text):
        if match[1].endswith((".yaml", ".yml")):
            return f"'{match[1]}' has no option before it; --config {match[1]}"
        if not match[1].startswith("-"):
            return f"'{match[1]}' has no option before it; see --help"
        return _unknown(match[1].lstrip("-").partition("=")[0], method, own)
    if match := re.search(r"Group '(\S+)' does not accept option '(\S+)'", text):
        return _unknown(f"{match[1]}.{match[2]}", method, own)
    if match := re.search(r"Option '(\S+)' is not accepted", text):
        return _unknown(match[1], method, own)
    if match := re.search(r"Problem with given class_path '([^']+)'|dot import path string: (\S+)", text):
        name = match[1] or match[2]
        if "." in name and not name.startswith("lit_compress."):
            return (
                f"model.class_path: '{name}' cannot be imported here, or is no subclass of lit_compress.methods.Method"
            )
        return f"model.class_path: unknown method '{name}'; {nearest(name.rpartition('.')[2], method_names())}"
    if match := re.search(r'Parser key "(\S+)": .*?Expected a (.+?)\. Got value: (.*)$', text):
        if line := removed_value(_full(match[1]), match[3]):
            return line
        return f"{_full(match[1])}: '{match[3]}' is not a valid {_type(match[2])}"
    if match := re.search(r'Parser key "(\S+)":.*Given value: (.*)$', text):
        kinds = re.findall(r"- Expected an? (.+?)(?= - Expected | Given value)", text)
        shown = " or ".join(_type(kind) for kind in kinds)
        if line := removed_value(_full(match[1]), match[2]):
            return line
        return f"{_full(match[1])}: '{match[2]}' is not a valid {shown or 'value; see --help'}"
    if match := re.search(r"Parser key \"(\S+)\": Unable to load config '(.*?)'", text):
        key = _full(match[1])
        first = next((k for k in option_names(method) if k.startswith(f"{key}.")), f"{key}.OPTION")
        return f"{key}: '{match[2]}' is no value of a group of options; give them one by one, e.g. --{first}"
    if text.endswith("are required: model") or "class_path='lit_compress.methods.Method'" in text:
        return no_method()
    return text[:400]


def no_method() -> str:
    """Return the message for a missing method."""
    return f"model: no method given; start from a config (--config lpaf_sst2.yaml) or --model {method_names()[0]}"


def _full(key: str) -> str:
    """Return the full option, as users type it, for a key that a nested parser names without its prefix."""
    known = option_names()
    return next((k for k in (key, f"model.{key}", f"data.{key}", f"export.{key}") if k in known), key)


def _unknown(key: str, method: type[Method] | None, own: Sequence[str]) -> str:
    """Return what is said of an unknown option: the nearest one of the method at hand, the data and the trainer."""
    if line := removed(key):
        return line
    if method and (line := _not_a_stage(key, method)):
        return line
    known, last = [*own, *option_names(method)], key.rpartition(".")[2]
    name = {"lr": "learning_rate"}.get(last, last)
    stages = [option for option in known if option.startswith("model.") and option.endswith(f".{name}")]
    if key in (last, f"model.{last}") and len(stages) > 1:
        return f"unknown option '{key}'; every stage has its own: {', '.join(stages)}"
    groups = ("model.", "data.", "export.", "trainer.")
    whole_names = ("model",) if key == "method" else (group + key for group in groups)
    direct = next((name for name in whole_names if name in known), None)
    if not direct and method and (whole := next((k for k in (key, f"model.{key}") if k in option_names()), None)):
        group = whole.rpartition(".")[0]
        options = ", ".join(name for name in known if name.rpartition(".")[0] == group)
        return f"unknown option '{key}' for {method.__name__}; its options: {options}"
    same = direct or min((name for name in known if name.endswith(f".{key}")), key=len, default=None)
    prefixes = ("",) if key.startswith(groups) else ("", *groups)

    def likeness(prefix: str) -> float:
        close = get_close_matches(prefix + key, known, n=1)
        return SequenceMatcher(None, prefix + key, close[0]).ratio() if close else 0.0

    hint = f"did you mean '{same}'?" if same else nearest(max(prefixes, key=likeness) + key, known)
    return f"unknown option '{key}'; {hint}"


def _not_a_stage(key: str, method: type[Method]) -> str | None:
    """Return what is said of the settings of a stage that the method lacks and another has; None: it is no such key."""
    stage = key.removeprefix("model.").partition(".")[0]
    stages = [name for name, p in parameters_of(method).items() if isinstance(p.default, Training)]
    if stage in stages or not any(k.startswith(f"model.{stage}.") for k in option_names()):
        return None
    if stage in parameters_of(method):
        return None
    return f"model.{stage}: {method.__name__} has no stage {stage}; its stages: {', '.join(stages)}"


def as_typed(message: str, args: list[str]) -> str:
    """Return a message with the whole name of the option that it begins with.

    Settings know neither the stage they are of nor that they are the method's; ``args`` say which stage was meant.
    """
    if match := re.match(r"unknown option '(\S+?)'", message):
        names = (word.partition("=")[0].lstrip("-") for word in args if word.startswith("-"))
        typed = next((name for name in names if f".{name}".endswith(f".{match[1]}")), match[1])
        return message.replace(match[1], typed, 1)
    message = _with_stage(message, args)
    option = re.match(r"[a-z_0-9.]+", message)
    known = set(option_names())
    if not option or option[0] in known:
        return message
    groups = ("model", "data", "export")
    return next((f"{prefix}.{message}" for prefix in groups if f"{prefix}.{option[0]}" in known), message)


def _with_stage(message: str, args: list[str]) -> str:
    """Put the stage before a setting that every stage has, such as ``epochs``: that of the option in ``args``."""
    option = message.partition(": ")[0]
    typed = [word.partition("=")[0].lstrip("-") for word in args if word.startswith(("--model.", "--trainer."))]
    return next((f"{name.removesuffix(option)}{message}" for name in typed if name.endswith(f".{option}")), message)


def _type(text: str) -> str:
    text = text.replace("<class '", "").replace("'>", "").replace("typing.Literal", "value of ")
    return "null" if text == "NoneType" else text
