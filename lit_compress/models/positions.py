"""How many tokens a model can read: some families number positions from behind the padding token and so have fewer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Families whose first token has the position pad_token_id + 1. OPT, BART and YOSO have rows of their own in front, and
# rotary and relative positions have no table: of theirs all are left.
BEHIND_PADDING = {
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
_PADS = {"mpnet": 1}  # whatever its pad_token_id


def usable_positions(config: PreTrainedConfig) -> int | None:
    """Return the largest number of tokens of a text that models of ``config`` can read; None if nothing limits it."""
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "max_encoder_position_embeddings", None)
    if most is None or config.model_type not in BEHIND_PADDING:
        return most
    return most - _PADS.get(config.model_type, config.pad_token_id or 0) - 1
