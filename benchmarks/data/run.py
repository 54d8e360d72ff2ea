"""The data pipeline: batches of like length against random ones; time and memory of reading and tokenising.

    python -m benchmarks.data.run --backbone DIR --data GLUE_DIR [--threads 1] [--rounds 7]

Writes benchmarks/data/results/pipeline.json; `python -m benchmarks.tables` makes the table from it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks import common, timing
from lit_compress.data.batching import step_order
from lit_compress.data.datamodule import DataModule, PaddedBatches
from lit_compress.models.backbones import load_net
from lit_compress.numerics.losses import task_loss
from lit_compress.tasks import inputs_of

STUDY = "data"
BATCH = 32
BATCHES = 6  # of a round, per order


def throughput(task: str, backbone: str, data: Path, rounds: int) -> dict[str, float]:
    """Return examples per second of a training step for both orders, and how many tokens the random one has more."""
    module = DataModule(task, backbone, str(data / task), batch_size=BATCH)
    module.setup("fit")
    encoded = module._split("train").encoded
    batches, lengths = PaddedBatches(encoded, int(module.tokenizer.pad_token_id)), encoded["length"][:]
    shuffled = list(range(len(lengths)))
    random.Random(0).shuffle(shuffled)
    orders = {
        "random": [shuffled[i : i + BATCH] for i in range(0, len(shuffled) - BATCH, BATCH)],
        "grouped": [rows for rows in step_order(lengths, BATCH) if len(rows) == BATCH],
    }
    tokens = {name: sum(BATCH * max(lengths[i] for i in rows) for rows in order) for name, order in orders.items()}
    net = load_net(backbone, module.record).train()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-5, fused=True)
    seconds: dict[str, list[float]] = {name: [] for name in orders}
    for number in range(rounds):
        for name, order in orders.items():
            start = time.perf_counter()
            for rows in order[number * BATCHES : (number + 1) * BATCHES]:
                batch = batches[rows]
                task_loss(net(**inputs_of(batch)).logits, batch["labels"], "classification").backward()
                optimizer.step()
                optimizer.zero_grad()
            seconds[name].append(time.perf_counter() - start)
    speed = {name: BATCHES * BATCH / median(times[1:]) for name, times in seconds.items()}
    random_tokens = tokens["random"] / len(orders["random"])
    grouped_tokens = tokens["grouped"] / len(orders["grouped"])
    return {**speed, "ratio": speed["grouped"] / speed["random"], "tokens_ratio": random_tokens / grouped_tokens}


def tokenise(rows: int, backbone: str, data: Path) -> dict[str, Any]:
    """Return seconds and peak memory of making a training set of ``rows`` sentences ready, in a process of its own."""
    with tempfile.TemporaryDirectory() as work:
        source = pq.read_table(data / "sst2" / "train.parquet")
        table = pa.concat_tables([source] * -(-rows // len(source))).slice(0, rows)
        pq.write_table(table, Path(work) / "train.parquet")
        pq.write_table(source.slice(0, 8), Path(work) / "validation.parquet")
        words = ["--backbone", backbone, "--data", work, "--inside"]
        found = timing.again(STUDY, *words, LIT_COMPRESS_CACHE=f"{work}/cache")
        return {"rows": rows, **json.loads(found)}


def inside(backbone: str, data: Path) -> None:
    """Make a set ready and print seconds and peak memory, above what was in use before."""
    module = DataModule("sst2", backbone, str(data))
    _ = module.max_length  # loads the tokenizer
    before, start = timing.peak_mib(), time.perf_counter()
    module.setup("fit")
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "memory_mib": timing.peak_mib(), "added_mib": timing.peak_mib() - before}))


def main() -> None:
    """Measure and write."""
    parser = common.parser(STUDY, __doc__, "backbone", "data", rounds=7)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    backbone, data = str(options.backbone), options.data
    torch.set_num_threads(options.threads)
    if options.inside:
        inside(backbone, data)
        return
    value = {
        "threads": options.threads,
        "throughput": {task: throughput(task, backbone, data, options.rounds) for task in ("sst2", "mrpc")},
        "tokenising": [tokenise(rows, backbone, data) for rows in (100_000, 400_000)],
    }
    timing.store(options, "pipeline", value)


if __name__ == "__main__":
    main()
