"""A callback that counts the matrix products of training by the dtype that they were computed in."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.utils._python_dispatch import TorchDispatchMode

FILE = "matmuls.json"
PRODUCTS = ("mm", "addmm")  # of Linears; PyTorch's plain attention multiplies in float32 also under autocast


class _Products(TorchDispatchMode):
    """Counts matrix products by the dtype of their result while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS:
            self.counts[str(result.dtype).removeprefix("torch.")] += 1
        return result


class Matmuls(Callback):
    """Write {dtype: products} of the steps of a stage to its folder, as FILE."""

    def on_train_start(self, *_: Any) -> None:
        """Begin again: every stage has its own fit."""
        self._products = _Products()

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin to count."""
        self._products.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        """Leave out the validation."""
        self._products.__exit__(None, None, None)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Write the counts."""
        Path(trainer.default_root_dir, FILE).write_text(json.dumps(self._products.counts))
