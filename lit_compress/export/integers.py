"""Programs of integers: how they are made for which model, chosen and measured.

Models that write text get integers for the weights alone, from NNCF's ``compress_weights``: of 8 bits with a scale for
every row, or of 4 bits with one for every :data:`GROUP` weights of a row, and 8 bits for the tables. A few of their
activations are far larger than the others, and fixed ranges of 8 bits for them cost SmolLM2-135M 11 % of perplexity
(benchmarks/decoder). With VNNI, OpenVINO itself rounds activations in groups of 32 with ranges of their own while it
runs: a prompt took half the time, and the perplexity rose by 0.3 % at most. All other models get integers for weights
and activations (quantize.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf, isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from lit_compress.evaluation.divergence import divergence, same_order
from lit_compress.evaluation.evaluate import evaluate, interval_of
from lit_compress.export.program import Program, program_bytes, read_program
from lit_compress.export.quantize import Feed, fold, quantize_onnx, quantize_openvino, save, save_onnx, silent
from lit_compress.utils.errors import UserError
from lit_compress.utils.memory import peak_mib
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule

EXAMPLES = 128  # training texts, from which the ranges of activations are read
READ, HELD_OUT = 32, 16  # texts that ways to 4 bits read, and others on which the ways are compared
SMOOTH = (0.95, 0.5)  # shares of the activations' ranges that SmoothQuant (arXiv 2211.10438) moves into the weights
GROUP = 32  # weights of 4 bits that share a scale
NO_WAY: Mapping[str, Any] = {}
# ways to find weights of 4 bits, by name: arguments of NNCF, which differ in nothing that changes the size
WAYS: dict[str, dict[str, Any]] = {
    "AWQ and scale estimation": {"awq": True, "scale_estimation": True},
    "AWQ, scale estimation and GPTQ": {"awq": True, "scale_estimation": True, "gptq": True},
}

Integers = Literal["int8", "int4"]
INTEGERS: dict[str, tuple[str, ...]] = {"int8": ("onnx", "openvino"), "int4": ("openvino",)}  # dtype -> formats


def training_feeds(data: DataModule, option: str, examples: int = EXAMPLES) -> list[Feed]:
    """Return batches of some training texts, or of all if there are fewer.

    Args:
        data: of the task, as the program's tokenizer reads it.
        option: as the user typed it; the start of an error message.
        examples: number of texts.

    Raises:
        UserError: there are no training texts.
    """
    try:
        batches = data.calibration_dataloader(min(examples, data.train_size()))
    except UserError as error:
        raise UserError(f"{option} reads training texts: {error}") from error
    return [{name: value.numpy() for name, value in batch.items() if hasattr(value, "numpy")} for batch in batches]


def integers_of(
    path: Path,
    out: Path,
    dtype: Integers,
    writes: bool,
    feeds: Callable[[], Sequence[Feed]],
    smooth: Sequence[float] = SMOOTH,
) -> None:
    """Write the program ``path`` with integers to ``out``, which may be the same file; 4 bits by rounding alone.

    Args:
        path: ``.onnx`` or ``.xml``, in float32.
        out: the file to write, and for ``.xml`` the weights next to it.
        dtype: ``int4`` is for OpenVINO.
        writes: whether the model writes text, so that only its weights get integers.
        feeds: function that returns batches that the program can read, also with other arrays; not called if it writes.
        smooth: the shares that are tried for OpenVINO; one is enough to time the program.

    Raises:
        UserError: the library cannot quantize it.
    """
    if writes:
        quantize_weights(path, out, dtype)
        return
    given = feeds()
    with _replaced(path, out, dtype) as small:
        if path.suffix == ".onnx":
            quantize_onnx(path, small, given)
        else:
            quantize_openvino(path, small, given, smooth)


def quantize_weights(
    path: Path, out: Path, dtype: Integers, texts: Sequence[Feed] = (), way: Mapping[str, Any] = NO_WAY
) -> None:
    """Write a program with integers for its weights to ``out``, which may be the same file.

    Args:
        path: ``.onnx`` or ``.xml``, in float32.
        out: the file to write, and for ``.xml`` the weights next to it.
        dtype: of the weights.
        texts: one text each, without padding, which ``way`` reads.
        way: further arguments of NNCF for weights of 4 bits, as in :data:`WAYS`; without any they are rounded.

    Raises:
        UserError: NNCF cannot quantize it.
    """
    with _replaced(path, out, dtype) as small, silent():
        import nncf

        mode = nncf.CompressWeightsMode
        if path.suffix == ".onnx":
            import onnx

            model = onnx.load(path)
            turned = fold(model)
            kept = nncf.IgnoredScope(types=["Gather"], validate=False)
            save_onnx(nncf.compress_weights(model, mode=mode.INT8_SYM, ignored_scope=kept), turned, small)
            return
        import openvino

        program = openvino.Core().read_model(path)
        if dtype == "int8":
            save(nncf.compress_weights(program, mode=mode.INT8_ASYM), small)
            return
        settings: dict[str, Any] = {"mode": mode.INT4_SYM, "group_size": GROUP, "all_layers": False, **way}
        if texts:
            names = [item.any_name for item in program.inputs]
            read = [{name: text[name] for name in names} for text in texts]
            settings |= {"dataset": nncf.Dataset(read), "subset_size": len(read)}
        adjusted = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
        save(nncf.compress_weights(program, advanced_parameters=adjusted, **settings), small)


def best_weights(path: Path, net: PreTrainedModel, data: DataModule, results: tuple[str, ...]) -> dict[str, Any]:
    """Give a program weights of 4 bits, in place, by the way of :data:`WAYS` that diverges least from it.

    The ways read :data:`READ` training texts, and are compared on :data:`HELD_OUT` others.

    Args:
        path: ``.xml``, in float32.
        net: which the program was made from.
        data: of its task.
        results: names of the program's outputs.

    Returns:
        The name of the ``way``; for every way of ``tried`` its ``divergence`` in nats per text
        (evaluation/divergence.py) and its ``seconds`` of the processor; the number of ``examples`` that they read.

    Raises:
        UserError: there are no training texts; NNCF cannot quantize it.
    """
    texts = single_texts(training_feeds(data, "export: --dtype int4", READ))
    batches = list(data.rest_dataloader(len(texts), HELD_OUT))
    exact, tried = Program(read_program(path, results), net.config), dict[str, dict[str, float]]()
    with TemporaryDirectory(dir=path.parent) as work:
        made = {name: Path(work) / f"{number}.xml" for number, name in enumerate(WAYS)}
        for name, other in made.items():
            start = time.process_time()
            quantize_weights(path, other, "int4", texts, WAYS[name])
            seconds = time.process_time() - start
            program = Program(read_program(other, results), net.config)
            off = divergence(program, exact, data, batches)  # type: ignore[arg-type]
            peak = peak_mib() / 1024
            note(f"int4, {name}: {off:.4g} nats a text from float32; {seconds:.0f} s, {peak:.1f} GB at most")
            tried[name] = {"divergence": off, "seconds": seconds}
        way = min(tried, key=lambda name: inf if isnan(off := tried[name]["divergence"]) else off)
        _move(made[way], path)
    return {"way": way, "tried": tried, "examples": len(texts)}


def quantize_program(
    folder: Path, made: dict[str, Any], net: PreTrainedModel, data: DataModule, dtype: Integers
) -> dict[str, Any]:
    """Quantize the program in ``folder``, in place, and measure its dev metric.

    Args:
        folder: of the export.
        made: the result of :func:`~lit_compress.export.program.write_program`.
        net: which the program was made from.
        data: of its task.
        dtype: of the integers.

    Returns:
        Its ``dtype`` and ``bytes``; its ``metric`` with ``interval``, or None; the number of ``examples`` that were
        read; ``order``, Spearman's correlation of its numbers with the numbers of ``net``, or None for tasks without
        one number; of ``int4`` the ``way`` and ``tried`` of :func:`best_weights`.

    Raises:
        UserError: there are no training texts; the library cannot quantize it.
    """
    path, results = folder / made["file"], tuple(made["outputs"])
    writes, told = net.can_generate(), dict[str, Any](examples=0)
    if dtype == "int4":
        told = best_weights(path, net, data, results)
    else:
        told["examples"] = 0 if writes else min(EXAMPLES, data.train_size())
        integers_of(path, path, dtype, writes, partial(training_feeds, data, f"export: --dtype {dtype}"))
    program = Program(read_program(path, results), net.config)
    key = f"val/{data.record.metrics[0]}"
    scores = evaluate(program, data, sure=True)  # type: ignore[arg-type]
    return told | {
        "dtype": dtype, "bytes": program_bytes(path), "metric": scores[key], "interval": interval_of(scores, key),
        "order": same_order(net, program, data),
    }  # fmt: skip


@contextmanager
def _replaced(path: Path, out: Path, dtype: Integers) -> Iterator[Path]:
    """Give a file that takes the place of ``out`` at the end; an error of a library is one line."""
    with TemporaryDirectory(dir=out.parent) as work:
        try:
            yield (small := Path(work) / out.name)
        except Exception as error:  # the libraries raise anything
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise UserError(f"export: --dtype {dtype} cannot quantize {path.name}: {reason}") from error
        _move(small, out)


def _move(path: Path, to: Path) -> None:
    """Let a program take the place of another, with OpenVINO's file of weights."""
    for suffix in {path.suffix, ".bin"} if path.suffix == ".xml" else {path.suffix}:
        path.with_suffix(suffix).replace(to.with_suffix(suffix))


def single_texts(feeds: Sequence[Feed]) -> list[Feed]:
    """Return every text of some batches alone, without padding, which would count in statistics."""
    texts = []
    for feed in feeds:
        by_token = {name: value for name, value in feed.items() if value.shape == feed["attention_mask"].shape}
        texts += [
            {name: value[i : i + 1, mask != 0] for name, value in by_token.items()}
            for i, mask in enumerate(feed["attention_mask"])
        ]
    return texts
