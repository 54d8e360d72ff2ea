"""The functions of the Python API; each runs the same code as its command."""

from __future__ import annotations

import copy
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from unittest.mock import patch

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from transformers.utils import logging as transformers_logging

from lit_compress.api.compressed import Shared, with_export
from lit_compress.api.inputs import COLUMNS, brought, named, write_tokenizer
from lit_compress.calibration.statistics import frozen
from lit_compress.cli.factorizing import run_factorize
from lit_compress.cli.fitting import run_fit, warn_missed
from lit_compress.cli.lines import checked
from lit_compress.cli.recipes import flat
from lit_compress.cli.targets import find_target, load_checked, open_target
from lit_compress.cli.words import Line, from_python
from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import evaluate as evaluate_net
from lit_compress.methods import Method
from lit_compress.models.backbones import set_padding
from lit_compress.models.checks import check_head
from lit_compress.run.distilling import Recovery
from lit_compress.run.folder import Run
from lit_compress.tasks import task_type
from lit_compress.utils.errors import UserError, user_error
from lit_compress.utils.progress import silence_libraries

if TYPE_CHECKING:
    from lit_compress.api.compressed import Compressed
    from lit_compress.api.inputs import Data, Model, Tokenizer


def factorize(
    model: Model,
    tokenizer: Tokenizer = None,
    data: Data = None,
    *,
    density: float | None = None,
    rank: int | None = None,
    budget: str | None = None,
    **options: Any,
) -> Compressed:
    """Factorize a fine-tuned model at once, without training.

    Args:
        model: a transformers model with a trained head, its folder or its name on the hub. A model is not changed.
        tokenizer: of a model; a folder or a name has its own.
        data: a ``datasets.Dataset`` (80 % calibrate, 10 % are the dev set of the report), a ``DatasetDict`` with
            ``train`` and ``validation``, a file or a folder; None for the hub's data of ``task``.
        density: share of the weights of the blocks' matrices that is kept, in (0, 1]; without a size, 0.25.
        rank: in its place, the rank of every matrix.
        budget: in its place, what the export may have: ``size=20MB``, ``params=5M``, ``flops=0.3``, ``speedup=3x``.
        **options: of the command, e.g. ``refine=100``, ``**{"data.batch_size": 8}``; and of all functions here:
            task: a task of the package, e.g. ``sst2``; None for the user's own.
            kind: type of the user's own task, by default the type of the model's trained head: classification,
            regression, tagging, span_qa, summarization, language_modelling, embedding, reranking, multi_label.
            text: name of the column of texts, by default text, or names of two.
            label: name of the column of labels, by default label, or names of columns of 0 and 1, one for each label.
            device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, ...; None for the accelerator if there is one.

    Returns:
        The compressed model on the CPU, with ``report`` and ``save_pretrained``.

    Raises:
        UserError: the model, the data or an option cannot be used; the message is one line.

    Example:
        >>> small = factorize(model, tokenizer, data, density=0.16)  # doctest: +SKIP
        >>> small.save_pretrained("small")  # doctest: +SKIP
    """
    with undisturbed() as written:
        source, given = brought(model, tokenizer, data, options, written)
        place = Shared(prefix="lit_compress-")
        own = {"density": density, "rank": rank, "budget": budget}
        line = _line("factorize", given | own | options)
        recovery = Recovery(*map(line.own.get, ("refine", "distil", "distil_texts", "distil_rate")))
        report = run_factorize(source, f"{place.name}/export", line, recovery, line.own.get("by_block"))
        return _made("factorize", report, Path(place.name) / "export", place)


def compress(
    model: Model,
    tokenizer: Tokenizer = None,
    data: Data = None,
    *,
    method: Method | type[Method] | str = "SecondOrder",
    fine_tuned: bool = False,
    run_dir: str | Path | None = None,
    **options: Any,
) -> Compressed:
    """Compress a model by a method, with training: a run of ``fit``.

    Args:
        model: as :func:`factorize`; one whose head was not trained on the classes of the data is fine-tuned first.
        tokenizer, data: as :func:`factorize`; the training rows are trained on.
        method: with its settings, e.g. ``methods.LPAF(density=0.16)``; or its class or name, with the defaults.
        fine_tuned: the head of ``model`` was trained on the classes of the data, in their order: it is the teacher as
            it is. False: only if its classes have the same names.
        run_dir: folder of the run. A run that was stopped continues, and of one that is finished the model is loaded.
            None: a temporary folder, which goes with the model.
        **options: of ``fit``, e.g. ``**{"data.batch_size": 8, "trainer.precision": "bf16-mixed"}``.

    Returns:
        As :func:`factorize`.

    Raises:
        UserError: the model, the data, the method or an option cannot be used, or ``run_dir`` is of other settings.

    Example:
        >>> small = compress(model, tokenizer, data, method=methods.LPAF(density=0.16))  # doctest: +SKIP
    """
    with undisturbed():
        place = None if run_dir is not None else Shared(prefix="lit_compress-")
        written = Path(place.name) if place else None
        source, given = brought(model, tokenizer, data, options, written)
        run = Run(Path(run_dir or f"{written}/run").expanduser())
        given = {"model.backbone": source, "model.teacher": source if fine_tuned else None, **given, **options}
        given |= {"run_dir": str(run.folder), "ckpt_path": "last", **_of_method(method)}
        _, report = run_fit(_line("fit", given))
        return _made("fit", report, run.folder / "export", place)


def evaluate(
    model: Model,
    tokenizer: Tokenizer = None,
    data: Data = None,
    *,
    split: Literal["validation", "test"] = "validation",
    **options: Any,
) -> dict[str, float]:
    """Score a model on labelled data, with the uncertainty of the score.

    Args:
        model: a compressed model, any fine-tuned model of transformers, or the folder of one, of an export or of a run.
        tokenizer: of a model; a compressed one has its own.
        data: a ``datasets.Dataset``, which is scored as a whole; else as :func:`factorize`. None for the data of a run,
            or for the hub's data of ``task``.
        split: which one is scored.
        **options: of the command, e.g. ``**{"data.eval_batch_size": 8}``.

    Returns:
        The metrics by name, e.g. ``accuracy`` in [0, 1]; ``rows``, the number read; ``available``, the number in the
        split, if rows are not one text; ``accuracy_low95`` and ``accuracy_high95``, the 95 % interval for a sample of
        this size. MNLI's second split has a prefix.

    Raises:
        UserError: the model, the data or an option cannot be used; the head answers another question.

    Example:
        >>> evaluate(small, data=data)["accuracy"]  # doctest: +SKIP
        0.82
    """
    if split not in ("validation", "test"):
        raise UserError(f"split: unknown '{split}'; valid: validation, test")
    net = cast(Any, model)
    with undisturbed() as written:
        name = named(model, tokenizer) or getattr(model, "folder", None)
        if name is None:  # in memory: no weights are read
            (name := written / "model").mkdir()
            config = _config_of(net)
            config.__dict__.pop("quantization_config", None)
            config.save_pretrained(name)
            write_tokenizer(config, tokenizer, name)
        target = find_target(str(name), "evaluate")
        stored, given = (target.config or {}).get("data", {}).get("task"), dict[str, Any]()
        if stored is None or any(options.get(name) is not None for name in ("task", *COLUMNS)):
            _, given = brought(str(target.folder), None, data, options, written, split)
        elif data is not None:  # its columns are stored
            _, given = brought(str(target.folder), None, data, {"task": stored}, written, split)
        parts = open_target(target, _line("evaluate", given | options))
        if isinstance(model, str | Path):
            values = evaluate_net(load_checked(target, parts, split), parts.data, split, sure=True)
        else:
            values = _in_memory(net, parts.data, str(target.folder), split)
    return {name.removeprefix("test/" if split == "test" else "val/"): value for name, value in values.items()}


# ------------------------------------------------------------------------------------------ options and models


def _line(command: str, given: dict[str, Any]) -> Line:
    """Return the options of a command, checked; those that are None are left out."""
    device, devices = given.get("device"), given.get("trainer.devices") or 1
    given = given | {"device": device and str(device)}
    if command == "fit" or given.get("distil"):  # for several devices Lightning starts the user's program again
        if devices not in (1, "1"):
            raise UserError(
                f"trainer.devices: {devices}: a function works on one device, the command {command} on several"
            )
        given["trainer.devices"] = 1
    return checked(from_python(command, {name: value for name, value in given.items() if value is not None}))


def _made(command: str, report: dict[str, Any] | None, export: Path, place: Shared | None) -> Compressed:
    """Return the model of an export; ``place`` is the temporary folder that holds it."""
    if report is None:
        raise UserError(f"trainer.devices: several processes were started; the command {command} is for them")
    warn_missed(report)
    return with_export(export, place)


def _config_of(net: Any) -> Any:
    """Return a copy of a model's configuration with its class, in place of the class of the file it was made from."""
    config = copy.deepcopy(net.config)
    if type(net).__module__.startswith("transformers."):
        config.architectures = [type(net).__name__]
    return config


def _in_memory(net: Any, data: DataModule, folder: str, split: Literal["validation", "test"]) -> dict[str, float]:
    """Return the scores of a model of the user's, which stays as it is; ``folder`` has its tokenizer."""
    record, config = data.record, net.config
    check_head(f"model: a {type(net).__name__}", _config_of(net), record)
    device, padding = net.device, getattr(config, "pad_token_id", None)
    generation = copy.deepcopy(getattr(net, "generation_config", None))
    try:
        set_padding(config, folder, record, "model")
        task_type(record).configure(net, record)
        with frozen(net):
            return evaluate_net(net, data, split, sure=True)
    finally:
        net.to(device)
        net.generation_config, config.pad_token_id = generation, padding


def _of_method(method: Any) -> dict[str, Any]:
    """Return the options that make a method as it was made."""
    if isinstance(method, str):
        return {"model": method}
    kind = method if isinstance(method, type) else type(method)
    if not (issubclass(kind, Method) and kind is not Method):
        raise UserError(
            f"method: {kind.__name__} is no method; give one, e.g. methods.LPAF(density=0.25), or its name, 'LPAF'"
        )
    name = kind.__name__ if kind.__module__.startswith("lit_compress.") else f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(method, Method):
        return {"model": name}
    # one by one, so that one without effect is told
    given, usual = (dict(flat(_as_option(one.given), "model.")) for one in (method, kind()))
    here = "model.task", "model.backbone"  # follow from the model and the data of the call
    return {"model": name} | {n: v for n, v in given.items() if n not in here and v != usual.get(n)}


def _as_option(value: Any) -> Any:
    """Return a value as a config has it: of settings a mapping, and of an optimizer, which is a class, its name."""
    if isinstance(value, type | partial):
        kind, given = (value, {}) if isinstance(value, type) else (value.func, value.keywords)
        return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": given}
    value = vars(value) if is_dataclass(value) else value
    return {key: _as_option(inner) for key, inner in value.items()} if isinstance(value, dict) else value


@contextmanager
def undisturbed() -> Iterator[Path]:
    """Run one call as a command runs, with gradients; leave random numbers, threads, warnings and logging as they were.

    It gets a folder for files of the call alone.
    """
    names = logging.root.manager.loggerDict
    levels = {name: logging.getLogger(name).level for name in list(names)}
    bars, threads = transformers_logging.is_progress_bar_enabled(), torch.get_num_threads()
    with (
        tempfile.TemporaryDirectory(prefix="lit_compress-") as written,
        torch.inference_mode(False), torch.enable_grad(), isolate_rng(), warnings.catch_warnings(),
        patch.object(warnings, "formatwarning", warnings.formatwarning), patch.dict(os.environ),
    ):  # fmt: skip
        silence_libraries()
        transformers_logging.disable_progress_bar()  # of its files, which are parts of the work
        try:
            yield Path(written)
        except Exception as error:
            if (line := user_error(error)) is None or line is error:
                raise
            raise line from None  # parsers wrap it in a long text
        finally:
            torch.set_num_threads(threads)
            if bars:
                transformers_logging.enable_progress_bar()
            for name in list(names):
                logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
