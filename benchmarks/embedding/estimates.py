"""Other estimates of the Fisher information than K-FAC's for a sentence model, whose vectors are means over tokens.

    python -m benchmarks.embedding.estimates --backbone DIR --data DIR [--work DIR] [--only kfac reduce ...]

second_order/estimates.py has the variants. The loss of a vector reaches the token t of a text with T tokens by about
1 / T, the same for all tokens, so ``reduce`` is exact at the last matrix, and ``length`` counts every text once. 512
texts of the study's texts without labels calibrate: sentences of STS-B, questions and paragraphs of SQuAD. Nothing is
trained. Scores are similarity on STS-B's dev pairs and both searches of run.py.

Writes benchmarks/embedding/results/estimates/<variant>-<density>.json; existing ones are kept.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.embedding import run
from benchmarks.second_order.estimate import estimated_loss
from benchmarks.second_order.estimates import OtherFactors

STUDY = "embedding/estimates"
VARIANTS = ("kfac", "length", "reduce", "nearest")
DENSITIES = (0.5, 0.25, 0.1)
TEXTS = 512
CUSTOM = ("--data.task", "custom", "--data.custom.kind", "embedding", "--data.max_length", 256)
PAIR = ("--data.custom.text", "[query,document]")


def opened(options: Any, *words: object) -> Any:
    """Return the command for a sentence model with some data."""
    from lit_compress.cli.lines import read_line
    from lit_compress.cli.options import CommandLine

    own = ("--model", "SecondOrder", "--model.backbone", options.backbone, "--trainer.accelerator", "cpu")
    return CommandLine(read_line("plan", [str(word) for word in (*own, *words)]))


def scores(options: Any, net: Any, questions: int = run.MANY) -> dict[str, float]:
    """Return the similarity and the nDCG@10 of both searches, one of so many questions."""
    from lit_compress.evaluation.evaluate import evaluate

    found = {}
    for name, folder in run.searches(options, questions).items():
        found[name] = evaluate(net, opened(options, *CUSTOM, *PAIR, "--data.path", folder).build().data)
    stsb = opened(options, *common.source("stsb_embedding", options.data / "glue" / "stsb")).build().data
    searched = {name: values["val/ndcg_at_10"] for name, values in found.items()}
    return {"spearman": evaluate(net, stsb)["val/spearman"], **searched}


def main() -> None:
    """Make what is missing."""
    from lit_compress.cli.factorizing import load_model, one_shot_stage
    from lit_compress.stages.compression import collected, compress

    parser = common.parser(STUDY, __doc__, "backbone", "data", only=VARIANTS, work=Path("runs/embedding"))
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    parser.add_argument("--texts", type=int, default=TEXTS)
    options = parser.parse_args()
    options.list = None
    torch.set_num_threads(options.threads)
    cli = opened(options, *CUSTOM, "--data.path", run.texts_alone(options),
                 "--model.retrain.calibration_examples", options.texts)  # fmt: skip
    parts, device = cli.build(), torch.device("cpu")
    dense = load_model(str(options.backbone), parts.method)
    for variant in options.only:
        measured: dict[str, Any] = {}
        for density in (d for d in options.densities if common.missing(options, f"{variant}-{d:g}")):
            compression = one_shot_stage(cli.build().at(density).method).compression
            if not measured:
                calibration = compression.calibration(dense, parts.data)
                assert calibration is not None
                other = OtherFactors(**vars(calibration.statistic), variant=variant)
                calibration = replace(calibration, statistic=other)
                for names, sums in collected(dense, calibration, parts.method.task, device, most=inf):
                    for _, tensors in compression.measure(dense, names, dict(sums)):
                        measured |= tensors
            net = compress(dense, compression, parts.method.task, parts.data, device, keep=True, measured=measured)
            made = {
                "name": f"{variant}-{density:g}", "variant": variant, "density": density, "texts": options.texts,
                "estimated": estimated_loss(dense, compression, measured), "threads": options.threads,
                "scores": scores(options, net.eval()),
            }  # fmt: skip
            common.write(options, made["name"], made | common.frame())
            print(made["name"], made["scores"], flush=True)


if __name__ == "__main__":
    main()
