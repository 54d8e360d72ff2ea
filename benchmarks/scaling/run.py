"""What each method keeps and sends per step, measured on 1, 2 and 4 CPU processes under DDP and FSDP2.

    python -m benchmarks.scaling.run [--only LPAF CoFi] [--shapes 64 128]

Counts the bytes of parameters, moments, scores and teacher on every rank, and the bytes that a step hands to the
collectives of torch.distributed (benchmarks/scaling/traffic.py), of small BERTs of two widths with random weights. The
ranks are forks of one process. Writes benchmarks/scaling/results/METHOD-WIDTH.json.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common, timing
from benchmarks.ranks import ranks

STUDY = "scaling"
PRUNE = ["--model.prune.epochs", "1", "--model.retrain.epochs", "1"]
METHODS: dict[str, list[str]] = {
    "SVD": ["--model.retrain.epochs", "1"],
    "LPAF": PRUNE,
    "LoSparse": ["--model.prune.epochs", "1", "--model.prune.interval", "2"],
    "Movement": ["--model.prune.epochs", "1"],
    "CoFi": PRUNE,
    "SP3": ["--model.prune.epochs", "1", "--model.prune.tokens", "100"],
    "SecondOrder": ["--model.retrain.epochs", "1"],
    "FLOP": ["--model.prune.epochs", "1"],
    "BlockMovement": [*PRUNE, "--model.prune.block", "8"],
    "Theseus": ["--model.replace.epochs", "1"],
    "SliceGPT": ["--model.prune.epochs", "1"],
    "LLMPruner": ["--model.prune.epochs", "1"],
}
WIDTHS = (64, 128)
PROCESSES = ((1, "ddp"), (2, "ddp"), (4, "ddp"), (2, "fsdp2"), (4, "fsdp2"))
WORDS = "a film of great bad warm dull charm wit the plot is so not very fine poor story cast and but".split()  # noqa: SIM905


def write_inputs(
    folder: Path, width: int, layers: int = 2, words: tuple[int, int] = (6, 6), examples: int = 96, dropout: float = 0.1
) -> None:
    """Write a model with a tokenizer, and ``examples`` texts of so many ``words``, at least and at most.

    The first word says the class. Devices draw other numbers for ``dropout``, so that only without it their runs are
    the same.
    """
    from transformers import BertTokenizer

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    net = folder / "net"
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(net)
    made = timing.random_bert(
        timing.MINILM, vocab_size=128, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=max(4, width // 64), intermediate_size=4 * width,
        max_position_embeddings=max(32, words[1] + 2), hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    made.config.id2label = {0: "negative", 1: "positive"}
    made.config.label2id = {"negative": 0, "positive": 1}
    made.save_pretrained(net)
    rng = random.Random(0)
    for split, rows in (("train", examples), ("validation", 16)):
        texts = [[("bad", "great")[i % 2], *rng.choices(WORDS, k=rng.randint(*words) - 1)] for i in range(rows)]
        lines = [{"sentence": " ".join(text), "label": i % 2} for i, text in enumerate(texts)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def measure(method: str, width: int) -> list[dict[str, Any]]:
    """Return what every stage keeps and sends, for every number of processes."""
    rows = []
    with tempfile.TemporaryDirectory() as work:
        place = Path(work)
        write_inputs(place, width)
        for number, strategy in PROCESSES:
            run = place / f"{number}-{strategy}"
            words = [
                "fit", "--model", method, "--model.density", "0.5", *METHODS[method], "--model.backbone",
                str(place / "net"), "--model.teacher", str(place / "net"), "--data.task", "sst2", "--data.path", work,
                "--data.batch_size", str(16 // number), "--trainer.accelerator", "cpu", "--run_dir", str(run),
                "--trainer.enable_progress_bar", "false", "--trainer.logger", "false",
                "--trainer.callbacks+=benchmarks.scaling.traffic.Traffic",
                *(["--trainer.devices", str(number), "--trainer.strategy", strategy] if number > 1 else []),
            ]  # fmt: skip
            ranks(words, number, lambda: None, place / "said")
            for file in sorted(run.glob("*/traffic0.json")):
                every = [json.loads(other.read_text()) for other in sorted(file.parent.glob("traffic*.json"))]
                most = max(every, key=lambda found: sum(found["kept"].values()))
                rows.append({"stage": file.parent.name, "processes": number, "strategy": strategy, **every[0],
                             "kept": most["kept"]})  # fmt: skip
                print(method, width, rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure all methods that have no result."""
    parser = common.parser(STUDY, __doc__, only=tuple(METHODS), shapes=tuple(map(str, WIDTHS)))
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    import torch

    import lit_compress.cli.commands
    import lit_compress.methods  # noqa: F401  imported once, before the ranks are forked

    torch.set_num_threads(1)
    for method in options.only:
        for width in map(int, options.shapes):
            name = f"{method}-{width}"
            if not (options.results / f"{name}.json").exists():
                rows = measure(method, width)
                common.write(options, name, {"name": name, "method": method, "width": width, "rows": rows,
                                             **common.frame()})  # fmt: skip


if __name__ == "__main__":
    main()
