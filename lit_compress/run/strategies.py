"""The strategy ``fsdp2`` for ``--trainer.strategy``, and accelerators that Lightning does not know."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry


class FSDP2Strategy(ModelParallelStrategy):
    """Shard parameters, gradients, optimizer state and scores over all processes, by ``fully_shard``.

    :meth:`lit_compress.methods.base.Method.configure_model` shards the modules. Checkpoints hold unsharded tensors:
    any number of processes can read them. A run continues with another number of processes if its steps keep their
    number of rows, see :mod:`lit_compress.run.changes`.
    """

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Use every process for data parallelism."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over all processes")


class OtherAccelerator(Accelerator):
    """PyTorch's accelerator where Lightning has no class for it, e.g. XPU or NPU: its current device."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """Return the number of devices."""
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return the device."""
        device = torch.accelerator.current_accelerator()
        assert device is not None
        return [torch.device(device.type, torch.accelerator.current_device_index())]

    @staticmethod
    def auto_device_count() -> int:
        """Return 1."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Return True: PyTorch has said so."""
        return True

    @staticmethod
    def name() -> str:
        """Return a name, which no option needs."""
        return "other"

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: it is the current device."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return no statistics."""
        return {}

    def teardown(self) -> None:
        """Free the memory that PyTorch caches for later tensors."""
        torch.accelerator.empty_cache()
