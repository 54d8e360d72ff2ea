"""``factorize --by_block``: a net larger than memory, of which one block at a time is there.

The phases, each of which goes on from its files where it was stopped: the dev metric of the dense net; the moments and
the factors of every block (calibration/by_block.py); ranks; the shards of the export; its dev metric.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lit_compress.calibration.by_block import BlockStatistics, Sweeps, calibration_parts, check_disk
from lit_compress.calibration.sliced_by_block import BlockAxes
from lit_compress.calibration.statistics import TOKENS, Statistic
from lit_compress.cli.one_shot import one_shot_stage
from lit_compress.evaluation.divergence import divergence
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.export.by_block import check_choices_by_block, write_parts, write_report, write_shards
from lit_compress.export.card import license_of
from lit_compress.export.choices import Choices
from lit_compress.methods import Method
from lit_compress.models.architectures import get_architecture
from lit_compress.models.backbones import empty_net, finetuned_config
from lit_compress.models.block_net import BlockNet, Ending, check_by_block
from lit_compress.models.shapes import without_values
from lit_compress.models.shards import LazyTensors, net_bytes
from lit_compress.models.sites import blocks, find_sites
from lit_compress.models.storage import config_of
from lit_compress.models.surgery import describe
from lit_compress.run.expected_memory import check_memory_by_block
from lit_compress.stages.by_block import MeasuredBlocks
from lit_compress.stages.calibration import Axes
from lit_compress.stages.compression import CompressedStage, Compression
from lit_compress.tasks import task_type
from lit_compress.utils.cache import short_hash
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_folder, read_json, remove, write_json
from lit_compress.utils.memory import return_freed_memory
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from lit_compress.data.datamodule import DataModule
    from lit_compress.models.budget import Budget

Precision = Literal["float32", "bfloat16"]  # of the states on disk


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
        raise UserError(f"--by_block: budget '{budget.asked}' is measured on the whole net; nearest: flops=0.5")


def factorize_by_block(
    out: Path,
    method: Method,
    data: DataModule,
    config: dict[str, Any],
    choices: Choices,
    precision: Precision,
) -> dict[str, Any]:
    """Factorize the method's backbone with one block in memory, export it to ``out`` and return the report.

    Args:
        out: folder to write; ``out``.by_block beside it has the files of the work until it is finished.
        method: as :func:`~lit_compress.cli.one_shot.factorize_model`.
        data: training data for a weighting that needs them, validation data for the report.
        config: of the command.
        choices: for the export.
        precision: of the states between blocks, on disk.

    Raises:
        UserError: the model, the data, an option or the disk is not made for this.
    """
    return_freed_memory()
    folder, task = Path(method.backbone).expanduser(), method.task
    check_choices_by_block(choices)
    if not folder.is_dir():
        raise UserError(f"--by_block: '{folder}' is no folder; give the folder of a downloaded model")
    kind, dtype, device = task_type(task), getattr(torch, precision), current_device()
    made = finetuned_config(method.backbone, task, "model")
    choices.say_dtype(made.dtype)
    made.dtype = torch.float32
    dense, form = (_shapes(made, folder, method) for _ in range(2))
    check_by_block(dense)
    if data.teacher == method.backbone:
        data.teacher = None  # its vectors come with its states
    data.eval_batch_size = max(1, min(data.eval_batch_size, TOKENS // data.max_length))
    own_folder = out.with_name(f"{out.name}.by_block")
    stage = one_shot_stage(method)
    compression = _checked(stage, method, dense, data)
    asked = compression.calibration(dense, data)
    statistic = None if asked is None else asked.statistic
    labels, sites = (None, None) if statistic is None else (statistic.labels, statistic.sites)
    wanted = [site.name for site in find_sites(dense) if sites is None or site.name in sites]
    measured = MeasuredBlocks(own_folder, compression, dense, [name for *_, name, _ in blocks(dense)], wanted)
    tensors = LazyTensors(folder, f"model: '{folder}'")
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.glob("*.safetensors"))
    net = BlockNet(made, tensors, unused=kind.unused, device=device)
    settings = short_hash(config, files, precision, None if statistic is None else data.fingerprint())
    dev = [batch for loader in data.val_dataloader() for batch in loader]
    before = Sweeps(net, kind, dev, own_folder / "dense", dtype)
    parts = [] if asked is None else calibration_parts(kind, asked.batches, labels)
    sweeps = Sweeps(net, kind, parts, own_folder / "calibration", dtype)
    collector = None if statistic is None else _collector(sweeps, dense, statistic, measured)
    sums = 0 if collector is None else collector.bytes()
    memory = {"outside": _bytes(net.net), "block": max(map(_bytes, net.blocks)), "statistics": sums}
    note(check_memory_by_block(**memory))
    work = _Work(own_folder, settings)
    check_disk(work.folder, _disk(before, sweeps, compression.bytes(dense), labels is not None))

    before.reach(len(net), keep=False, what="evaluate")
    if task.wants_vectors and data.teacher is None:
        data.label_by(Ending(net, before.last))
    scores = evaluate(Ending(net, before.last), data, sure=True)  # type: ignore[arg-type]
    work.ended("dense metric")
    if collector is not None:
        collector.collect(measured.done, measured.write)
    else:
        for i in (i for i in range(len(net)) if not measured.done(i)):
            with net.block(i) as block:
                measured.write(i, block, {})
    work.ended(compression.name)
    chosen, loss = compression.choose(dense, measured)
    calibration = stage.record(data, loss)

    def change(form: PreTrainedModel, number: int, values: bool) -> None:
        compression.apply(form, measured.chosen(number, chosen), measured if values else None)

    with atomic_folder(out) as temporary:
        ends = (choices.dtype, work.folder, temporary)
        if compression.by_itself:
            form = write_shards(net, form, change, *ends)
        else:
            form = write_parts(form, len(net), partial(compression.part, dense, measured, net), *ends)
        work.ended("export")
        del net, sweeps, collector
        own = BlockNet(
            config_of(temporary), LazyTensors(temporary, "export"), describe(form), dtype=None, device=device
        )
        if not choices.half and compression.by_itself:
            before.net = own  # they are alike outside the blocks
        after = Sweeps(own, kind, dev, work.folder / "compressed", dtype)
        after.reach(len(own), keep=False, what="evaluate")
        ending = Ending(own, after.last)
        compressed = evaluate(ending, data, sure=True)  # type: ignore[arg-type]
        if calibration:
            theirs = Ending(before.net, before.last)
            calibration["measured_loss"] = divergence(Ending(own, after.last), theirs, data)  # type: ignore[arg-type]
        work.ended("compressed metric")
        bound = memory["outside"] + 2 * memory["block"] + memory["statistics"]
        report = write_report(
            temporary, dense, form, (scores, compressed), net_bytes(folder), type(method).__name__, data, config,
            choices, {
                "calibration": calibration, "license": license_of(method.backbone), **compression.told(dense, chosen),
                "by_block": {"states": precision, "seconds": work.seconds, "memory": memory | {"bound": bound}},
            },
            (method.budget, method.density) if method.budget else None,
        )  # fmt: skip
    remove(work.folder)
    return report


def _checked(stage: CompressedStage, method: Method, dense: PreTrainedModel, data: DataModule) -> Compression:
    """Return what the method's stage does in one shot, after the checks; only shapes are read.

    Raises:
        UserError: it cannot go block by block.
    """
    if stage.keeps_all:
        raise UserError("--by_block: at density 1 nothing is compressed; nearest: 0.9")
    compression = stage.compression(Path(method.backbone).expanduser())
    compression.check_by_block(dense)
    stage.check_shapes(dense)
    data.reads_labels = stage.reads_labels(method.kind)
    return compression


def _collector(
    sweeps: Sweeps, dense: PreTrainedModel, statistic: Statistic | Axes, measured: MeasuredBlocks
) -> BlockStatistics | BlockAxes:
    """Return what goes over the blocks for a statistic."""
    if isinstance(statistic, Axes):
        return BlockAxes(sweeps, dense, statistic.widths, not get_architecture(dense).rms, measured.axes)
    return BlockStatistics(sweeps, dense, statistic)


def _shapes(config: PreTrainedConfig, folder: Path, method: Method) -> PreTrainedModel:
    """Return the net of a configuration without values, with what else belongs to it."""
    from transformers import GenerationConfig

    net = without_values(lambda: empty_net(copy.deepcopy(config)))
    if net.can_generate() and (folder / "generation_config.json").is_file():
        net.generation_config = GenerationConfig.from_pretrained(folder)
    task_type(method.task).configure(net, method.task)
    return net.eval()


def _bytes(module: torch.nn.Module) -> int:
    """Return the bytes of the parameters of a module in float32."""
    return 4 * sum(value.numel() for value in module.parameters())


def _disk(before: Sweeps, sweeps: Sweeps, kept: int, gradients: bool) -> int:
    """Return how many bytes the files of the work take at most: states, what is kept of blocks, and the export."""
    count, each = len(before.net), torch.empty(0, dtype=before.dtype).element_size()
    states = 4 * before.numbers() + (count + 2 if gradients else 2) * sweeps.numbers()
    return each * states + kept + sum(map(_bytes, (before.net.net, *before.net.blocks)))
