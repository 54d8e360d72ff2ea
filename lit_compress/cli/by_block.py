"""``factorize --by_block``: for models larger than memory; one block at a time is loaded.

Every phase continues from its files: the dev metric of the dense model; the moments and the factors of every block
(calibration/by_block.py); ranks; the shards of the export; its dev metric.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lit_compress.calibration.by_block import BlockStatistics, Sweeps, calibration_parts, check_disk
from lit_compress.calibration.sliced_by_block import BlockAxes
from lit_compress.calibration.statistics import TOKENS, Statistic
from lit_compress.cli.one_shot import one_shot_stage
from lit_compress.evaluation.divergence import ROWS, divergence
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.export.by_block import check_choices_by_block, write_parts, write_report, write_shards
from lit_compress.export.card import license_of
from lit_compress.export.choices import Choices
from lit_compress.methods import Method
from lit_compress.models.architectures import get_architecture
from lit_compress.models.backbones import empty_net, finetuned_config
from lit_compress.models.block_net import BlockNet, Ending, check_by_block
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.shapes import without_values
from lit_compress.models.shards import LazyTensors, net_bytes
from lit_compress.models.sites import blocks, find_sites
from lit_compress.models.storage import config_of
from lit_compress.models.surgery import describe
from lit_compress.run.guard import check_memory
from lit_compress.stages.by_block import MeasuredBlocks
from lit_compress.stages.calibration import Axes
from lit_compress.stages.compression import Chosen, CompressedStage, Compression
from lit_compress.stages.distil import NO_RECOVERY, Recovery
from lit_compress.stages.refinement import OF_TRAINING, Refinement, check_refinement
from lit_compress.tasks import task_type
from lit_compress.utils.cache import short_hash
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_folder, read_json, remove, write_json
from lit_compress.utils.memory import return_freed_memory

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from lit_compress.calibration.uses import Batch
    from lit_compress.data.datamodule import DataModule
    from lit_compress.models.budget import Budget

Precision = Literal["float32", "bfloat16"]  # of the states on disk
TRAINED = ("refined-dense", "refined")  # folders of the states of a refinement


class _Work:
    """The folder of the files between the phases, and the seconds that every phase took.

    Args:
        folder: made if it is not there.
        settings: of the work; a folder with others is refused.
    """

    def __init__(self, folder: Path, settings: str) -> None:
        self.folder, self.seconds = folder, dict[str, float]()
        path = folder / "settings.json"
        begun = any(other.is_file() and other != path for other in folder.rglob("*"))
        if begun and path.is_file() and read_json("--by_block", path, dict).get("hash") != settings:
            raise UserError(
                f"--by_block: '{folder}' holds unfinished work of other settings or data; give the same, or remove it"
            )
        if begun and not path.is_file():
            raise UserError(f"--by_block: '{folder}' holds something else; give another OUT")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {"hash": settings})
        self._since = time.perf_counter()

    def ended(self, phase: str) -> None:
        """Take the time of a phase that has ended."""
        now = time.perf_counter()
        self.seconds[phase], self._since = round(now - self._since, 2), now


def check_budget(budget: Budget | None) -> None:
    """Refuse a budget that no shapes say.

    Raises:
        UserError: it is of milliseconds.
    """
    if budget is not None and budget.kind == "speedup":
        raise UserError(f"--by_block: budget '{budget.asked}' is measured on the whole model; nearest: flops=0.5")


def factorize_by_block(
    out: Path,
    method: Method,
    data: DataModule,
    config: dict[str, Any],
    choices: Choices,
    precision: Precision,
    recovery: Recovery = NO_RECOVERY,
) -> dict[str, Any]:
    """Factorize the method's backbone with one block in memory, export it to ``out`` and return the report.

    Args:
        out: folder to write; ``out``.by_block next to it has the files of the work until it is finished.
        method: as :func:`~lit_compress.cli.one_shot.factorize_model`.
        data: training data for a weighting that needs them, validation data for the report.
        config: of the command.
        choices: for the export.
        precision: of the states between blocks, on disk.
        recovery: how the compressed blocks are trained.

    Raises:
        UserError: the model, the data, an option or the disk is not made for this.
    """
    return_freed_memory()
    check_choices_by_block(choices)
    if recovery.distil is not None:
        raise UserError(f"--by_block: --distil {recovery.distil} needs the whole model; nearest: --refine 100")
    dense, form = _read_shapes(method, choices)
    if data.teacher == method.backbone:
        data.teacher = None  # its vectors come with its states
    data.eval_batch_size = max(1, min(data.eval_batch_size, TOKENS // data.max_length))
    stage = one_shot_stage(method)
    compression = _checked(stage, method, dense, data)
    if recovery.refine is not None:
        check_refinement(dense, stage.dense_states, type(method).__name__)
    walks = _Walks(out.with_name(f"{out.name}.by_block"), method, data, dense, compression, getattr(torch, precision))
    if recovery.refine is not None:
        walks.refine_by(recovery.refine, stage.texts(data))
    less = "--weighting none sums nothing" if walks.memory["statistics"] else "give a machine with more"
    check_memory("factorize --by_block", walks.bound(), lambda: less)
    work = _Work(walks.folder, walks.settings(config, precision))
    check_disk(work.folder, walks.disk_bytes())

    scores = walks.dense_metric()
    work.ended("dense metric")
    walks.measure()
    work.ended(compression.name)
    chosen, loss = compression.choose(dense, walks.measured)
    calibration = stage.record(data, loss)
    with atomic_folder(out) as temporary:
        form = walks.export(form, chosen, choices.dtype, temporary)
        work.ended("export")
        compressed = walks.compressed_metric(temporary, form, choices)
        if calibration:
            calibration["measured_loss"] = walks.divergence()
        work.ended("compressed metric")
        told = {"states": precision, "seconds": work.seconds, "memory": walks.memory | {"bound": walks.bound()}}
        more = {"calibration": calibration, "license": license_of(method.backbone), **compression.told(dense, chosen)}
        more |= {"refined": walks.refinement and walks.refinement.told()}
        report = write_report(
            temporary, dense, form, (scores, compressed), net_bytes(walks.source), type(method).__name__, data, config,
            choices, more | {"by_block": told}, (method.budget, method.density) if method.budget else None,
        )  # fmt: skip
    remove(work.folder)
    return report


class _Walks:
    """The walks over the blocks of one factorization: dense metric, measurements, export, metric of the export."""

    def __init__(
        self, folder: Path, method: Method, data: DataModule, dense: PreTrainedModel, compression: Compression,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.folder, self.data, self.dense, self.compression, self.dtype = folder, data, dense, compression, dtype
        self.source, self.task, self.kind = Path(method.backbone).expanduser(), method.task, task_type(method.task)
        asked = compression.calibration(dense, data)
        self.statistic = statistic = None if asked is None else asked.statistic
        labels, sites = (None, None) if statistic is None else (statistic.labels, statistic.sites)
        wanted = [site.name for site in find_sites(dense) if sites is None or site.name in sites]
        self.measured = MeasuredBlocks(folder, compression, dense, [name for *_, name, _ in blocks(dense)], wanted)
        tensors = LazyTensors(self.source, f"model: '{self.source}'")
        self.net = BlockNet(dense.config, tensors, unused=self.kind.unused, device=current_device())
        self.dev = [batch for loader in data.val_dataloader() for batch in loader]
        self.before = Sweeps(self.net, self.kind, self.dev, folder / "dense", dtype)
        parts = [] if asked is None else calibration_parts(self.kind, asked.batches, labels)
        self.sweeps = Sweeps(self.net, self.kind, parts, folder / "calibration", dtype)
        self.collector: BlockStatistics | BlockAxes | None = None
        if isinstance(statistic, Axes):
            centred = not get_architecture(dense).rms
            self.collector = BlockAxes(
                self.sweeps, residual_stream(dense), statistic.widths, centred, self.measured.axes
            )
        elif isinstance(statistic, Statistic):
            self.collector = BlockStatistics(self.sweeps, dense, statistic)
        sums = 0 if self.collector is None else self.collector.bytes()
        self.memory = {"outside": _bytes(self.net.net), "block": max(map(_bytes, self.net.blocks)), "statistics": sums}
        self.refinement: Refinement | None = None

    def refine_by(self, steps: int, texts: Iterable[Batch]) -> None:
        """Train every block for so many steps on ``texts`` before it is written."""
        parts = calibration_parts(self.kind, texts, None)
        dense, own = (Sweeps(self.net, self.kind, parts, self.folder / name, self.dtype) for name in TRAINED)
        self.refinement = Refinement(dense, own, steps)
        self.memory["training"] = OF_TRAINING * self.memory["block"]

    def settings(self, config: dict[str, Any], precision: Precision) -> str:
        """Return a hash of what the files of the work depend on."""
        files = [(path.name, path.stat()) for path in sorted(self.source.glob("*.safetensors"))]
        known = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
        steps = self.refinement and self.refinement.steps
        reads = self.statistic is not None or steps is not None
        return short_hash(config, known, precision, self.data.fingerprint() if reads else None, steps)

    def disk_bytes(self) -> int:
        """Return how many bytes the files of the work take at most: states, what is kept of blocks, and the export."""
        count, each = len(self.net), torch.empty(0, dtype=self.dtype).element_size()
        gradients = self.statistic is not None and self.statistic.labels is not None
        states = 4 * self.before.numbers() + (count + 2 if gradients else 2) * self.sweeps.numbers()
        export = sum(map(_bytes, (self.net.net, *self.net.blocks)))
        trained = 0 if self.refinement is None else self.refinement.disk_bytes()
        return each * states + trained + self.compression.bytes(self.dense) + export

    def bound(self) -> int:
        """Return the peak bytes without activations: outside the blocks, two blocks, a block's sums or its training."""
        more = max(self.memory["statistics"], self.memory.get("training", 0))
        return self.memory["outside"] + 2 * self.memory["block"] + more

    def dense_metric(self) -> dict[str, float]:
        """Evaluate the dense model; its vectors are the labels where the task wants them."""
        self.before.reach(len(self.net), keep=False, what="evaluate")
        if self.task.wants_vectors and self.data.teacher is None:
            self.data.label_by(Ending(self.net, self.before.last))
        return evaluate(Ending(self.net, self.before.last), self.data, sure=True)  # type: ignore[arg-type]

    def measure(self) -> None:
        """Measure every block that has no folder yet."""
        if self.collector is not None:
            self.collector.collect(self.measured.done, self.measured.write)
            return
        for i in (i for i in range(len(self.net)) if not self.measured.done(i)):
            with self.net.block(i) as block:
                self.measured.write(i, block, {})

    def export(self, form: PreTrainedModel, chosen: Chosen, dtype: str, out: Path) -> PreTrainedModel:
        """Write the compressed model to ``out`` and return ``form`` in its shapes; the dense model is released."""
        files, compression, measured = (dtype, self.folder, out), self.compression, self.measured

        def change(form: PreTrainedModel, number: int, values: bool) -> None:
            compression.apply(form, measured.chosen(number, chosen), measured if values else None)

        if compression.by_itself:
            form = write_shards(self.net, form, change, *files, self.refinement)
        else:
            form = write_parts(form, len(self.net), partial(compression.part, self.dense, measured, self.net), *files)
        del self.net, self.sweeps, self.collector
        return form

    def compressed_metric(self, out: Path, form: PreTrainedModel, choices: Choices) -> dict[str, float]:
        """Evaluate the export in ``out``, which is ``form`` without values."""
        own = BlockNet(config_of(out), LazyTensors(out, "export"), describe(form), device=current_device())
        if not choices.half and self.compression.by_itself:
            self.before.net = own  # they are alike outside the blocks
        self.after = Sweeps(own, self.kind, self.dev, self.folder / "compressed", self.dtype)
        self.after.reach(len(own), keep=False, what="evaluate")
        return evaluate(Ending(own, self.after.last), self.data, sure=True)  # type: ignore[arg-type]

    def divergence(self) -> float:
        """Return the divergence of the export's outputs from the dense model's."""
        drawn, dev = torch.tensor(self.data.sample(ROWS)), self.dev[: len(self.data.val_dataloader()[0])]
        masks = [torch.isin(batch["index"], drawn) for batch in dev]
        batches = [
            {name: column[own] for name, column in batch.items()}
            for batch, own in zip(dev, masks, strict=True) if own.any()
        ]  # fmt: skip

        def ending(sweeps: Sweeps) -> Ending:
            def last() -> Iterator[Tensor]:
                for states, own in zip(sweeps.last(), masks, strict=False):  # a row may have several texts
                    if own.any():
                        yield states.unflatten(0, (len(own), -1))[own].flatten(0, 1)

            return Ending(sweeps.net, last)

        return divergence(ending(self.after), ending(self.before), self.data, batches)  # type: ignore[arg-type]


def _checked(stage: CompressedStage, method: Method, dense: PreTrainedModel, data: DataModule) -> Compression:
    """Return what the method's stage does in one shot, after the checks; only shapes are read.

    Raises:
        UserError: it cannot go block by block.
    """
    compression = stage.compression(Path(method.backbone).expanduser())
    if compression is None:
        raise UserError("--by_block: at density 1 nothing is compressed; nearest: 0.9")
    compression.check_by_block(dense)
    stage.check_shapes(dense)
    data.reads_labels = stage.reads_labels(method.kind)
    return compression


def _read_shapes(method: Method, choices: Choices) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the model of the backbone without values, in float32, twice: one is to be changed.

    Raises:
        UserError: the backbone is no folder, or cannot go block by block.
    """
    from transformers import GenerationConfig

    folder = Path(method.backbone).expanduser()
    if not folder.is_dir():
        raise UserError(f"--by_block: '{folder}' is no folder; give the folder of a downloaded model")
    config = finetuned_config(method.backbone, method.task, "model")
    config.dtype = torch.float32
    nets = [without_values(lambda: empty_net(copy.deepcopy(config))) for _ in range(2)]
    for net in nets:
        if net.can_generate() and (folder / "generation_config.json").is_file():
            net.generation_config = GenerationConfig.from_pretrained(folder)
        task_type(method.task).configure(net, method.task)
    check_by_block(nets[0])
    return nets[0].eval(), nets[1].eval()


def _bytes(module: torch.nn.Module) -> int:
    """Return the bytes of the parameters of a module in float32."""
    return 4 * sum(value.numel() for value in module.parameters())
