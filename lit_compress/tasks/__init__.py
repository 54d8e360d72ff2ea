"""Records of tasks, and types of tasks, which differ in columns, head, loss, metrics and answers.

Each type is one file, which has everything that differs from other types; rows are read in data/.
Begin with records.py, then base.py and classification.py.
"""

from __future__ import annotations

from lit_compress.tasks.base import TaskType, inputs_of
from lit_compress.tasks.classification import Classification
from lit_compress.tasks.embedding import Embedding
from lit_compress.tasks.language_modelling import LanguageModelling
from lit_compress.tasks.multi_label import MultiLabel
from lit_compress.tasks.records import Task
from lit_compress.tasks.regression import Regression
from lit_compress.tasks.reranking import Reranking
from lit_compress.tasks.span_qa import SpanQA
from lit_compress.tasks.summarization import Summarization
from lit_compress.tasks.tagging import Tagging
from lit_compress.utils.types import Config

__all__ = ["KINDS", "TaskType", "inputs_of", "task_type", "task_type_of_net"]

KINDS: dict[str, TaskType] = {
    kind.name: kind()
    for kind in (Classification, Regression, Tagging, SpanQA, Summarization, LanguageModelling, Embedding, Reranking,
                 MultiLabel)
}  # fmt: skip


def task_type(task: Task | TaskType | str) -> TaskType:
    """Return the type of a task; of a name of ``KINDS`` the usual one; a type itself as it is."""
    if isinstance(task, TaskType):
        return task
    return KINDS[task] if isinstance(task, str) else KINDS[task.kind].of(task)


def task_type_of_net(config: Config) -> TaskType:
    """Return the type of task of the model that ``config`` describes, by its class; classification if it has none."""
    (architecture,) = (config.architectures or [""])[:1]
    return next((kind for kind in KINDS.values() if architecture.endswith(kind.suffix)), KINDS["classification"])
