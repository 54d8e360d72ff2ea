"""A stage of a method, fitted in this process on tiny data."""

import pytest
from lightning.pytorch import Callback, Trainer

from lit_compress.data.datamodule import DataModule
from lit_compress.models.storage import load_net, save_net

QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
    "enable_model_summary": False, "use_distributed_sampler": False, "num_sanity_val_steps": 0, "limit_val_batches": 0,
}  # fmt: skip


class EveryStep(Callback):
    """Call a function with (trainer, method) after every optimizer step."""

    def __init__(self, look):
        self.look = look
        self.seen = 0

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step > self.seen:
            self.seen = trainer.global_step
            self.look(trainer, pl_module)


@pytest.fixture
def dense(tmp_path, tiny_backbone):
    """The folder of a dense net to start from."""
    from lit_compress.models.backbones import load_net
    from lit_compress.tasks.records import get_task

    folder = tmp_path / "dense"
    folder.mkdir()
    save_net(load_net(str(tiny_backbone), get_task("sst2")), folder)
    return folder


@pytest.fixture
def fit(tiny_backbone, tiny_data, tmp_path):
    """Fit one stage: fit(method, name, previous, look=None, **trainer arguments) -> method."""

    def run(method, name, previous, look=None, teacher=None, batch_size=8, accumulate=1, callbacks=(), **arguments):
        stage = next(s for s in method.stages() if s.name == name)
        method.prepare(stage, 7, previous, teacher and (lambda: load_net(teacher)))
        data = DataModule("sst2", str(tiny_backbone), str(tiny_data), batch_size=batch_size, seed=7)
        data.accumulate = accumulate
        own = {"max_epochs": stage.settings.epochs, "log_every_n_steps": 1, "default_root_dir": tmp_path}
        looks = [*callbacks, *([EveryStep(look)] if look else [])]
        Trainer(**QUIET | own | arguments, callbacks=looks).fit(method, data)
        return method

    return run
