"""Lightning's Trainer from the user's arguments: invalid arguments are refused before anything is trained.

Also the strategy ``fsdp2`` for ``--trainer.strategy``, and accelerators that Lightning does not know.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_compress.methods.base import Method
from lit_compress.utils.devices import find_device
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.memory import trim

_MIXED: dict[str, Literal["16-mixed", "bf16-mixed"]] = {"16": "16-mixed", "bf16": "bf16-mixed"}
_CHANGING = (
    BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder, StochasticWeightAveraging, WeightAveraging,
)  # fmt: skip
_HALF = {"16-true": "16-mixed", "bf16-true": "bf16-mixed", "transformer-engine-float16": "16-mixed"}


class FSDP2Strategy(ModelParallelStrategy):
    """Shard parameters, gradients, optimizer state and scores over all processes, in ``Method.configure_model``.

    Checkpoints hold unsharded tensors: any number of processes can read them.
    """

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Use every process for data parallelism."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over all processes")


class OtherAccelerator(CPUAccelerator):
    """PyTorch's accelerator where Lightning has no class for it, e.g. XPU or NPU: one device, as of CPUs."""

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: it is the current device."""

    def teardown(self) -> None:
        """Free the memory that PyTorch caches for later tensors."""
        torch.accelerator.empty_cache()


class PlainFiles(TorchCheckpointIO):
    """Write checkpoints where they belong, to the disk; Lightning's own go through memory and a temporary folder."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the checkpoint; the file is incomplete if that fails."""
        torch.save(checkpoint, path)
        with open(path, "rb") as file:  # a crash of the machine after the rename leaves a whole one
            os.fsync(file.fileno())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint, without running code from it; one with wrong checksums is refused."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not look at the checksums of what it maps
            if (broken := archive.testzip()) is not None:
                raise ValueError(broken)
        return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        raise UserError(
            f"ckpt_path: '{path}' is not a readable checkpoint ({type(error).__name__}); "
            "remove it to start its stage again"
        ) from error


def make_trainer(**arguments: Any) -> Trainer:
    """Build a Trainer that writes checkpoints as :class:`PlainFiles` does, unless a plugin writes them.

    Its batch is an optimizer step, whatever ``accumulate_grad_batches``: the method makes micro-batches of it. Refuses
    arguments that Lightning does not accept on this machine.
    """
    given = arguments.get("plugins")
    plugins = list(given) if isinstance(given, list | tuple) else [given] if given is not None else []
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(PlainFiles())
    if isinstance(callbacks := arguments.get("callbacks"), list):  # to which Lightning adds its own, e.g. a bar
        arguments["callbacks"] = [*callbacks]
    try:
        arguments = arguments | {"plugins": plugins}
        trainer = Trainer(**arguments | _on_accelerator(arguments))
    except (TypeError, ValueError, MisconfigurationException) as error:
        if "invalid strategy name" in str(error):
            hint = nearest(arguments["strategy"], ["auto", *StrategyRegistry.available_strategies()])
            raise UserError(f"trainer.strategy: unknown strategy '{arguments['strategy']}'; {hint}") from error
        if "ModelCheckpoint" in str(error):
            text = "trainer.callbacks: ModelCheckpoint: a stage keeps checkpoints of its own; leave it out"
            raise UserError(text) from error
        named = next((name for name in arguments if f"`{name}`" in str(error)), None)
        option = f"trainer.{named}: '{arguments[named]}'" if named else "trainer"
        raise UserError(f"{option}: {error}") from error
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _CHANGING):
            name = type(callback).__name__
            raise UserError(
                f"trainer.callbacks: {name}: a stage sets its batches, steps and weights itself; leave it out"
            )
    trainer.accumulate_grad_batches = 1
    return trainer


def _on_accelerator(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for one device of several, or for an accelerator that Lightning does not know.

    Nothing for CPU, CUDA and MPS without a number.
    """
    name = arguments.get("accelerator") or "auto"
    if not isinstance(name, str):
        return {}
    device = find_device(name)
    known = device.type in ("cpu", "cuda", "mps")
    if known and device.index is None:
        return {}
    if (arguments.get("devices") or "auto") not in ("auto", 1, "1", -1, "-1"):
        raise UserError(f"trainer.devices: {arguments['devices']} of '{name}' cannot be used; valid: 1")
    if known:
        return {"accelerator": device.type, "devices": [device.index] if device.type == "cuda" else 1}
    if (arguments.get("strategy") or "auto") != "auto":
        raise UserError(f"trainer.strategy: '{arguments['strategy']}' does not work on '{device.type}'; valid: auto")
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    strategy = SingleDeviceStrategy(device=device, accelerator=OtherAccelerator())
    placed = {"accelerator": "auto", "devices": "auto", "strategy": strategy}
    precision = _MIXED.get(str(arguments.get("precision")).removesuffix("-mixed"))
    if precision is None:
        return placed
    plugins = [*arguments["plugins"], MixedPrecision(precision, device.type)]  # Lightning's own is for CUDA
    return placed | {"precision": None, "plugins": plugins}


def forget(trainer: Trainer, method: Method) -> None:
    """Free the memory that a finished fit no longer needs: gradients and moments."""
    for optimizer in trainer.optimizers:
        optimizer.state.clear()
        optimizer.param_groups.clear()
    method.zero_grad()
    trim()


def bare_trainer(arguments: Mapping[str, Any]) -> Trainer:
    """Return a Trainer that logs and writes nothing, to ask for its devices and processes."""
    return make_trainer(**{**arguments, "logger": False, "enable_checkpointing": False})


def processes(arguments: Mapping[str, Any]) -> int:
    """Return the number of processes that a Trainer with these arguments has."""
    made = bare_trainer(arguments)
    return made.num_devices * made.num_nodes


def check_trainer(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments by which a stage has no steps, epochs without validation, or weights of 16 or 64 bits."""
    if (precision := str(arguments.get("precision"))) in _HALF:
        raise UserError(
            f"trainer.precision: '{precision}' keeps the weights themselves in 16 bits, which is too coarse; "
            f"nearest valid {_HALF[precision]}"
        )
    if precision in ("64", "64-true"):
        raise UserError(f"trainer.precision: '{precision}': scores and gates are in 32 bits; nearest valid 32-true")
    if (clip := arguments.get("gradient_clip_val")) is not None and clip < 0:
        raise UserError(f"trainer.gradient_clip_val: {clip} turns the gradients around; nearest valid 0, no clipping")
    if (parts := arguments.get("accumulate_grad_batches")) is not None and parts < 1:
        raise UserError(f"trainer.accumulate_grad_batches: {parts} is below 1, the smallest valid value")
    for name in ("limit_train_batches", "limit_val_batches", "max_steps", "val_check_interval"):
        value = arguments.get(name)
        if value == 0:
            raise UserError(f"trainer.{name}: 0 leaves nothing to do; nearest valid 1, or leave it out")
        if isinstance(value, int) and value >= 2**31:
            raise UserError(f"trainer.{name}: {value} is above {2**31 - 1}, the largest valid value; or leave it out")
    if (every := arguments.get("check_val_every_n_epoch")) not in (None, 1):
        raise UserError(f"trainer.check_val_every_n_epoch: {every}: every epoch is validated; nearest valid 1")
