"""Tiny random nets and batches for the tests."""

from __future__ import annotations

import torch

from lit_compress.tasks import get_task

WORDS = "a film of great bad warm dull charm wit the plot is so not very fine poor story cast and but".split()  # noqa: SIM905

TINY = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "roberta": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
}


def make_net(family: str = "bert", task: str = "sst2", seed: int = 0, dropout: float | None = None):
    """Build a tiny random net of a family with the head of a task."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        family,
        vocab_size=100,
        max_position_embeddings=64,
        num_labels=get_task(task).num_labels,
        **TINY[family],
    )
    if dropout is not None:
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"):
            if hasattr(config, name):
                setattr(config, name, dropout)
        config.seq_classif_dropout = dropout
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(config)


def make_batch(size: int = 4, length: int = 9, seed: int = 1) -> dict[str, torch.Tensor]:
    """Build a batch with padding in its second row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 100, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.randint(0, 2, (size,), generator=generator),
        "index": torch.arange(size),
    }
