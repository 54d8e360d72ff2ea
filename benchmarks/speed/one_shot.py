"""Seconds and peak memory of the whole command `factorize`, calibration by K-FAC and all checks included.

    python -m benchmarks.speed.one_shot [--threads 2] [--shapes minilm-l6-h384 bert-base] [--examples 1024]

Random BERTs with the vocabulary of a published one, density 0.16; 1,024 texts calibrate, 872 give the metric, as many
tokens as SST-2's texts have at their longest. What a tiny model takes is measured, too: that is the libraries. Writes
benchmarks/speed/results/one_shot/<shape>.json.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import common, timing

SCRIPT = "speed/one_shot"
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VOCABULARY, TESTED, TOKENS = 30522, 872, (4, 64)


def write_inputs(folder: Path, settings: dict[str, int], shape: str, examples: int) -> None:
    """Write a model with a tokenizer of whole words, and texts of random words."""
    from transformers import BertTokenizer

    words = [f"w{i}" for i in range(VOCABULARY - 5)]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    net = timing.random_bert(shape, vocab_size=VOCABULARY, **settings)
    net.config.id2label, net.config.label2id = {0: "negative", 1: "positive"}, {"negative": 0, "positive": 1}
    net.save_pretrained(folder / "net")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "net")
    rng = random.Random(0)
    for split, rows in (("train", examples), ("validation", TESTED)):
        lines = [
            {"sentence": " ".join(rng.choices(words, k=rng.randint(*TOKENS) - 2)), "label": i % 2} for i in range(rows)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def measure(options: Any, shape: str, settings: dict[str, int]) -> dict[str, Any]:
    """Return seconds, peak memory and the bytes of the model of one command."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_inputs(folder, settings, shape, options.examples)
        start = time.perf_counter()
        peak = common.command(
            options, "factorize", folder / "net", folder / "out", "--density", 0.16, "--data.task", "sst2",
            "--data.path", folder, "--model.retrain.calibration_examples", options.examples,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        report = json.loads((folder / "out" / "report.json").read_text())
        return {
            "seconds": seconds, "peak_mib": peak, "net_mib": 4 * report["dense"]["params"]["total"] / 2**20,
            "density": report["compressed"]["density"],
        }  # fmt: skip


def main() -> None:
    """Measure every shape that is asked for and store it."""
    parser = common.parser(SCRIPT, __doc__, shapes=(timing.MINILM, timing.BERT_BASE), examples=1024)
    options = parser.parse_args()
    options.list = None
    libraries = measure(options, timing.MINILM, TINY)
    for shape in options.shapes:
        found = measure(options, shape, {})
        setting = {"threads": options.threads, "examples": options.examples}
        timing.store(options, shape, found, setting=setting, tiny={k: libraries[k] for k in ("seconds", "peak_mib")})


if __name__ == "__main__":
    main()
