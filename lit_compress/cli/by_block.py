"""``factorize --by_block``: for models larger than memory; one block at a time is loaded.

Every phase continues with the block whose files are missing: the dev metric of the dense model; the measurements of
every block (calibration/walk.py); ranks; the files of the export, one per block; its dev metric.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_compress.calibration.statistics import TOKENS, Statistic
from lit_compress.calibration.walk import BlockStatistics, Walk, calibration_parts
from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.export.choices import Choices
from lit_compress.export.copies import export_folder
from lit_compress.export.folder import describe_shards
from lit_compress.export.fuse import in_dtype
from lit_compress.export.modelling import hand_over, write_as
from lit_compress.methods import Method
from lit_compress.models.backbones import empty_net, load_config
from lit_compress.models.block_net import BlockNet, Ending, check_by_block, empty
from lit_compress.models.files import LazyTensors, StoredTensors, stamps, write_index, write_shard
from lit_compress.models.outline import ordinary_form
from lit_compress.models.sites import Model, find_sites
from lit_compress.models.storage import config_of, save_form
from lit_compress.models.surgery import describe, replace, without_values
from lit_compress.run.distilling import Recovery
from lit_compress.run.finish import one_shot
from lit_compress.run.folder import begin_work, end_work
from lit_compress.run.guard import bytes_of, check_memory
from lit_compress.run.job import Job
from lit_compress.stages.compression import CompressedStage, Plan
from lit_compress.stages.refinement import OF_TRAINING, Refinement, check_refinement
from lit_compress.tasks import task_type
from lit_compress.utils.cache import short_hash
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_file, atomic_folder
from lit_compress.utils.memory import return_freed_memory
from lit_compress.utils.progress import track


def factorize_by_block(
    out: Path, job: Job, stage: CompressedStage, config: dict[str, Any], recovery: Recovery
) -> dict[str, Any]:
    """Factorize the method's backbone with one block in memory, export it to ``out`` and return the report.

    Args:
        out: folder to write; ``out``.by_block next to it has the files of the work until it is finished.
        job, stage: the method's stage compresses in one shot; the report is on the job's validation data.
        config, recovery: of the command, and how the compressed blocks are trained.

    Raises:
        UserError: the model, the data or an option is not made for this.
    """
    return_freed_memory()
    method, data, choices = job.method, job.data, job.choices
    dense, compression = _read_shapes(method), stage.compression
    if data.teacher == method.backbone:
        data.teacher = None  # its vectors come with its states
    data.eval_batch_size = max(1, min(data.eval_batch_size, TOKENS // data.max_length))
    if compression.keeps_all:
        raise UserError("--by_block: at density 1 nothing is compressed; nearest: 0.9")
    if not compression.by_block:
        name = type(method).__name__
        raise UserError(
            f"--by_block: {name} needs the whole model in memory; leave the option out, or give --method LLMPruner"
        )
    compression.check(dense)
    data.reads_labels = compression.reads_labels(method.kind)
    if recovery.refine is not None:
        check_refinement(dense, compression.dense_states, type(method).__name__)
    work = _Work(out.with_name(f"{out.name}.by_block"), method, data, dense, stage, recovery.refine)
    less = "--weighting none sums nothing" if work.memory["statistics"] else "give a machine with more"
    check_memory("factorize --by_block", work.bound(), less)
    with work.begin(config):
        dense_scores = work.dense_metric()
        work.measure()
        measured = StoredTensors(sorted(work.folder.glob(f"{compression.name}-*/*")))
        plan = compression.plan(dense, measured)
        calibration = compression.record(data)
        form = work.export(plan, measured, choices.dtype)
        scores = work.compressed_metric(form)
        told = {"memory": work.memory | {"bound": work.bound()}}
        more = {"calibration": calibration, **compression.told(dense, plan)}
        more |= {"refined": work.refinement and work.refinement.told(), "by_block": told}
        source = one_shot(job, form, dense, dense_scores, config, more)
        report = describe_shards(work.out, source, scores, choices)
        with export_folder(out) as temporary:
            temporary.rmdir()
            work.out.rename(temporary)
        end_work(work.folder)
        return report


def check_choices(choices: Choices, recovery: Recovery) -> None:
    """Refuse options that need the whole model."""
    for name in ("format", "vocabulary", "embeddings"):
        if (value := getattr(choices, name)) != getattr(Choices(), name):
            hint = "leave it out, or pass it to 'export' where the model fits"
            raise UserError(f"--by_block: --{name} {value} needs the whole model; {hint}")
    if recovery.distil is not None:
        raise UserError(f"--by_block: --distil {recovery.distil} needs the whole model; nearest: --refine 100")


class _Work:
    """The phases of one factorization, and the folder of their files.

    ``out`` is the folder of the export, which gets its place when it is whole.
    """

    def __init__(
        self, folder: Path, method: Method, data: DataModule, dense: Model, stage: CompressedStage,
        refine: int | None,
    ) -> None:  # fmt: skip
        self.folder, self.data, self.dense, self.compression = folder, data, dense, stage.compression
        self.out = folder / "export"
        self.source, self.task, self.kind = Path(method.backbone).expanduser(), method.task, task_type(method.task)
        tensors = LazyTensors(self.source, f"model: '{self.source}'")
        self.net = BlockNet(dense.config, tensors, unused=self.kind.unused, device=current_device())
        self.dev = [part for loader in data.val_dataloader() for batch in loader for part in self.kind.forwards(batch)]
        asked, self.collector = self.compression.calibration(dense, data), None
        self.memory = {"outside": bytes_of(self.net.net), "block": max(map(bytes_of, self.net.blocks)), "statistics": 0}
        names = [site.name for site in find_sites(dense)]
        if asked is not None:
            assert isinstance(asked.statistic, Statistic), "of the whole model"
            parts = calibration_parts(self.kind, asked.batches, asked.statistic.labels)
            walk = Walk(self.net, self.kind, parts, folder / "calibration")
            self.collector = BlockStatistics(walk, dense, asked.statistic)
            names = [name for sites in self.collector.sites for name in sites]
            self.memory["statistics"] = self.collector.bytes()
        self.sites = [[name for name in names if name.startswith(f"{block}.")] for block in self.net.names]
        self.refinement: Refinement | None = None
        if refine is not None:
            parts = calibration_parts(self.kind, stage.texts(data), None)
            own = Walk(self.net, self.kind, parts, folder / "refined")
            self.refinement = Refinement(Walk(self.net, self.kind, parts, folder / "refined-dense"), own, refine)
            self.memory["training"] = OF_TRAINING * self.memory["block"]

    def bound(self) -> int:
        """Return the peak bytes without activations: outside the blocks, two blocks, a block's sums or its training."""
        more = max(self.memory["statistics"], self.memory.get("training", 0))
        return self.memory["outside"] + 2 * self.memory["block"] + more

    def begin(self, config: dict[str, Any]) -> AbstractContextManager[None]:
        """Claim the folder, new or to continue in it; refuse other work there."""
        steps = self.refinement and self.refinement.steps
        reads = self.collector is not None or steps is not None
        rows = self.data.fingerprint() if reads else self.data.dev_contents()
        settings = short_hash(config, stamps(self.source), rows, steps)
        return begin_work("--by_block", self.folder, settings)

    def dense_metric(self) -> dict[str, float]:
        """Evaluate the dense model; its vectors are the labels where the task wants them."""
        before = Walk(self.net, self.kind, self.dev, self.folder / "dense")
        before.reach(len(self.net))
        if self.task.wants_vectors and self.data.teacher is None:
            self.data.label_by(Ending(self.net, before.last()))
        return self._scores(before)

    def measure(self) -> None:
        """Measure every block that has no folder yet."""
        todo = [i for i in range(len(self.net)) if not self._measured(i).is_dir()]
        if self.collector is not None:
            self.collector.collect(todo, self._measure)
            todo = []
        for i in todo:
            with self.net.block(i) as block:
                self._measure(i, block, {})

    def _measured(self, number: int) -> Path:
        return self.folder / f"{self.compression.name}-{number:05}"

    def _measure(self, number: int, block: nn.Module, statistics: dict[Any, Any]) -> None:
        """Write the folder of a block; its values and its statistics by site are released."""
        from safetensors.torch import save_file

        names, shapes = self.sites[number], self.dense
        for name in names:
            weight = block.get_parameter(f"{name.removeprefix(f'{self.net.names[number]}.')}.weight")
            replace(shapes, f"{name}.weight", nn.Parameter(weight.detach().cpu()))  # type: ignore[arg-type]
        if names:
            empty(block)
        with self.net.only_block(), atomic_folder(self._measured(number)) as temporary:
            for i, (finished, tensors) in enumerate(self.compression.measure(shapes, names, statistics)):
                save_file(tensors, temporary / f"{i:05}.safetensors")
                for name in finished:
                    empty(shapes.get_submodule(name))
        for name in names:
            empty(shapes.get_submodule(name))

    def export(self, plan: Plan, measured: StoredTensors, dtype: str) -> Model:
        """Write the export, one file per block and one for the rest; return it without values.

        A block whose file is there already is not written again. The dense model is released.
        """
        net, out, form, kind = self.net, self.out, copy.deepcopy(self.dense), getattr(torch, dtype)
        out.mkdir(exist_ok=True)
        rest, *paths = (out / f"model-{i + 1:05}-of-{len(net) + 1:05}.safetensors" for i in range(len(net) + 1))
        self.compression.fill(small := copy.deepcopy(form), plan, None)
        ordinary = ordinary_form(small)
        for i, name in track(list(enumerate(net.names)), "write", len(net)):
            if paths[i].is_file():
                continue
            block = form.get_submodule(name)
            net.fill(i, block)
            own = {site: value for site, value in plan.items() if site.startswith(f"{name}.")}
            with torch.no_grad():
                self.compression.fill(form, own, measured)
            if self.refinement is not None:
                self.refinement(i, block)
            if ordinary is not None:
                block, changed = ordinary.get_submodule(name), block
                hand_over(changed, block)
                empty(changed)
            _write(((f"{name}.{key}", value) for key, value in block.state_dict().items()), kind, paths[i])
            empty(block)
        with net.only_block():
            _write(((key, net.read(key)) for key in net.outside()), kind, rest)
        write_index([rest, *paths])
        made = small if ordinary is None else ordinary
        if dtype != "float32":
            made.config.dtype = kind
        write_as(small, ordinary, out, save_form)
        del self.net, self.collector
        return made

    def compressed_metric(self, form: Model) -> dict[str, float]:
        """Evaluate the export, which is ``form`` without values."""
        own = BlockNet(config_of(self.out), LazyTensors(self.out, "export"), describe(form), device=current_device())
        after = Walk(own, self.kind, self.dev, self.folder / "compressed")
        after.reach(len(own))
        return self._scores(after)

    def _scores(self, walk: Walk) -> dict[str, float]:
        return evaluate(Ending(walk.net, walk.last()), self.data, sure=True)  # type: ignore[arg-type]


def _write(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, path: Path) -> None:
    """Write a file in ``dtype``, which must hold all values."""
    with atomic_file(path) as temporary:
        write_shard({name: in_dtype(name, value, dtype) for name, value in tensors}, temporary)


def _read_shapes(method: Method) -> Model:
    """Return the model of the backbone without values, in float32; refuse one that cannot go block by block."""
    from transformers import GenerationConfig

    folder = Path(method.backbone).expanduser()
    if not folder.is_dir():
        raise UserError(f"--by_block: '{folder}' is no folder; give the folder of a downloaded model")
    config = load_config(method.backbone, method.task, "model", trained=True)
    config.dtype = torch.float32
    net = without_values(lambda: empty_net(config))
    if net.can_generate() and (folder / "generation_config.json").is_file():
        net.generation_config = GenerationConfig.from_pretrained(folder)
    task_type(method.task).configure(net, method.task)
    check_by_block(net)
    return net.eval()
