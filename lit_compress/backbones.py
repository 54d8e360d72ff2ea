"""What a backbone name means: a folder, a hub name, or ``embedded`` (built here, no network).

Data needs the tokenizer, methods need the net; this is the one place where both names are resolved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress import embedded
from lit_compress.errors import UserError
from lit_compress.kinds import KINDS, TaskKind, kind_of, kind_of_net
from lit_compress.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "embedded"


def resolve(backbone: str, task: Task) -> str:
    """Return the folder or hub name to load; ``embedded`` is built in the cache first.

    Raises:
        UserError: a path that is not a folder with a ``config.json``.
    """
    if backbone == EMBEDDED:
        return str(embedded.build_backbone(task))
    path = Path(backbone).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(
                f"model.backbone: '{backbone}' holds no config.json; give a folder written by save_pretrained"
            )
        return str(path)
    if path.is_absolute() or backbone.startswith((".", "~")) or backbone.count("/") > 1:
        raise UserError(f"model.backbone: no folder '{backbone}'; give a folder with a config.json, or a hub name")
    return backbone


@contextmanager
def _one_line(what: str, name: str) -> Iterator[None]:
    """Turn the loaders' many errors into one line that says what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:160]
        if os.path.isdir(name):
            raise UserError(f"model.backbone: cannot load the {what} from '{name}': {reason}") from error
        raise UserError(
            f"model.backbone: cannot load the {what} '{name}' from the hub ({type(error).__name__}: {reason}); "
            "without network give the folder of a downloaded model"
        ) from error


def load_tokenizer(backbone: str, task: Task) -> PreTrainedTokenizerBase:
    """Load the fast tokenizer of ``backbone``.

    Raises:
        UserError: the folder is missing or broken, or the hub cannot be reached.
    """
    from transformers import AutoTokenizer

    name = resolve(backbone, task)
    with _one_line("tokenizer", name):
        return AutoTokenizer.from_pretrained(name)


def load_config(backbone: str, task: Task) -> PreTrainedConfig:
    """Load the configuration of ``backbone`` with the head of ``task``: label names, problem type, class of the net.

    Raises:
        UserError: as :func:`load_tokenizer`; or the family has no such head.
    """
    from transformers import AutoConfig

    name, kind = resolve(backbone, task), kind_of(task)
    with _one_line("configuration", name):
        config = AutoConfig.from_pretrained(name, **kind.head(task))
    classes = _auto_class(kind)._model_mapping
    if type(config) not in classes:
        raise UserError(
            f"model.backbone: '{backbone}' is of family {config.model_type}, which has no head for {kind.name}; "
            f"task '{task.name}' needs another"
        )
    config.architectures = [classes[type(config)].__name__]
    return config


def _auto_class(kind: TaskKind) -> Any:
    """Return the class of transformers that builds nets of ``kind``."""
    import transformers

    return getattr(transformers, kind.auto_class)


def load_net(backbone: str, task: Task) -> PreTrainedModel:
    """Load ``backbone`` with the head of ``task`` in float32, whatever dtype it is stored in.

    A head that the checkpoint lacks, or that has another size, is drawn anew.

    Raises:
        UserError: as :func:`load_tokenizer`.
    """
    import torch

    name = resolve(backbone, task)
    config = load_config(backbone, task)
    with _one_line("model", name):
        net = _auto_class(kind_of(task)).from_pretrained(
            name, config=config, dtype=torch.float32, ignore_mismatched_sizes=True
        )
    kind_of(task).configure(net, task)
    return net


def load_finetuned(name: str, task: Task) -> PreTrainedModel:
    """Load a net that was fine-tuned on ``task``, with its trained head, in float32.

    Raises:
        UserError: as :func:`load_tokenizer`; or its head is missing or does not fit the task.
    """
    import torch
    from transformers import AutoConfig

    folder, kind = resolve(name, task), kind_of(task)
    with _one_line("teacher", name):
        architecture = (AutoConfig.from_pretrained(folder).architectures or [""])[0]
        other = next((k for k in KINDS.values() if architecture.endswith(k.suffix)), kind)
        if other.suffix != kind.suffix:
            raise UserError(f"model.teacher: '{name}' is for {other.name}, task '{task.name}' is {kind.name}")
        net, info = _auto_class(kind).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])[0]
        raise UserError(f"model.teacher: '{name}' is not fine-tuned, it has no '{missing}'; leave it out to train one")
    if "num_labels" in kind.head(task) and net.config.num_labels != task.num_labels:
        raise UserError(
            f"model.teacher: '{name}' has {net.config.num_labels} labels, {task.name} has {task.num_labels}; "
            "give a model fine-tuned on this task"
        )
    kind.configure(net, task)
    return net.eval()


def empty_net(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the net of ``config`` with random float32 weights, to be filled from a checkpoint."""
    import torch

    return _auto_class(kind_of_net(config)).from_config(config, dtype=torch.float32)
