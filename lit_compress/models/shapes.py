"""Nets without values, for what only needs names and shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def without_values(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return the net that ``build`` makes, with weights that have shapes but neither values nor memory.

    Their random initialization is left out: on the device ``meta`` it has no effect, but takes most of the time.
    """
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        net = build()
    net.tie_weights()  # which the initialization does
    return net
