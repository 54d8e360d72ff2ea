"""Do two and four processes, under DDP and FSDP2, end where one process ends with all of their examples?

    python -m benchmarks.reliability.agreement [--only LPAF CoFi] [--noise] [--work DIR]

Every method runs on one process, and on 2 and 4 under both strategies, on the same global batches of 44 training rows
in batches of 8, and 23 dev rows: neither divides. The model has no dropout and the texts have one length, so that
nothing differs between the runs but who computes what. Of every stage, the steps, the dev metric, the weights, what
was removed, and what the method keeps next to the model in its checkpoint (scores, gates, multipliers) are compared.
With --noise, runs on one process whose model differs by a ten-millionth are compared, too: what rounding alone does.
Writes benchmarks/reliability/results/agreement/METHOD.json.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.ranks import ranks
from benchmarks.reliability import tiny

SCRIPT = "reliability/agreement"
PROCESSES = ((2, "ddp"), (2, "fsdp2"), (4, "ddp"), (4, "fsdp2"))
BATCH = 8
NOISE = 1e-7
PRUNE = ["--model.prune.epochs=3", "--model.prune.learning_rate=1e-4"]
RETRAIN = ["--model.retrain.epochs=2", "--model.retrain.learning_rate=1e-4"]
OWN = {
    "BlockMovement": ["--model.prune.block=8"],
    "CoFi": ["--model.prune.init=finetuned", "--model.distil.epochs=1"],
    # the first rows go by the first gradients: without labels these are rounding noise, as the model equals its teacher
    "CoFiLoSparse": ["--model.prune.init=finetuned", "--model.distil.epochs=1", "--model.prune.interval=2",
                     "--model.distillation.alpha_labels=0.5"],
    "ITP": ["--model.prune.interval=2"],
    "LoSparse": ["--model.prune.interval=2"],
    "PLATON": ["--model.prune.interval=2", "--model.prune.start=0.2"],
    "SP3": ["--model.prune.start=0.2", "--model.prune.target_warmup=0.3", "--model.prune.structure_start=0.5",
            "--model.prune.tokens=200"],
    "Theseus": ["--model.replace.epochs=3", "--model.replace.learning_rate=1e-4"],
}  # fmt: skip


def prepare(place: Path) -> None:
    """Write the model, without dropout and with weights that tell words apart, and texts of one length."""
    tiny.prepare(place)
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = place / "net"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(
        folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
        id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1},
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    rng = random.Random(0)
    (place / "texts").mkdir(exist_ok=True)
    for split, rows in (("train", 44), ("validation", 23)):
        lines = [{"sentence": " ".join(rng.choices(tiny.WORDS, k=7)), "label": i % 2} for i in range(rows)]
        (place / "texts" / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def words(method: str, place: Path, number: int, strategy: str, run: Path) -> list[str]:
    """Return the words of a run of the method on so many processes."""
    from inspect import signature

    from lit_compress import methods

    own = signature(getattr(methods, method)).parameters
    given = [word for word in (*PRUNE, *RETRAIN) if word.split(".")[1] in own]
    several = ["--trainer.strategy", strategy, "--trainer.devices", str(number)] if number > 1 else []
    return [
        "fit", f"--model={method}", f"--model.backbone={place / 'net'}", f"--model.teacher={place / 'net'}",
        "--model.density=0.5", *given, *OWN.get(method, []), "--data.task=sst2", f"--data.path={place / 'texts'}",
        f"--data.batch_size={BATCH // number}", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
        "--trainer.logger=false", f"--run_dir={run}", *several,
    ]  # fmt: skip


def keep_checkpoints() -> None:
    """Let a run leave the checkpoints of finished stages."""
    from lit_compress.run.folder import Run

    Run.remove_checkpoints = lambda self, stage: None  # type: ignore[method-assign]


def distance(one: dict[str, Any], other: dict[str, Any]) -> float | None:
    """Return ||a - b|| / ||a|| over all tensors of the same names together; None if names, shapes or infinities differ.

    Adam moves a weight without a gradient, as the bias of keys, by rounding noise as far as any other. So no tensor is
    judged by itself.
    """
    if {name: value.shape for name, value in one.items()} != {name: value.shape for name, value in other.items()}:
        return None
    difference = size = 0.0
    for name, value in one.items():
        first, second = value.double(), other[name].double()
        finite = first.isfinite()
        if not (finite == second.isfinite()).all():  # e.g. scores of what can no longer be removed
            return None
        difference += float((first - second)[finite].square().sum())
        size += float(first[finite].square().sum())
    return (difference / max(size, 1e-24)) ** 0.5


def compare(one: Path, other: Path) -> list[dict[str, Any]]:
    """Return how far the stages of two runs are from each other."""
    from safetensors.torch import load_file

    from lit_compress.run.trainer import read_checkpoint

    rows = []
    records = [json.loads((run / "stages.json").read_text()) for run in (one, other)]
    for expected, record in zip(*records, strict=True):
        name = record["name"]
        if name == "dense":
            continue
        nets = [load_file(run / name / "net" / "model.safetensors") for run in (one, other)]
        shapes = [(run / name / "net" / "structure.json").read_text() for run in (one, other)]
        kept: list[dict[str, Any]] = []
        for run in (one, other):
            file = run / name / "best.ckpt"
            state = read_checkpoint(file)["state_dict"] if file.is_file() else {}
            kept.append({key: value for key, value in state.items() if not key.startswith("net.")})
        same = nets[0].keys() == nets[1].keys() and all(nets[0][key].shape == nets[1][key].shape for key in nets[0])
        rows.append({
            "stage": name, "steps": record["steps"] == expected["steps"],
            "metrics": {key: record["metric"][key] - value for key, value in expected["metric"].items()},
            "weights": distance(*nets), "structure": shapes[0] == shapes[1],
            "zeros": sum(int(((nets[0][key] == 0) != (nets[1][key] == 0)).sum()) for key in nets[0]) if same else None,
            "numbers": sum(value.numel() for value in nets[0].values()),
            "beside": distance(*kept) if kept[0] or kept[1] else None, "beside_names": len(kept[0]),
        })  # fmt: skip
    return rows


def disturb(net: Path, seed: int) -> None:
    """Change the weights of a model by 1e-7 of their values, at random."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(seed)
    file = net / "model.safetensors"
    tensors = {name: value * (1 + NOISE * torch.randn_like(value)) for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def measure(method: str, place: Path, noise: bool) -> dict[str, Any]:
    """Return how far the runs of a method on several processes are from its run on one."""
    runs = place / method
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir()
    found = []
    for number, strategy in ((1, "ddp"), *PROCESSES):
        run = runs / f"{number}-{strategy}"
        ranks(words(method, place, number, strategy, run), number, keep_checkpoints, runs / "said")
        if number > 1:
            for row in compare(runs / "1-ddp", run):
                found.append({"processes": number, "strategy": strategy, **row})
                print(method, found[-1], flush=True)
    for seed in (1, 2, 3) if noise else ():
        run = runs / f"noise-{seed}"
        disturb(place / "net", seed)
        ranks(words(method, place, 1, "noise", run), 1, keep_checkpoints, runs / "said")
        for row in compare(runs / "1-ddp", run):
            found.append({"processes": 1, "strategy": "noise", **row})
            print(method, found[-1], flush=True)
    prepare(place)  # the model as it was
    shutil.rmtree(runs)
    return {"name": method, "batch": BATCH, "rows": found}


def main() -> None:
    """Measure the methods that have no result yet."""
    parser = common.parser(SCRIPT, __doc__, only=tiny.METHODS)
    parser.add_argument("--noise", action="store_true", help="also compare runs that differ by rounding alone")
    parser.add_argument("--work", type=Path, help="folder of the runs (default: a temporary one)")
    options = parser.parse_args()
    options.list = None
    place = (options.work or Path(tempfile.mkdtemp(prefix="agreement-"))).absolute()
    prepare(place)
    for method in options.only:
        if common.missing(options, method):
            common.write(options, method, measure(method, place, options.noise) | common.frame())
    if options.work is None:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
