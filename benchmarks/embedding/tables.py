"""The table of sentence embeddings, from results/*.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import file_density, load, origin, percent, table

STUDY = "embedding"
TITLE = "Sentence embeddings without labels"
ABOUT = "all-MiniLM-L6-v2 factorized at 0.5 to 0.10 on texts alone, K-FAC next to plain SVD; trained on texts alone."
NAMES = {"kfac": "K-FAC", "passages": "K-FAC, on paragraphs", "none": "plain SVD"}

HEAD = """## What is left of a sentence model right after `factorize`

Spearman's correlation x 100 on the dev pairs of STS-B ({rows} pairs; the standard error of each value next to it); retrieval: 500 questions of
SQuAD's dev set look for their paragraphs among these (a standard error is 1.5). The dense model has {dense}; nDCG@10 {ndcg}, recall@10 {recall}. Calibrated on the texts of
1,024 training pairs; no score is read, nothing is trained. *cosine*: to the dense vectors, mean over both texts of
the dev pairs. *On paragraphs*: calibrated on 1,024 questions of SQuAD's training split and
their paragraphs.
"""


TRAINED = """## After training on texts alone

The factorized model after 320 steps on 10,240 texts without labels, sentences of STS-B, questions and paragraphs of SQuAD, whose dense
vectors it learns; the calibration is on the same texts.
"""


WIDE = """## After `--distil 800` on 25,600 different texts

No text is read twice: 4,662 paragraphs and 6,400 questions of SQuAD's training split, 8,138 pieces of articles of XSum and
CNN/DailyMail, 6,400 sentences of STS-B. bf16-mixed, rate 3e-4. nDCG@10 of 2,000 questions of SQuAD's dev set among their
2,000 paragraphs (standard error 0.8), and of 500 highlights of CNN/DailyMail among their articles. `before`:
right after the factorization on the same calibration, in which every text counts once at 0.25, every token in the other rows. *Whole blocks*: the method Layers with the same distillation.
*On all texts*: 1,340 steps on all 42,851 texts that there are, vectors alone, without hidden states.
*Program in 8 bits*: of OpenVINO, weights and activations. *Static vectors*: one vector per token, and no blocks (static.py).
"""

LARGER = """## all-mpnet-base-v2 (110M parameters) after `--distil 500`

Of the same texts, 16,000 are read once. In the calibration every text counts once. nDCG@10 of 1,000 questions among their 1,000 paragraphs (standard error 1.1), and of the
500 highlights. *all-MiniLM-L6-v2*: a smaller sentence model as it is, 22.7M parameters. Trained programs: programs.py.
"""

SPEED = """## The program of a quarter of all-mpnet-base-v2

In 8 bits, {small:.0f} MB next to {dense:.0f} MB of the dense program. OpenVINO, one thread of an {machine} with VNNI, a quiet machine; commands in
`results/mpnet/speed/wide-0.25.json`.
"""

ACROSS = """## One index for two models

nDCG@10 in the same searches if the dense model encodes the queries and the small one, trained as above, the documents, or the reverse.
*cosine*: the mean between the vectors of both models.
"""
PAIRS = {"dense/dense": "both dense", "dense/small": "dense queries", "small/dense": "small queries",
         "small/small": "both small"}  # fmt: skip

COUNTED = """## What counts once in the moments, a text or a token

Right after the factorization, calibrated on 512 texts: sentences of STS-B, questions and paragraphs of SQuAD (estimates.py). Searches as above,
of 2,000 questions and 500 highlights. K-FAC takes means over tokens. `lit_compress` counts every text once for a sentence model.
"""
COUNTS = {"kfac": "every token", "length": "every text"}

RERANKED = """## A reranker after `--distil 300`

all-MiniLM-L6-v2 as a cross-encoder, fine-tuned for an epoch on 4,000 questions of SQuAD, each with the sentences of its paragraph: the one with the answer is
relevant. Then 300 steps on 9,600 other pairs without labels. 1,000 dev questions, {rows} sentences.
"""


def sections() -> Iterator[str]:
    """Yield the table, if there are results."""
    results = [result for result in load(STUDY) if "weighting" in result]
    if not results:
        return
    first, found = results[0], results[0]["retrieval"]["dense"]
    yield HEAD.format(
        rows=f"{first['metric']['rows']:,}", dense=percent(first["dense"]["metric"]),
        ndcg=percent(found["val/ndcg_at_10"]), recall=percent(found["val/recall_at_10"]),
    )  # fmt: skip
    yield table(
        ["weighting", "density", "bytes", "Spearman", "nDCG@10", "recall@10", "cosine"],
        [
            _row(result)
            for result in sorted(results, key=lambda r: (list(NAMES).index(r["weighting"]), -file_density(r)))
        ],
    )
    yield origin(first, STUDY, 1)
    if trained := [result for result in load(STUDY) if "similarity" in result]:
        yield TRAINED
        yield table(
            ["density", "bytes", "Spearman", "nDCG@10", "recall@10", "cosine to the dense vector"],
            [_trained(result) for result in sorted(trained, key=file_density, reverse=True)],
        )
        yield origin(trained[0], STUDY, 1)
    for study, about in ((STUDY, WIDE), (f"{STUDY}/mpnet", LARGER)):
        yield from _trained_widely(study, about)
    yield from _speed()
    if made := load(f"{STUDY}/estimates"):
        yield COUNTED
        yield table(
            ["density", "counts once", "Spearman", "SQuAD, nDCG@10", "CNN/DailyMail, nDCG@10"],
            [
                [f"{one['density']:.3f}", COUNTS[one["variant"]], *map(percent, one["scores"].values())]
                for one in sorted(made, key=lambda one: (-one["density"], one["variant"]))
            ],
        )  # fmt: skip
        yield origin(made[0], f"{STUDY}/estimates", 1)
    if across := load(f"{STUDY}/across"):
        yield ACROSS
        yield table(
            ["model", "searched", *PAIRS.values(), "cosine of queries", "of documents"],
            [
                [made["name"], name, *(percent(made[key][pair]) for pair in PAIRS),
                 f"{made[key]['cosine_queries']:.3f}", f"{made[key]['cosine_documents']:.3f}"]
                for made in across for key, name in (("squad", "SQuAD"), ("cnn", "CNN/DailyMail"))
            ],
        )  # fmt: skip
        yield origin(across[0], f"{STUDY}/across", 1)
    if made := sorted(load(f"{STUDY}/rerank"), key=_place):
        yield RERANKED.format(rows=f"{made[0]['metric']['rows']:,}")
        head = ["density", "model", "nDCG@10", "MRR@10"]
        yield table(head, [["1", "dense", *_order(made[0], "dense")], *(row for one in made for row in _reranked(one))])
        yield origin(made[0], f"{STUDY}/rerank", 1)


def _trained_widely(study: str, about: str) -> Iterator[str]:
    """Yield the table of what ``factorize --distil`` leaves of a sentence model, if there are results."""
    found = load(study)
    if not (wide := sorted((result for result in found if "searched" in result and "density" in result), key=_place)):
        return
    yield about
    head = ["density", "model", "Spearman", "SQuAD, nDCG@10", "CNN/DailyMail, nDCG@10", "cosine to the dense vector"]
    rows = [["1", "dense", *_scores(wide[0], "dense"), ""]]
    integers = {result["searched_in"]: result["program"] for result in found if "searched_in" in result}
    if len(integers) == 2:
        searched = (percent(integers[key]["metric"]) for key in ("squad", "cnn"))
        rows.append(["1", "program in 8 bits", "", *searched, ""])
    rows += [["1", result["model"], *_scores(result, "dense"), ""] for result in found if result["name"] == "smaller"]
    for made in load(f"{study}/static"):
        rows.append(["", "static vectors", *(percent(made["scores"][key]) for key in ("spearman", "squad", "cnn")), ""])
    programs = {one["name"]: list(map(percent, one["scores"].values())) for one in load(f"{study}/programs")}
    for result in wide:
        rows += _wide(result)
        if scored := programs.get(result["name"]):
            rows.append([f"{result['density']:.3f}", "trained, program in 8 bits", *scored, ""])
    yield table(head, rows)
    yield origin(wide[0], STUDY, 1)


def _speed() -> Iterator[str]:
    """Yield the table of the program's times, if there is a result."""
    for found in load(f"{STUDY}/mpnet/speed"):
        size = {program["net"]: program["bytes"] / 1e6 for program in found["programs"]}
        yield SPEED.format(small=size["compressed"], dense=size["dense"], machine=found["hardware"]["cpu"])
        rows = []
        for shape in found["shapes"]:
            times = {time["net"]: time for time in shape["times"]}
            gain = times["compressed"]["over_dense"]
            rows.append([
                f"{shape['batch']} x {shape['length']}", *(f"{times[net]['median']:,.0f}" for net in found["nets"]),
                f"{gain['median']:.1f} ({gain['low']:.1f} - {gain['high']:.1f})",
            ])  # fmt: skip
        yield table(["texts x tokens", "dense, ms", "0.25, ms", "times"], rows)


def _place(result: dict[str, Any]) -> tuple[bool, float, bool]:
    return result["method"] == "Layers", -result["density"], result["name"].startswith("all")


def _scores(result: dict[str, Any], name: str) -> list[str]:
    """Return the similarity and both searches of one of the models of a result."""
    searched = (percent(result["searched"][name][key]["val/ndcg_at_10"]) for key in ("squad", "cnn"))
    return [percent(result["similar"][name]["val/spearman"]), *searched]


def _wide(result: dict[str, Any]) -> list[list[str]]:
    blocks, every = "whole blocks, " if result["method"] == "Layers" else "", result["name"].startswith("all")
    shown = {"compressed": "trained on all texts"} if every else {"before": "before", "compressed": "trained"}
    cosines = {"before": "", "compressed": f"{result['compressed']['metric']:.3f}"}
    return [
        [f"{result['density']:.3f}", f"{blocks}{what}", *_scores(result, name), cosines[name]]
        for name, what in shown.items()
    ]


def _reranked(result: dict[str, Any]) -> list[list[str]]:
    blocks = "whole blocks, " if result["method"] == "Layers" else ""
    shown = {"before": "before", "after": "trained"}
    return [[f"{result['density']:.3f}", f"{blocks}{what}", *_order(result, name)] for name, what in shown.items()]


def _order(result: dict[str, Any], name: str) -> list[str]:
    return [percent(result["scores"][name][f"val/{metric}"]) for metric in ("ndcg_at_10", "mrr_at_10")]


def _trained(result: dict[str, Any]) -> list[str]:
    found = result["retrieval"]["compressed"]
    return [
        f"{file_density(result):.3f}", f"{result['ratios']['bytes']:.3f}", percent(result["similarity"]["val/spearman"]),
        percent(found["val/ndcg_at_10"]), percent(found["val/recall_at_10"]), f"{result['compressed']['metric']:.3f}",
    ]  # fmt: skip


def _row(result: dict[str, Any]) -> list[str]:
    small, found = result["compressed"], result["retrieval"]["compressed"]
    added = (result.get("calibration") or {}).get("measured_loss")
    low, high = small["interval"]
    return [
        NAMES[result["weighting"]], f"{file_density(result):.3f}", f"{result['ratios']['bytes']:.3f}",
        f"{percent(small['metric'])} ± {100 * (high - low) / 3.92:.1f}",
        percent(found["val/ndcg_at_10"]), percent(found["val/recall_at_10"]),
        "" if added is None else f"{1 - added / 2:.3f}",  # of two texts
    ]  # fmt: skip
