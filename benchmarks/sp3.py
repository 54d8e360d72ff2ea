"""SP3's claims on MiniLM: PCA against identity projections and CoFi, calibration tokens, presets; and its speed.

    python benchmarks/sp3.py --backbone DIR --data GLUE_DIR [--teachers DIR] [--work DIR] [--tasks sst2]
    python benchmarks/sp3.py --parts speed calibration --threads 1

``--teachers``: a folder with dense-<task>/dense/net, e.g. the --work of cofi.py, whose dense nets of SST-2 and MRPC
stand behind the results; where there is none a dense net is trained. Writes benchmarks/results/sp3/*.json; existing
ones are kept, so the script can be stopped and started again. `python benchmarks/tables.py` makes tables and figures.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cofi import RATES
from common import RESULTS, command, dense_net, last_scalar, peak_mib, report_of, write

from lit_compress.analysis.widths import width_table
from lit_compress.export.report import commit, hardware, versions
from lit_compress.surgery import load_net

# Epochs of the dense net, of pruning (CoFi trains half as long again when it is cut, in the paper as long), examples:
# 624 to 1,000 updates of pruning. In half of them gates do not arrive, and the exact budget cuts what they left open.
TASKS = {"stsb": (3, 4, 3668), "mrpc": (5, 4, None), "rte": (5, 4, None), "sst2": (2, 4, 4000)}
BATCH = 16
SMALL = ("rte", "mrpc", "stsb")
RATE = 1e-4
SEEDS = (1, 2, 3)
HIDDEN = ("hidden",)
DIMENSIONS = ("hidden", "qk", "vo", "ffn")
GOALS = {"calibration seconds": 60, "calibration MiB over the net": 1024, "step": 1.6, "speedup at 6 %": 4.0}


@dataclass(frozen=True)
class Cell:
    """One run: what differs from the method's defaults."""

    name: str
    method: str
    density: float
    options: tuple[str, ...] = ()


def gates(*names: str) -> tuple[str, ...]:
    """Return the option that names the gates."""
    return ("--model.prune.gates", f"[{','.join(names)}]")


def rates(pair: str) -> tuple[str, ...]:
    """Return the options for one of cofi.py's pairs of rates."""
    gate, multiplier = RATES[pair]
    return ("--model.prune.gate_learning_rate", str(gate), "--model.prune.multiplier_learning_rate", str(multiplier))


IDENTITY = ("--model.prune.projections", "identity")
# of gates, for some hundred updates where the paper has thousands
GATED: dict[str, list[object]] = {
    "SP3": [
        "--model.prune.log_alpha", 5, "--model.prune.gate_learning_rate", 0.2, "--model.prune.start", 0.02,
        "--model.prune.structure_start", 0.02, "--model.prune.multiplier_learning_rate", 0.2,
        "--model.prune.target_warmup", 0.5,
    ],
    "CoFi": [  # as in cofi.py
        "--model.prune.init", "finetuned", *rates(""), "--model.prune.target_warmup", 0.4,
    ],
}  # fmt: skip
CELLS = [
    cell
    for density, label, own in ((0.12, "0.12", ()), (0.06, "0.06", ()), (0.29, "hidden-0.29", gates(*HIDDEN)))
    for cell in (
        Cell(f"pca-{label}", "SP3", density, own),
        Cell(f"identity-{label}", "SP3", density, (*own, *IDENTITY)),
    )
]
CELLS += [
    Cell("cofi-hidden-0.29", "CoFi", 0.29, gates(*HIDDEN)),
    Cell("cofi-0.12", "CoFi", 0.12),
    Cell("cofi-0.06", "CoFi", 0.06),
]
# only on the first task: the paper's Table 3, dimensions only; the program's way; the slower pair of cofi.py's rates
# where CoFi does worst; the paper's Table 4, tokens
ONCE = [
    Cell("pca-dimensions-0.12", "SP3", 0.12, gates(*DIMENSIONS)),
    Cell("identity-dimensions-0.12", "SP3", 0.12, (*gates(*DIMENSIONS), *IDENTITY)),
    Cell("official-0.06", "SP3", 0.06, ("--model.fidelity", "official")),
    Cell("cofi-hidden-slow-0.29", "CoFi", 0.29, (*gates(*HIDDEN), *rates("-slow"))),
    *(Cell(f"tokens-{n}-0.06", "SP3", 0.06, ("--model.prune.tokens", str(n))) for n in (2048, 8192)),
]


def train(options: argparse.Namespace) -> None:
    """Run every cell of every task that is missing."""
    for task in options.tasks:
        dense_epochs, epochs, examples = TASKS[task]
        examples, epochs = options.examples or examples, options.epochs or epochs
        source = ["--data.task", task, "--data.path", options.data / task]
        shared = [
            "--model.backbone", options.backbone, *source, "--trainer.precision", options.precision,
            "--trainer.enable_progress_bar", "false", *(["--data.train_examples", examples] if examples else []),
        ]  # fmt: skip
        folder = options.teachers or options.work
        dense = dense_net(folder / f"dense-{task}", *shared, epochs=dense_epochs, rate=RATE, threads=options.threads)
        for cell in [*CELLS, *(ONCE if task == next(iter(TASKS)) else [])]:
            if options.cells and cell.name not in options.cells:
                continue
            several = task in SMALL and cell in CELLS and cell.density != 0.12
            for seed in SEEDS if several else SEEDS[:1]:
                if options.seeds and seed not in options.seeds:
                    continue
                name = f"{task}-{cell.name}-{seed}"
                if (RESULTS / options.results / f"{name}.json").exists():
                    continue
                run = options.work / name
                stages = {"prune": epochs} | ({} if cell.method == "SP3" else {"retrain": max(1, epochs // 2)})
                trained: list[object] = []
                for stage, count in stages.items():
                    trained += [f"--model.{stage}.epochs", count, f"--model.{stage}.learning_rate", RATE]
                command(
                    "fit", "--model", cell.method, "--model.density", cell.density, *shared, *trained,
                    *GATED[cell.method], *cell.options, "--data.batch_size", BATCH, "--model.teacher", dense,
                    "--trainer.gradient_clip_val", 1.0, "--seed_everything", seed, "--run_dir", run,
                    "--ckpt_path", "last", threads=options.threads,
                )  # fmt: skip
                widths = width_table(load_net(run / "export")) if cell.method == "SP3" else None
                expected = last_scalar(run, "train/density")
                result = {"name": name, "cell": cell.name, "seed": seed, "expected": expected, "widths": widths}
                result |= report_of(run)
                write(options.results, name, result)


# ------------------------------------------------------------------------------------------------- speed


def random_bert(**settings: int) -> Any:
    """Return a BERT with random weights; BERT-base by default."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **settings)).eval()


def batches_of(examples: int, length: int, size: int = 32) -> list[dict[str, torch.Tensor]]:
    """Return random examples of one length."""
    ids = torch.randint(5, 30000, (examples, length), generator=torch.Generator().manual_seed(0))
    return [
        {
            "input_ids": part,
            "attention_mask": torch.ones_like(part),
            "index": torch.arange(i * size, i * size + len(part)),
        }
        for i, part in enumerate(ids.split(size))
    ]


def calibration(examples: int, length: int) -> dict[str, Any]:
    """Time the calibration of BERT-base, and its memory over a forward of the same batch."""
    from lit_compress.calibration import bases_of, collect_grams

    net, batches = random_bert(), batches_of(examples, length)
    with torch.inference_mode():
        net(input_ids=batches[0]["input_ids"])
    before, start = peak_mib(), time.perf_counter()
    grams = collect_grams(net, batches, min(4096, examples * length))
    middle = time.perf_counter()
    bases_of(grams)
    end = time.perf_counter()
    return {
        "seconds": {"forwards": middle - start, "projections": end - middle, "all": end - start},
        "mib_over_the_net": peak_mib() - before, "examples": examples, "length": length,
    }  # fmt: skip


def narrow_bert(net: Any, density: float) -> Any:
    """Return ``net`` as SP3 leaves it at a density, the same fraction of every dimension, heads and layers whole."""
    from lit_compress.export.fuse import fuse
    from lit_compress.projected import Form, Places, gate_shapes, gated_size, identity_bases, insert_projections

    form = Form(DIMENSIONS)
    insert_projections(net, identity_bases(net), form)
    shapes, size = gate_shapes(net, form), gated_size(net, form)

    def kept(fraction: float) -> dict[str, torch.Tensor]:
        return {n: (torch.arange(units) < fraction * units).expand(groups, -1) for n, (groups, units) in shapes.items()}

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if size.count(kept(middle)) <= density * size.total else (low, middle)
    heads = net.config.num_attention_heads
    z = {n: mask.float().repeat(1, heads if n in ("qk", "vo") else 1) for n, mask in kept(low).items()}
    Places(net, form).put(z)
    return fuse(net)


def speed(rounds: int) -> dict[str, Any]:
    """Time forwards of BERT-base dense and at 6 %, batch 1 and 32, length 128, interleaved."""
    from lit_compress.budget import density, latency

    dense = random_bert()
    small = narrow_bert(random_bert(), 0.06)
    found: dict[str, Any] = {"density": density(small)}
    for batch in (1, 32):
        times = latency([dense, small], 128, batch, torch.get_num_threads(), rounds)
        found[f"batch {batch}"] = {"dense": times[0], "6 %": times[1], "ratio": times[0]["median"] / times[1]["median"]}
    return found


def step(rounds: int) -> dict[str, Any]:
    """Time a step with gates, projections and matched hidden states against a dense distillation step, interleaved."""
    from lit_compress.layers import HardConcrete
    from lit_compress.losses import distillation_loss, lagrangian, layer_distillation_loss, matched_layers_loss
    from lit_compress.projected import Places, gate_shapes, gated_size, identity_bases, insert_projections

    settings = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    teacher, dense, gated = (random_bert(**settings) for _ in range(3))
    insert_projections(gated, identity_bases(gated))
    for name, parameter in gated.named_parameters():
        frozen = ".weight" in name and "pooler" not in name and "classifier" not in name
        parameter.requires_grad_(not frozen)
    shapes = gate_shapes(gated)
    modules = {n: HardConcrete(*s, 10.0, copies=12 if n in ("qk", "vo") else 1) for n, s in shapes.items()}
    places, size, price = Places(gated), gated_size(gated), torch.zeros(1, requires_grad=True)
    batch = batches_of(32, 64)[0]
    inputs = {n: batch[n] for n in ("input_ids", "attention_mask")}
    dense.train()
    gated.train()

    def one(net: Any, own: bool) -> None:
        if own:
            places.put({n: gate.draw() for n, gate in modules.items()})
        out = net(**inputs, output_hidden_states=True)
        with torch.no_grad():
            target = teacher(**inputs, output_hidden_states=True)
        loss = distillation_loss(out.logits, target.logits, "classification")
        compare = matched_layers_loss if own else layer_distillation_loss
        loss = loss + compare(out.hidden_states, target.hidden_states, batch["attention_mask"])
        if own:
            loss = loss + lagrangian(size.density({n: g.log_alpha for n, g in modules.items()}), 0.5, price, price)
        loss.backward()
        for parameter in net.parameters():
            parameter.grad = None

    seconds: dict[str, list[float]] = {"dense": [], "gated": []}
    for round_ in range(rounds + 2):
        for name, net in (("dense", dense), ("gated", gated)):
            start = time.perf_counter()
            one(net, name == "gated")
            if round_ >= 2:
                seconds[name].append(time.perf_counter() - start)
    ratios = sorted(b / a for a, b in zip(seconds["dense"], seconds["gated"], strict=True))
    return {"seconds": seconds, "ratio": {"median": median(ratios), "min": ratios[0], "max": ratios[-1]}}


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--teachers", type=Path)
    parser.add_argument("--work", default="runs/sp3", type=Path)
    parser.add_argument("--results", default="sp3", help="folder under benchmarks/results")
    parser.add_argument("--threads", default=1, type=int)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--cells", nargs="*", help="names of cells; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 1, and 2 and 3 where a cell has them")
    parser.add_argument("--epochs", type=int, help="of pruning; default: the task's")
    parser.add_argument("--examples", type=int, help="for training; default: the task's")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calibration_examples", type=int, default=512)
    parser.add_argument("--parts", nargs="+", default=["train", "speed", "step", "calibration"])
    options = parser.parse_args()
    if "train" in options.parts:
        if not (options.backbone and options.data):
            parser.error("--backbone and --data are needed to train")
        train(options)
    torch.set_num_threads(options.threads)
    parts = {
        "speed": lambda: speed(options.rounds),
        "step": lambda: step(options.rounds),
        "calibration": lambda: calibration(options.calibration_examples, 128),
    }
    frame = {"goals": GOALS, "versions": versions(), "hardware": hardware(), "commit": commit()}
    for name in [part for part in options.parts if part in parts]:
        file = f"{name}-cpu-{options.threads}"
        if not (RESULTS / options.results / f"{file}.json").exists():
            found = parts[name]()
            write(options.results, file, {"name": file, "part": name, "threads": options.threads, **found, **frame})
            print(file, {k: v for k, v in found.items() if k not in ("seconds",)}, flush=True)


if __name__ == "__main__":
    main()
