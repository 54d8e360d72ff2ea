"""The kinds of tasks: one file each, one table. What differs between them stands in their files and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_compress.kinds.base import TaskKind, inputs_of
from lit_compress.kinds.classification import Classification
from lit_compress.kinds.language_modelling import LanguageModelling
from lit_compress.kinds.regression import Regression
from lit_compress.kinds.span_qa import SpanQA
from lit_compress.kinds.summarization import Summarization
from lit_compress.kinds.tagging import Tagging

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lit_compress.tasks import Task

__all__ = ["KINDS", "TaskKind", "inputs_of", "kind_of", "kind_of_net"]

_ALL = (Classification(), Regression(), Tagging(), SpanQA(), Summarization(), LanguageModelling())
KINDS: dict[str, TaskKind] = {kind.name: kind for kind in _ALL}


def kind_of(task: Task) -> TaskKind:
    """Return what is particular to tasks like ``task``."""
    return KINDS[task.kind]


def kind_of_net(config: PreTrainedConfig) -> TaskKind:
    """Return the kind of the net that ``config`` describes, by its class; without one, a classification."""
    (architecture,) = (config.architectures or [""])[:1]
    return next((kind for kind in KINDS.values() if architecture.endswith(kind.suffix)), KINDS["classification"])
