"""The strategy ``fsdp2`` for ``--trainer.strategy``; ``ddp`` and others are Lightning's own."""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry


class FSDP2Strategy(ModelParallelStrategy):
    """Shard parameters, gradients, optimizer state and scores over all processes, by ``fully_shard``.

    :meth:`lit_compress.methods.base.Method.configure_model` shards the modules. Checkpoints hold unsharded tensors:
    any number of processes can read them. A stage goes on with as many steps as it was begun with, so another number
    of processes may begin the next stage, and seldom go on inside one.
    """

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Use every process for data parallelism."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over all processes")
