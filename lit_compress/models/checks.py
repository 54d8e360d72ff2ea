"""The check of every model that is loaded: its tensors match the file, its tokenizer and its labels fit.

Libraries warn and go on: a tensor that a file lacks is drawn at random, a tokenizer without files knows five words, a
head answers for labels that it was not trained on. Here each of them is one line that names the mistake. It begins with
``what``: option and value.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_compress.models.own_code import is_exported, read_settings
from lit_compress.models.sites import Model, gives_states
from lit_compress.numerics.decompose import all_finite
from lit_compress.tasks import KINDS, task_type
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import json_of
from lit_compress.utils.progress import note
from lit_compress.utils.types import Config, Tokenizer

_BUFFERS = ("inv_freq", "position_ids")  # constants that older files hold, and that models now make themselves


def is_compressed(folder: Path) -> bool:
    """Return whether the model in ``folder`` has layers of this package."""
    return is_exported(folder) or bool(read_settings(folder / "structure.json"))


def refuse_compressed(what: str, folder: Path) -> None:
    """Refuse an export, whose tensors do not fit the class that the library would load them into."""
    if is_compressed(folder):
        raise UserError(f"{what} is compressed already; give the model it was made from")


def check_tensors(what: str, net: Model, info: dict[str, Any], new_head: bool) -> None:
    """Refuse a model if a tensor is missing, unexpected, of another shape, or not finite; name a new head.

    ``info`` is ``output_loading_info`` of ``from_pretrained``. With ``new_head`` a head that the file lacks, or has in
    another size, is drawn again; else it is an error.
    """
    missing, reshaped = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    drawn = [*missing, *(name for name, *_ in reshaped)]
    wrong = [name for name in missing if not (new_head and _in_head(net, name))]
    if wrong:
        raise UserError(f"{what} has no tensor '{wrong[0]}'{_more(wrong)}; give the folder of a whole model")
    for name, stored, needed in reshaped:
        if not (new_head and _in_head(net, name)):
            raise UserError(
                f"{what}: '{name}' has the shape {list(stored)} in the file and {list(needed)} by its configuration"
            )
    own = set() if new_head else {*dict(net.named_children())} - {net.base_model_prefix}  # adapters of a trained head
    skips = [n for n in info["unexpected_keys"] if _in_head(net, n) and n.split(".")[0] not in own]
    strange = [n for n in sorted({*info["unexpected_keys"]} - {*skips}) if not n.endswith(_BUFFERS)]
    if strange:
        raise UserError(
            f"{what} has a tensor '{strange[0]}'{_more(strange)} for which {type(net).__name__} has no place; "
            "give a model without adapters, quantization or layers of its own"
        )
    check_finite(what, net)
    if drawn:
        note(f"{what}: the head is new and not trained yet ({', '.join(sorted(drawn))})")


def _in_head(net: Model, name: str) -> bool:
    """Return whether a tensor is outside the blocks and embeddings: of the head, or of the pooler that feeds it."""
    prefix, parts = net.base_model_prefix, name.split(".")
    if gives_states(net):  # a file may have the head of another model
        return parts[0] not in dict(net.named_children()) or "pooler" in parts
    if not hasattr(net, prefix):  # T5 that writes
        return name.startswith("lm_head")
    return parts[0] != prefix or "pooler" in parts


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def check_finite(what: str, net: Model) -> None:
    """Refuse a model with infinite weights, or weights that are no numbers, and name the first."""
    for name, value in net.named_parameters():
        if value.is_floating_point() and not all_finite(value):
            raise UserError(f"{what}: '{name}' has values that are not finite; its training diverged, or it is broken")


def check_tokenizer(what: str, tokenizer: Tokenizer, config: Config) -> None:
    """Refuse a tokenizer in Python, one without words, or one with more tokens than the model has embeddings."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{what} has a tokenizer in Python ({type(tokenizer).__name__}), which is not supported; give a model with "
            "a tokenizer.json"
        )
    vocabulary = tokenizer.get_vocab()
    if not any(any(map(str.isalnum, token)) for token in vocabulary.keys() - set(tokenizer.all_special_tokens)):
        raise UserError(f"{what} has no tokenizer; save it there with tokenizer.save_pretrained")
    rows, largest = getattr(config, "vocab_size", None), max(vocabulary.values())
    if rows is not None and largest >= rows:
        raise UserError(
            f"{what}: its tokenizer has ids up to {largest}, its embeddings {rows} rows; give the tokenizer that the "
            "model was trained with"
        )


def check_head(what: str, config: Config, task: Task) -> None:
    """Refuse a trained head that answers another question than the task's: another type, or other labels.

    Labels are compared without regard to case and punctuation. Where they have no names (``LABEL_0``, ``0``), their
    number counts, and a note says in which order they are taken.
    """
    kind = task_type(task)
    architecture = (config.architectures or [""])[0]
    other = next((k for k in KINDS.values() if architecture.endswith(k.suffix)), kind)
    if other.suffix != kind.suffix and not other.pools:  # which have no head
        raise UserError(f"{what} is for {other.name}, task '{task.name}' is {kind.name}")
    if "num_labels" not in kind.head(task):
        return
    own = "leave --data.custom.kind out: custom" if task.name == "custom" else "--data.task custom"
    if kind.problem and config.problem_type not in (None, kind.problem):
        problem = f"{what} has problem_type {config.problem_type} in its config.json"
        raise UserError(f"{problem}, task '{task.name}' is {kind.name}; {own} takes the head's kind")
    if config.num_labels != task.num_labels:  # e.g. a reranker of two classes
        mend = "give a model fine-tuned on this task" if task.labels else f"{own} takes the head's kind"
        raise UserError(f"{what} has {config.num_labels} labels, {task.name} has {task.num_labels}; {mend}")
    names = [str(name) for _, name in sorted((config.id2label or {}).items())]
    if not task.labels or _plain(names) == _plain(task.labels):
        return
    given, wanted = ", ".join(names), ", ".join(task.labels)
    if sorted(_plain(names)) == sorted(_plain(task.labels)):
        own = "leave --data.custom.labels out, and it gives the order"
        mend = f"; {own if task.name == 'custom' else 'give a model with the order of the task'}"
        raise UserError(f"{what} has its labels in another order ({given}) than {task.name} ({wanted}){mend}")
    if all(re.fullmatch(rf"(LABEL_)?{i}", name) for i, name in enumerate(names)):
        note(f"{what}: its labels have no names; they are taken as {wanted}, in this order")
    else:
        raise UserError(
            f"{what} has the labels {given}; {task.name} has {wanted}; give a model fine-tuned on this task, or name "
            "them alike in id2label of its config.json"
        )


def trained_head(folder: Path) -> tuple[str | None, list[str] | None]:
    """Return the type of task of a model's head, and the names of its classes; None where its files do not say so."""
    try:
        config = json_of(folder / "config.json")
        architecture, names = str((config.get("architectures") or [""])[0]), config.get("id2label") or {}
        names = [str(names[key]) for key in sorted(names, key=int)]
    except (OSError, ValueError, TypeError, AttributeError, LookupError):  # loading it says what is wrong
        return None, None
    problem = config.get("problem_type") or ("regression" if len(names) == 1 else None)
    kind = next((k for k in KINDS.values() if architecture.endswith(k.suffix)), None)
    if kind and kind.problem and problem:
        kind = next((k for k in KINDS.values() if k.problem == problem), KINDS["regression"])
    unnamed = len(names) < 2 or len({*names}) < len(names) or all(name == f"LABEL_{i}" for i, name in enumerate(names))
    return kind.name if kind else None, None if unnamed else names


def is_finetuned(what: str, folder: Path, task: Task) -> bool:
    """Return whether a model's head was trained on the classes of ``task``: same type, same names, in the same order.

    Heads whose labels have no names, or whose tasks have no classes, could be anybody's: they do not count. Of a head
    with the classes in another order it warns: its answers would be exchanged.
    """
    kind, found = trained_head(folder)
    names = found or []
    given, wanted = _plain(names), _plain(task.labels)
    if not wanted or kind != task.kind or sorted(given) != sorted(wanted):
        return False
    if given != wanted:
        own = task.name == "custom"
        rank_zero_warn(
            f"{what} has its labels in another order ({', '.join(names)}) than the data ({', '.join(task.labels)}): "
            f"its head is trained again, from exchanged answers{'; as --model.teacher too it gives the order' * own}"
        )
    return given == wanted


def _plain(names: list[str] | tuple[str, ...]) -> list[str]:
    """Return names in small letters without punctuation; less is left out where two names would be alike."""
    small = [name.casefold() for name in names]
    plain = [re.sub(r"[\W_]+", "", name) or name for name in small]
    return next(found for found in (plain, small, list(names)) if len({*found}) == len({*names}))
