"""One index for two models: queries of the dense sentence model against documents of a small one, and the reverse.

    python -m benchmarks.embedding.across --backbone DIR --data DIR [--work DIR] [--only wide-0.5 ...]

Takes the exports that run.py left in ``--work``. Both models encode the queries and the documents of both searches of
run.py; the cosine is between the two vectors of a text. Writes benchmarks/embedding/results/across/<export>.json;
existing ones are kept.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.embedding import run
from benchmarks.embedding.estimates import CUSTOM, PAIR, opened

STUDY = "embedding/across"
EXPORTS = ("wide-0.5", "wide-0.25", "layers-0.5", "all-0.5")


def found(data: Any, nets: dict[str, Any]) -> dict[str, float]:
    """Return the nDCG@10 of every pair of models, ``<queries>/<documents>``, and the cosines of their vectors."""
    from lit_compress.evaluation.evaluate import outputs_of
    from lit_compress.evaluation.metrics import bind, build_metrics
    from lit_compress.tasks import task_type

    [loader], kind, values = data.val_dataloader(), task_type(data.record), dict[str, float]()
    made = {
        name: list(outputs_of(net, data, loader, f"vectors, {name}")) for name, net in nets.items()
    }  # [rows, 2, width] a batch, of a query and its document
    for queries, documents in product(nets, nets):
        metrics = build_metrics(data.record, alone=True)
        bind(metrics, loader.dataset.rows)
        for (batch, one), (_, other) in zip(made[queries], made[documents], strict=True):
            kind.observe(metrics, torch.stack([one[:, 0], other[:, 1]], 1), batch)
        values[f"{queries}/{documents}"] = float(metrics.compute()["ndcg_at_10"])
    one, other = (torch.cat([vectors for _, vectors in batches]) for batches in made.values())
    cosines = torch.nn.functional.cosine_similarity(one, other, dim=-1).mean(0)
    return values | {"cosine_queries": float(cosines[0]), "cosine_documents": float(cosines[1])}


def main() -> None:
    """Measure what is missing."""
    from lit_compress.cli.factorizing import load_model
    from lit_compress.models.storage import load_net

    parser = common.parser(STUDY, __doc__, "backbone", "data", only=EXPORTS, work=Path("runs/embedding"))
    options = parser.parse_args()
    options.list = None
    torch.set_num_threads(options.threads)
    for name in options.only:
        if not common.missing(options, name):
            continue
        texts = {
            key: opened(options, *CUSTOM, *PAIR, "--data.path", folder).build()
            for key, folder in run.searches(options).items()
        }
        dense = load_model(str(options.backbone), next(iter(texts.values())).method)
        nets = {"dense": dense.eval(), "small": load_net(options.work / name).eval()}
        made = {"name": name, "threads": options.threads}
        made |= {key: found(job.data, nets) for key, job in texts.items()}
        common.write(options, name, made | common.frame())
        print(name, made, flush=True)


if __name__ == "__main__":
    main()
