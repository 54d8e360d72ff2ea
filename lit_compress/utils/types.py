"""Names of the libraries' types for hints: the libraries, which take a second each, are not imported for these."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import datasets
    from torchmetrics import MetricCollection
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Config: TypeAlias = "PreTrainedConfig"
Dataset: TypeAlias = "datasets.Dataset"
Metrics: TypeAlias = "MetricCollection"
Model: TypeAlias = "PreTrainedModel"
Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
