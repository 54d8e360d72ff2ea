"""Records of tasks, and types of tasks, which differ in columns, head, loss, metrics and answers.

Each type is one file, which has everything that differs from other types; rows are read in data/.
Begin with records.py, then base.py and classification.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_compress.tasks.base import TaskType, inputs_of
from lit_compress.tasks.classification import Classification
from lit_compress.tasks.embedding import Embedding
from lit_compress.tasks.language_modelling import LanguageModelling
from lit_compress.tasks.multi_label import MultiLabel
from lit_compress.tasks.regression import Regression
from lit_compress.tasks.reranking import Reranking
from lit_compress.tasks.span_qa import SpanQA
from lit_compress.tasks.summarization import Summarization
from lit_compress.tasks.tagging import Tagging

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig

    from lit_compress.tasks.records import Task

__all__ = ["KINDS", "TaskType", "inputs_of", "likely_kind", "task_type", "task_type_of_net"]

_ALL = (
    Classification(), Regression(), Tagging(), SpanQA(), Summarization(), LanguageModelling(), Embedding(), Reranking(),
    MultiLabel(),
)  # fmt: skip
KINDS: dict[str, TaskType] = {kind.name: kind for kind in _ALL}


def task_type(task: Task | TaskType | str) -> TaskType:
    """Return the type of a task; of a name of ``KINDS`` the usual one; a type itself as it is."""
    if isinstance(task, TaskType):
        return task
    return KINDS[task] if isinstance(task, str) else KINDS[task.kind].of(task)


def task_type_of_net(config: PreTrainedConfig) -> TaskType:
    """Return the type of task of the model that ``config`` describes, by its class; classification if it has none."""
    (architecture,) = (config.architectures or [""])[:1]
    return next((kind for kind in KINDS.values() if architecture.endswith(kind.suffix)), KINDS["classification"])


def likely_kind(config: PreTrainedConfig | None, rows: Dataset, label: str | None) -> str:
    """Return the name of the type of task of a column of ``rows``, None for none, by it and by the model's head."""
    feature, classes = rows.features[label] if label else None, KINDS["classification"]
    usual = classes if config is None else task_type_of_net(config)
    if usual.headless and feature is not None:
        usual = classes
    if usual is classes and (is_list(feature) or getattr(config, "problem_type", None) == MultiLabel.problem):
        return MultiLabel.name
    numbers = str(getattr(feature, "dtype", "")).startswith(("float", "double"))
    if numbers and config is not None and (config.architectures or [""])[0].endswith(classes.suffix):
        numbers = not {None, *range(config.num_labels or 0)}.issuperset(rows.unique(label))  # 1.0 is class 1
    head = config is not None and (config.num_labels == 1 or config.problem_type == "regression")
    return Regression.name if usual is classes and (head or numbers) else usual.name


def is_list(feature: Any) -> bool:
    """Return whether a column of a data set holds lists."""
    return hasattr(feature, "feature") or isinstance(feature, list)
