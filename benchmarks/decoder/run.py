"""SmolLM2-135M, a real decoder, made smaller without training: perplexity on WikiText-2 and on news, time, memory.

    python -m benchmarks.decoder.run --backbone DIR --data DIR [--work DIR] [--only structures ...]
        [--densities 0.8 ...] [--refine 0 100] [--mixed 256] [--results DIR]
        [--distil 300 [--temperature 1] [--outputs] [--more [--written 1800]] [--accelerator gpu]]

``--backbone`` is the folder that ``python -m benchmarks.speed.smollm2`` writes; the weights are 4-bit values made
float. ``--data`` has wikitext2/ and cnn_dailymail/ as parquet files; texts.py says how WikiText-2 is read. 64 blocks of
256 tokens of the validation split calibrate. A row is one method at one density, as ``factorize`` makes it; whole
blocks are chosen on 8 of the texts. Statistics that do not depend on the density are gathered once.
``--refine`` trains the blocks of the same compressed models for so many steps each (``factorize --refine``). With
``--mixed`` it reads so many blocks of WikiText-2's validation split and of as many letters of CNN/DailyMail's.
``--distil`` trains the models that were refined on these for so many steps more, each of two of all those blocks, in
mixed precision (``factorize --distil``); ``--temperature`` is that of both distributions. ``--outputs`` leaves hidden
states out, and ``--more`` reads the paragraphs of SQuAD's training split and a thousand articles in place of the texts
of the refinement, so that no text is read twice. With ``--written`` these are so many texts that the dense model wrote.
``--accelerator`` is that of the distillation and of the writing, which goes on where it was stopped. ``reduce`` and
``nearest`` are heads and neurons by other estimates of the Fisher information than K-FAC's; second_order/estimates.py
says which.
``search`` chooses sub-layers, heads and neurons together (search.py), ``rounds`` whole blocks between refinements
(rounds.py).

Every method has a process of its own. Its seconds are those of the processor, because another program may share the
machine. Writes benchmarks/decoder/results/<method>-<density>[-refined | -mixed | -distilled | -distilled-at-1].json;
existing ones are kept, so the script can be stopped and started again. Other numbers of steps than 300, and
``--outputs``, which learns no hidden states, are in the names of distilled rows. `python -m benchmarks.tables` makes
the tables.
"""

from __future__ import annotations

import csv
import multiprocessing
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger

from benchmarks import common
from benchmarks.decoder import rounds, search, texts
from benchmarks.second_order.estimates import OtherFactors

STUDY = "decoder"
TASK, LENGTH, CALIBRATED, MEASURED = "plain_text", 256, 64, 24
DENSITIES = (0.8, 0.6, 0.9)
STEPS, DISTILLED = 100, 300  # steps of a block, and of the whole model in rows without another number in their name
TEMPERATURE = 2.0  # of rows without another in their name; that of ``factorize --distil`` is 1
OF_A_STEP, RATE = 2, 1e-4  # of distillation: texts of a step; 3e-4 was worse on held-out blocks after 60 steps
HELD_OUT = 32, 5  # paragraphs and articles that validate with --more
STRUCTURES = ("SecondOrder", "--model.retrain.removes", "structures", "--model.shape", "uniform")
MEASURED_LAYERS = ("Layers", "--model.prune.choice", "measured", "--model.prune.examples", texts.JUDGES)
METHODS: dict[str, list[object]] = {
    "structures": [*STRUCTURES],
    "even": [*STRUCTURES, "--model.round_to", 32],
    "reduce": [*STRUCTURES],
    "nearest": [*STRUCTURES],
    "components": ["SecondOrder"],
    "inputs": ["FWSVD", "--model.retrain.weighting", "inputs"],
    "svd": ["SVD"],
    "llm_pruner": ["LLMPruner", "--model.prune.keep_first", 4, "--model.prune.keep_last", 2],  # as in the paper
    "slicegpt": ["SliceGPT"],
    "layers": [*MEASURED_LAYERS],
    "free": [*STRUCTURES[:3], "--model.round_to", 64],
    "search": [*STRUCTURES, "--model.round_to", 64],
    "rounds": [*MEASURED_LAYERS],
}
ESTIMATES = ("reduce", "nearest")
ONE_MEASUREMENT = ("structures", "even", "free", "search", "components", *ESTIMATES)  # it serves all densities
ONLY_REFINED = ("rounds",)
NOT_REFINED = ("slicegpt", *ESTIMATES)  # SliceGPT's hidden states have other axes than the dense ones


def prepare(options: Any) -> None:
    """Write the calibration texts, and both kinds of measured texts as tokens, to ``--work``."""
    from transformers import AutoTokenizer

    folder = options.work / "data"
    if (folder / "measured.pt").exists() and (options.work / "mixed").exists():
        return
    tokenizer, wiki = AutoTokenizer.from_pretrained(options.backbone), options.data / "wikitext2"
    own = "\n".join(texts.wikitext(wiki / "validation.parquet"))
    news = texts.articles(options.data / "cnn_dailymail" / "validation.parquet", len(own))
    for name, text in (("data", own), ("mixed", own + "\n" + news)):
        (options.work / name).mkdir(parents=True, exist_ok=True)
        for split in ("train", "validation"):  # the second is asked for, and not read
            (options.work / name / f"{split}.txt").write_text(text + "\n")
    count, length = options.measured, options.length
    measured = {
        "wikitext2": texts.blocks(tokenizer, texts.wikitext(wiki / "test.parquet"), count, length),
        "news": texts.beginnings(tokenizer, options.data / "cnn_dailymail" / "test.parquet", count, length),
    }
    torch.save(measured, folder / "measured.pt")


def prepare_more(options: Any) -> None:
    """Write as many letters of encyclopaedia as of news to ``--work``, and others of both as validation texts."""
    squad, folder = options.data / "squad", options.work / "more"
    if (folder / "validation.txt").exists():
        return
    paragraphs = texts.column("context", squad / "train.parquet", squad / "train_extra.parquet")
    articles = texts.column("article", options.data / "cnn_dailymail" / "validation.parquet")
    wiki = texts.wikitext(options.data / "wikitext2" / "validation.parquet") + paragraphs[HELD_OUT[0] :]
    (folder / "train").mkdir(parents=True, exist_ok=True)
    (folder / "train" / "wiki.txt").write_text("\n".join(wiki) + "\n")
    (folder / "train" / "news.txt").write_text("\n".join(articles[: -HELD_OUT[1]]) + "\n")
    held_out = paragraphs[: HELD_OUT[0]] + articles[-HELD_OUT[1] :]
    (folder / "validation.txt").write_text("\n".join(held_out) + "\n")


def prepare_written(options: Any) -> None:
    """Let the dense model write texts to ``--work`` that begin as those of both kinds; those of --more validate."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = options.work / f"written-{options.written}"
    folder.mkdir(exist_ok=True)
    shutil.copy(options.work / "more" / "validation.txt", folder)
    device = "cuda" if options.accelerator == "gpu" else options.accelerator
    net = AutoModelForCausalLM.from_pretrained(options.backbone, dtype=torch.float32).eval().to(device)
    tokenizer, given = AutoTokenizer.from_pretrained(options.backbone), options.work / "mixed" / "train.txt"
    texts.write(net, tokenizer, given, folder / "train.txt", options.written, options.length)


def command_line(options: Any, method: str, mixed: int = 0, folder: str = "") -> Any:
    """Return the command ``factorize`` of a method, at every density; ``mixed``: so many blocks of both texts."""
    from lit_compress.cli.lines import read_line
    from lit_compress.cli.options import CommandLine

    examples = None if folder else mixed or options.calibrated
    words = [
        "--model", *METHODS[method], "--model.backbone", options.backbone,
        *common.source(TASK, options.work / (folder or ("mixed" if mixed else "data")), examples),
        "--data.max_length", options.length, "--trainer.accelerator", "cpu",
    ]  # fmt: skip
    return CommandLine(read_line("plan", [str(word) for word in words]))


def compressed(options: Any, method: str, densities: Sequence[float]) -> Iterator[tuple[float, Any, dict[str, float]]]:
    """Yield each density with the compressed model and facts about it: file density, seconds."""
    from lit_compress.calibration.statistics import OfModel
    from lit_compress.cli.factorizing import load_model, one_shot_stage
    from lit_compress.stages.compression import collected, compress
    from lit_compress.stages.units import UnitRemoval

    cli, device, start = command_line(options, method), torch.device("cpu"), time.process_time()
    parts = cli.build()
    task, data, dense = parts.method.task, parts.data, load_model(str(options.backbone), parts.method)
    statistics: list[tuple[list[str], dict[Any, Any]]] = []
    measured: dict[str, Any] = {}
    gathered = 0.0
    for density in densities:
        compression = one_shot_stage(cli.build().at(density).method).compression
        compression.check(dense)
        calibration = compression.calibration(dense, data)
        if method in ESTIMATES:
            assert calibration is not None
            other = OtherFactors(**vars(calibration.statistic), variant=method)
            calibration = replace(calibration, statistic=other)
        if not statistics or (calibration is not None and isinstance(calibration.statistic, OfModel)):
            statistics = list(collected(dense, calibration, task, device, most=inf))
            gathered, start = time.process_time() - start, time.process_time()
        if not measured or method not in ONE_MEASUREMENT:
            found = (compression.measure(dense, names, dict(sums)) for names, sums in statistics)
            measured = {name: value for part in found for _, tensors in part for name, value in tensors.items()}
            if method in ONE_MEASUREMENT:
                gathered, start = gathered + time.process_time() - start, time.process_time()
        more: dict[str, Any] = {}
        if method == "search":
            assert isinstance(compression, UnitRemoval)
            compression = search.Searched(compression.rule, compression.settings)
            more = search.search(options.work / "search", dense, compression, measured, data, parts.method.kind)
        net = compress(dense, compression, task, data, device, keep=True, measured=measured)
        facts = {
            "file_density": compression.density_left(net),
            "seconds": gathered + time.process_time() - start,
        } | more
        yield density, net, facts
        del net
        start = time.process_time()


def refined(options: Any, method: str, density: float, steps: int) -> tuple[Any, dict[str, Any]]:
    """Return the compressed model that is in ``--work`` after its refinement, and facts about that."""
    from lit_compress.calibration.walk import calibration_parts
    from lit_compress.cli.factorizing import load_model, one_shot_stage
    from lit_compress.models.storage import load_net
    from lit_compress.stages.refinement import refine_net

    cli = command_line(options, method, options.mixed)
    stage, parts = one_shot_stage(cli.build().at(density).method), cli.build()
    if method == "rounds":
        dense, own = load_model(str(options.backbone), parts.method), command_line(options, method).build().data
        return rounds.in_rounds(dense, own, stage.texts(parts.data), parts.method.kind, density, steps)
    dense, net = load_model(str(options.backbone), parts.method), load_net(options.work / f"{method}-{density:g}")
    start, kind = time.process_time(), parts.method.kind
    rows = calibration_parts(kind, stage.texts(parts.data), None)
    with tempfile.TemporaryDirectory() as states:
        behind = behind_kept(dense, net) if method == "layers" else None
        told = refine_net(dense, net, kind, rows, steps, Path(states), torch.device("cpu"), behind)
    return net.eval(), {"refined": told, "refine_seconds": time.process_time() - start}


def behind_kept(dense: Any, net: Any) -> list[int]:
    """Return behind which dense blocks the states are that the kept blocks of ``net`` learn, as Layers' stage does."""
    from lit_compress.models.sites import blocks

    first = [[next(block.parameters()) for *_, block in blocks(model)] for model in (dense, net)]
    kept = [next(i for i, value in enumerate(first[0]) if torch.equal(value, own)) for own in first[1]]
    return [*kept[1:], len(first[0])]


def distilled(options: Any, method: str, density: float) -> tuple[Any, dict[str, Any]]:
    """Return the model of ``--work`` that was refined on both kinds of texts after its distillation, and facts."""
    from lit_compress.cli.factorizing import load_model
    from lit_compress.run.distilling import Recovery

    folder = f"written-{options.written}" if options.written else "more" * options.more
    cli = command_line(options, method, 0 if folder else options.mixed, folder)
    cli.config.trainer.accelerator = options.accelerator
    cli.config.data.batch_size = OF_A_STEP
    parts, start = cli.build(), time.process_time()
    dense, model = load_model(str(options.backbone), parts.method), options.work / f"{method}-{density:g}-mixed"
    file = None if options.more else str(options.work / "mixed" / "train.txt")
    recovery = Recovery(distil=options.distil, rate=RATE, texts=file)
    losses: dict[str, Any] = {"temperature": options.temperature}
    losses |= {"alpha_layers": 0.0, "mask_padding": False, "relative": False} if options.outputs else {}
    with tempfile.TemporaryDirectory() as folder:
        curve = CSVLogger(folder, "curve")
        net, told = common.distilled(cli, dense, model, recovery, losses, precision="bf16-mixed", logger=curve)
        logged = Path(curve.log_dir) / "metrics.csv"  # of every tenth step
        rows = list(csv.DictReader(logged.read_text().splitlines())) if logged.exists() else []
    told["curve"] = [
        [int(row["step"]) + 1, float(row["train/distillation"])] for row in rows if row.get("train/distillation")
    ]
    return net.eval(), {"distilled": told | losses, "distil_seconds": time.process_time() - start}


def make(options: Any, method: str, densities: Sequence[float], steps: int) -> None:
    """Make the results of a method, or of the dense model, at some densities, in this process."""
    from lit_compress.cli.factorizing import load_model
    from lit_compress.models.accounting import count_params
    from lit_compress.models.storage import save_net

    torch.set_num_threads(options.threads)
    measured = torch.load(options.work / "data" / "measured.pt")

    def store(name: str, density: float, net: Any, facts: dict[str, Any]) -> None:
        folder = options.work / name
        folder.mkdir(exist_ok=True)
        save_net(net, folder)
        size = (folder / "model.safetensors").stat().st_size
        found = {key: texts.losses(net.eval(), rows) for key, rows in measured.items()}
        made = {
            "name": name, "method": method, "target": density, "losses": found, "bytes": size,
            "params": asdict(count_params(net)), "tokens": options.length, "calibrated": options.calibrated,
            "threads": options.threads, "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }  # fmt: skip
        common.write(options, name, made | facts | common.frame())
        print(name, facts, flush=True)

    if method == "dense":
        net = load_model(str(options.backbone), command_line(options, "svd").build().method)
        store(method, 1.0, net, {})
    elif steps:
        for density in densities:
            before = f"{method}-{density:g}"
            if options.distil:
                own = read(options, f"{before}-mixed")
                keys = ("file_density", "seconds", "mixed", "refined", "refine_seconds")
                net, facts = distilled(options, method, density)
                facts |= {key: own[key] for key in keys}
            else:
                net, facts = refined(options, method, density, steps)
                own = facts if method in ONLY_REFINED else read(options, before)
                facts |= {key: own[key] for key in ("file_density", "seconds")} | {"mixed": options.mixed}
            store(f"{before}-{ending(options)}", density, net, facts)
    else:
        for density, net, facts in compressed(options, method, densities):
            store(f"{method}-{density:g}", density, net, facts)


def ending(options: Any) -> str:
    """Return the end of the name of a refined row."""
    hotter = "" if options.temperature == TEMPERATURE else f"-at-{options.temperature:g}"
    longer = "" if options.distil == DISTILLED else f"-{options.distil}"
    alone = "-outputs" * options.outputs + "-more" * options.more
    written = f"-written-{options.written}" if options.written else ""
    return f"distilled{hotter}{longer}{alone}{written}" if options.distil else "mixed" if options.mixed else "refined"


def read(options: Any, name: str) -> dict[str, Any]:
    """Return a result that was made."""
    return next(result for result in common.load(options.results) if result["name"] == name)


def alone(*work: Any) -> None:
    """Call :func:`make` in a process of its own; its failure ends the script."""
    process = multiprocessing.get_context("spawn").Process(target=make, args=work)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(process.exitcode)


def add_sizes(parser: common.Parser) -> None:
    """Add the options on the number and the length of texts."""
    for name, usual in (("length", LENGTH), ("calibrated", CALIBRATED), ("measured", MEASURED)):
        parser.add_argument(f"--{name}", type=int, default=usual, help="to try the script")


def main() -> None:
    """Make what is missing: every method at all densities, then the same ones refined."""
    parser = common.parser(STUDY, __doc__, "backbone", "data", only=tuple(METHODS), work=Path("runs/decoder"))
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    parser.add_argument("--refine", nargs="+", type=int, default=(0, STEPS), help="steps; 0: without")
    parser.add_argument("--mixed", type=int, default=0, help="refine on so many blocks of both kinds of texts")
    parser.add_argument("--distil", type=int, default=0, help="steps, of the rows that --mixed has made")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, help="of both distributions of --distil")
    parser.add_argument("--outputs", action="store_true", help="--distil learns outputs alone, no hidden states")
    parser.add_argument("--more", action="store_true", help="--distil reads no text twice")
    parser.add_argument("--written", type=int, default=0, help="with --more: so many texts by the dense model instead")
    parser.add_argument("--accelerator", default="cpu", help="of --distil and --written: gpu, cpu")
    add_sizes(parser)
    options = parser.parse_args()
    options.list = None
    if options.distil:  # the refined models are read
        options.refine = (options.distil,)
    prepare(options)
    if options.more:
        prepare_more(options)
    if options.written:
        prepare_written(options)
    if common.missing(options, "dense"):
        alone(options, "dense", (1.0,), 0)
    for steps in options.refine:
        for method in (m for m in options.only if m not in (NOT_REFINED if steps else ONLY_REFINED)):
            ended = f"-{ending(options)}" if steps else ""
            todo = [d for d in options.densities if common.missing(options, f"{method}-{d:g}{ended}")]
            need = steps and method not in ONLY_REFINED
            if before := [d for d in todo if need and not (options.work / f"{method}-{d:g}").exists()]:
                alone(options, method, before, 0)
            if todo:
                alone(options, method, todo, steps)


if __name__ == "__main__":
    main()
