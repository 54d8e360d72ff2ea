"""What a rank keeps, and gives to the collectives of torch.distributed, in every step of a stage."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_compress.models.sites import blocks


def local_bytes(value: Any) -> int:
    """Return the bytes of a tensor on this rank."""
    if not isinstance(value, torch.Tensor):
        return 0
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.numel() * value.element_size()


class Counted(TorchDispatchMode):
    """Sum the bytes of the tensors that are handed to collectives, those of DDP's C++ and of FSDP2 among them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call, and make it."""
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__.partition(".")[0].strip("_")
            if not any(word in name for word in ("wait", "barrier", "wrap")):
                # a gather has its output among its arguments: the larger side is what all ranks have together
                groups = [sum(map(local_bytes, tree_leaves(arg))) for arg in args]
                self.bytes[name] += max(groups, default=0)
        return func(*args, **(kwargs or {}))


class Traffic(Callback):
    """Note bytes per step and bytes kept of every stage, in ``traffic<rank>.json`` of its folder."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        self.mode, self.steps = Counted(), list[dict[str, int]]()
        self.mode.__enter__()

    def on_train_batch_start(self, *_: Any) -> None:
        """Forget what was between two steps: validation, checkpoints."""
        self.mode.bytes.clear()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note the step."""
        self.steps.append(dict(self.mode.bytes))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was found."""
        self.mode.__exit__(None, None, None)
        net: Any = pl_module.net
        parameters = dict(net.named_parameters())
        own = {id(value) for value in (*parameters.values(), *net.buffers())}
        rest = [v for v in (*pl_module.parameters(), *pl_module.buffers()) if id(v) not in own]
        names = sorted({name for step in self.steps for name in step})
        found = {
            "steps": len(self.steps),
            "sent": {name: median(step.get(name, 0) for step in self.steps) for name in names},
            "most": max(sum(step.values()) for step in self.steps),
            "parameters": sum(value.numel() for value in parameters.values()),
            "blocks": sum(value.numel() for *_, block in blocks(net) for value in block.parameters()),
            "trained": sum(v.numel() for v in parameters.values() if v.requires_grad),
            "kept": {
                "parameters": sum(map(local_bytes, parameters.values())),
                "moments": sum(
                    local_bytes(v) for o in trainer.optimizers for s in o.state.values() for v in s.values()
                ),
                "of the method": sum(map(local_bytes, rest)),
                "teacher": sum(local_bytes(v) for teacher in vars(pl_module)["_teacher"] for v in teacher.parameters()),
            },
        }
        file = Path(trainer.default_root_dir) / f"traffic{trainer.global_rank}.json"
        file.write_text(json.dumps(found))
