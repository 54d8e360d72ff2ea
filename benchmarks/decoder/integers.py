"""The models of run.py as OpenVINO programs with integers of 8 and 4 bits: perplexity, bytes, seconds and memory.

    python -m benchmarks.decoder.integers --backbone DIR --data DIR [--work DIR] [--only dense even-0.8 ...]
        [--ways int8 round ...]

Needs ``pip install '.[openvino]'``, and the models that run.py left in ``--work``. ``int8`` is ``export --format
openvino --dtype int8``: the weights alone, a scale per row. The other ways are of 4 bits for the matrices of the blocks
and 8 for the table, with a scale for 32 weights, or 64; ``asymmetric``: also a zero; ``mixed``: a tenth of the blocks'
weights has 8 bits. ``round`` reads no texts. ``awq``, ``scales`` (scale estimation) and ``gptq`` read 32 of the
calibration texts. ``round-trained`` is ``factorize --distil`` with this dtype: rounded weights learn the dense model's
outputs on texts of both kinds, two a step; with ``states`` its hidden states as well. ``awq-scales-trained`` is NNCF's
own training: adapters of rank 16, which the integers take up, and the scales learn the outputs. NNCF compiles code for
it. Its losses are those of the model in PyTorch, and the bytes those of the program before. Every way has a process of
its own. Writes benchmarks/decoder/results/integers/<model>-<way>.json; existing ones are kept.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import common
from benchmarks.decoder import run, texts
from lit_compress.utils.memory import peak_mib

SCRIPT = "decoder/integers"
LONGEST = tuple(f"{method}-0.8-distilled-at-1-900-outputs-more" for method in ("free", "layers"))
WHOLE_BLOCKS = ("layers-0.9-mixed", "layers-0.7-distilled-at-1-outputs")
MODELS = ("dense", "even-0.9", "even-0.8", "even-0.6", "free-0.9", "free-0.8-distilled-at-1", *LONGEST, *WHOLE_BLOCKS)
FLAGS = ("awq", "scale_estimation", "gptq")
# way -> arguments of NNCF's compress_weights
WAYS: dict[str, dict[str, Any]] = {
    "int8": {},
    "round-64": {"group_size": 64},
    "round": {},
    "round-asymmetric": {"mode": "int4_asym"},
    "awq-scales": {"awq": True, "scale_estimation": True},
    "gptq": {"gptq": True},
    "scales": {"scale_estimation": True},
    "awq-scales-gptq": {"awq": True, "scale_estimation": True, "gptq": True},
    "awq-scales-64": {"awq": True, "scale_estimation": True, "group_size": 64},
    "awq-scales-asymmetric": {"awq": True, "scale_estimation": True, "mode": "int4_asym"},
    "awq-scales-mixed": {"awq": True, "scale_estimation": True, "ratio": 0.9},
    "awq-scales-trained": {"awq": True, "scale_estimation": True},
    "round-trained": {},
    "round-trained-states": {},
}
TRAINED, RANK, RATE = 100, 16, 5e-4  # steps, rank of adapters, their learning rate; scales have a tenth of it


def measure(options: Any, name: str, way: str) -> None:
    """Quantize a program, which is written first, in this process, and store its losses."""
    from nncf import CompressWeightsMode

    from lit_compress.export.integers import READ, quantize, single_texts, training_feeds
    from lit_compress.export.program import program_bytes, read_program, write_program
    from lit_compress.export.runtimes import FILES
    from lit_compress.models.storage import load_net

    torch.set_num_threads(options.threads)
    data, measured = run.command_line(options, "svd").build().data, torch.load(options.work / "data" / "measured.pt")
    whole, more = options.work / name / "program" / FILES["openvino"], dict[str, Any]()
    if way.startswith("round-trained"):
        net, more = rounded(options, name, way.endswith("states"))
        whole = options.work / f"{name}-{way}" / "program" / FILES["openvino"]
        whole.parent.mkdir(parents=True, exist_ok=True)
        write_program(net, data.tokenizer, whole.parent, "openvino")
    elif not whole.with_suffix(".bin").exists():
        whole.parent.mkdir(exist_ok=True)
        write_program(load_net(options.work / name), data.tokenizer, whole.parent, "openvino")
    settings, read = {"ratio": 1.0, **WAYS[way]}, []
    if "mode" in settings:
        settings["mode"] = CompressWeightsMode(settings["mode"])
    start = time.process_time()
    if any(flag in settings for flag in FLAGS):
        read = single_texts(training_feeds(data, "integers", READ))
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / FILES["openvino"]
        quantize(whole, small, "int8" if way == "int8" else "int4", read or None, way=settings)
        facts: dict[str, Any] = {
            "seconds": time.process_time() - start, "bytes": program_bytes(small), "memory_mib": peak_mib(), **more
        }  # fmt: skip
        program = read_program(small, ("logits",))
        if way == "awq-scales-trained":
            net, more = trained(options, name, settings, read)
            facts |= more

        def answer(input_ids: torch.Tensor) -> Any:
            inputs = {"input_ids": input_ids.contiguous(), "attention_mask": torch.ones_like(input_ids)}
            own = way == "awq-scales-trained"
            return SimpleNamespace(logits=net(**inputs).logits if own else program(inputs)["logits"])

        made = facts | {
            "name": f"{name}-{way}", "of": name, "way": way, "texts": len(read), "threads": options.threads,
            "losses": {key: texts.losses(answer, rows) for key, rows in measured.items()},
        }  # fmt: skip
    common.write(options, made["name"], made | common.frame())
    print(made["name"], facts, flush=True)


def rounded(options: Any, name: str, states: bool) -> tuple[Any, dict[str, Any]]:
    """Return a model that ``factorize --distil`` has trained for a program of 4 bits, and facts."""
    from lit_compress.cli.factorizing import load_model
    from lit_compress.run.distilling import Recovery

    cli, start = run.command_line(options, "svd", 1), time.process_time()
    cli.config.data.batch_size, cli.config.export.format, cli.config.export.dtype = run.OF_A_STEP, "openvino", "int4"
    dense = load_model(str(options.backbone), cli.build().method)
    recovery = Recovery(distil=options.trained, rate=run.RATE, texts=str(options.work / "mixed" / "train.txt"))
    losses = {"temperature": 1.0} | ({} if states else {"alpha_layers": 0.0, "mask_padding": False, "relative": False})
    net, told = common.distilled(cli, dense, options.work / name, recovery, losses, precision="bf16-mixed")
    return net, {"trained": told["steps"], "train_seconds": time.process_time() - start, "metric": told["metric"]}


def trained(options: Any, name: str, way: dict[str, Any], read: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Return a model whose weights are rounded to integers in every forward, trained with them, and facts."""
    import nncf
    from nncf.parameters import CompressionFormat

    from lit_compress.models.storage import load_net

    start, cli = time.process_time(), run.command_line(options, "svd", 1)
    cli.config.data.batch_size = run.OF_A_STEP
    batches = cli.build().data.with_texts(str(options.work / "mixed" / "train.txt")).train_dataloader()
    net, dense = (load_net(options.work / which).eval() for which in (name, "dense"))
    net.config.use_cache = dense.config.use_cache = False
    given = [{key: torch.from_numpy(value) for key, value in feed.items() if key != "labels"} for feed in read]
    adapters = nncf.AdvancedCompressionParameters(lora_adapter_rank=RANK)
    net = nncf.compress_weights(
        net, mode=nncf.CompressWeightsMode.INT4_SYM, group_size=32, dataset=nncf.Dataset(given),
        subset_size=len(given), compression_format=CompressionFormat.FQ_LORA, advanced_parameters=adapters, **way,
    )  # fmt: skip
    parts: dict[str, list[torch.nn.Parameter]] = {"lora": [], "scale": []}
    for place, parameter in net.named_parameters():
        part = "lora" if "lora" in place else "scale" if "scale" in place else None
        parameter.requires_grad_(part is not None)
        if part is not None:
            parts[part].append(parameter)
    rates = {"lora": RATE, "scale": RATE / 10}
    optimizer = torch.optim.AdamW([{"params": parts[part], "lr": rates[part]} for part in parts], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.trained)
    told: list[float] = []
    for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(batches)), options.trained):
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                target = dense(**inputs).logits.float().log_softmax(-1).flatten(0, 1)
            scores = net(**inputs).logits.float().log_softmax(-1).flatten(0, 1)
        loss = torch.nn.functional.kl_div(scores, target, log_target=True, reduction="batchmean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*parts["lora"], *parts["scale"]], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        told.append(float(loss))
        print(len(told), sum(told[-10:]) / len(told[-10:]), flush=True)
    return net.eval(), {
        "trained": len(told), "train_seconds": time.process_time() - start, "divergences": told,
        "memory_mib": peak_mib(),
    }  # fmt: skip


def alone(*work: Any) -> None:
    """Call :func:`measure` in a process of its own; its failure ends the script."""
    process = multiprocessing.get_context("spawn").Process(target=measure, args=work)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(process.exitcode)


def main() -> None:
    """Measure what is missing."""
    parser = common.parser(SCRIPT, __doc__, "backbone", "data", only=MODELS, work=Path("runs/decoder"))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS), metavar="WAY")
    parser.add_argument("--trained", type=int, default=TRAINED, help="steps")
    run.add_sizes(parser)
    options = parser.parse_args()
    options.list = None
    run.prepare(options)
    for name in options.only:
        for way in (way for way in options.ways if common.missing(options, f"{name}-{way}")):
            alone(options, name, way)


if __name__ == "__main__":
    main()
