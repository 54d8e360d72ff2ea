"""Documents in order: losses and scores against loops, and a reranker that is compressed without labels."""

import json
import math
import random
import shutil

import pytest
import torch
from mistakes import factorized, predicted
from tiny import WORDS, read_rows, write_bert, write_rows

from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.intervals import intervals
from lit_compress.evaluation.metrics import build_metrics
from lit_compress.models.backbones import load_config
from lit_compress.numerics.losses import consistency_loss, distillation_loss, example_losses, task_loss
from lit_compress.numerics.sampled_labels import fisher_loss
from lit_compress.tasks import KINDS
from lit_compress.tasks.records import Custom, get_task
from lit_compress.utils.errors import UserError


def test_relevance_is_learned_by_its_cross_entropy():
    logits, labels = torch.tensor([[2.0], [-1.0], [0.5]]), torch.tensor([1.0, 0.0, 0.25])
    chances = [1 / (1 + math.exp(-float(logit))) for logit in logits]
    expected = [-y * math.log(p) - (1 - y) * math.log(1 - p) for p, y in zip(chances, labels.tolist(), strict=True)]
    assert example_losses(logits, labels, "relevance").tolist() == pytest.approx(expected, rel=1e-6)
    assert float(task_loss(logits, labels, "relevance")) == pytest.approx(sum(expected) / 3, rel=1e-6)


def test_two_nets_are_compared_by_their_logits():
    """Also by the Fisher information: under drawn labels every logit counts alike, however sure it is."""
    ours, theirs = torch.tensor([[8.0], [-9.0]]), torch.tensor([[9.0], [-9.0]])
    for loss in (distillation_loss, consistency_loss):
        assert float(loss(ours, theirs, "relevance")) == pytest.approx(0.5)
    logits = ours.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(fisher_loss(logits, "relevance", "drawn", index=torch.arange(2)), logits)
    assert gradient[:, 0].tolist() == [1, 1]


def _scores(rows):
    """Return nDCG@10 and the reciprocal rank of one query's (logit, relevance)."""
    ranked = [relevance for _, relevance in sorted(rows, reverse=True)][:10]
    gain = sum(relevance / math.log2(place + 2) for place, relevance in enumerate(ranked))
    best = sorted((relevance for _, relevance in rows), reverse=True)[:10]
    most = sum(relevance / math.log2(place + 2) for place, relevance in enumerate(best))
    first = next((place for place, relevance in enumerate(ranked) if relevance >= 0.5), None)
    return gain / most, 0 if first is None else 1 / (first + 1)


@pytest.mark.parametrize("shift", [0.0, -5.0, 5.0])
def test_the_order_is_scored_as_loops_do(shift):
    """However rows are batched. One query has no relevant document, one only a little relevant one."""
    rng, rows = random.Random(0), []
    for query in range(8):
        for _ in range(rng.randint(2, 30)):
            relevance = rng.choice([0.0, 0.0, 0.25, 0.5, 1.0]) if query < 6 else 0.0
            rows.append((query, rng.gauss(shift, 1), relevance))
    rows.append((6, shift, 0.25))
    wanted = [_scores([row[1:] for row in rows if row[0] == query]) for query in range(7)]
    ndcg, mrr = (sum(each) / 7 for each in zip(*wanted, strict=True))
    for _ in range(2):
        rng.shuffle(rows)
        metrics = build_metrics(get_task("wiki_qa"))
        for start in range(0, len(rows), 5):
            queries, logits, relevance = (torch.tensor(column) for column in zip(*rows[start : start + 5], strict=True))
            metrics.update(logits[:, None], relevance, queries + 2**62, index=start + torch.arange(len(logits)))
        found = {name: float(value) for name, value in metrics.compute().items()}
        assert found == {"ndcg_at_10": pytest.approx(ndcg, rel=1e-5), "mrr_at_10": pytest.approx(mrr, rel=1e-5)}
    low, high = intervals(metrics, found, len(rows))["ndcg_at_10"]
    assert low < ndcg < high
    assert not any(build_metrics(get_task("wiki_qa")).compute().values())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A cross-encoder with an activation of its own; pairs of which only the dev rows have labels."""
    from sentence_transformers import CrossEncoder

    folder, rng = tmp_path_factory.mktemp("reranking"), random.Random(0)
    model = write_bert(folder / "model", "wiki_qa", dropout=0.0, initializer_range=0.3)
    CrossEncoder(str(model), activation_fn=torch.nn.Tanh(), device="cpu").save(str(model))

    def row(number):
        return {"query": WORDS[number // 6], "document": " ".join(rng.choices(WORDS, k=rng.randint(2, 9)))}

    labelled = [row(i) | {"label": i % 6 == 0} for i in range(24)]
    write_rows(folder / "pairs", train=[row(i) for i in range(40)], validation=labelled)
    return folder


@pytest.mark.slow
def test_an_export_puts_documents_in_order_as_sentence_transformers_does(place):
    """The cross-encoder is compressed without a label."""
    import sentence_transformers as library

    export, asked = place / "small", ["--data.task", "custom", "--data.custom.kind", "reranking"]
    report = factorized(place / "model", export, *asked, "--data.path", place / "pairs")
    assert report["metric"]["name"] == "ndcg_at_10" and 0 < report["compressed"]["metric"] < 1
    assert report["dense"]["interval"][0] < report["dense"]["metric"] < report["dense"]["interval"][1]
    card = (export / "README.md").read_text()
    assert "pipeline_tag: text-ranking" in card and "CrossEncoder(folder" in card
    lines, rows = predicted(export, place / "predictions.jsonl"), read_rows(place / "pairs" / "validation.jsonl")
    assert {"query", "document", "score"} <= set(lines[0])
    metrics = build_metrics(DataModule("custom", str(export), str(place / "pairs"), custom=Custom("reranking")).record)
    metrics.update(
        torch.tensor([line["score"] for line in lines]), torch.tensor([row["label"] for row in rows]),
        torch.tensor([WORDS.index(row["query"]) for row in rows]), index=torch.arange(len(rows)),
    )  # fmt: skip
    assert float(metrics.compute()["ndcg_at_10"]) == pytest.approx(report["compressed"]["metric"], abs=1e-6)
    net = library.CrossEncoder(str(export), trust_remote_code=True, device="cpu")
    pairs, expected = [(row["query"], row["document"]) for row in rows], [line["score"] for line in lines]
    assert net.predict(pairs, activation_fn=torch.nn.Identity()).tolist() == pytest.approx(expected, abs=1e-5)
    assert net.predict(pairs).tolist() == pytest.approx([math.tanh(logit) for logit in expected], abs=1e-5)


def test_a_cross_encoder_that_does_more_is_refused(place, tmp_path):
    own, more = "sentence_transformers.models.", {"type": "sentence_transformers.models.LogitScore", "path": "1"}
    for name, values, line in (
        ("modules.json", [{"type": f"{own}Transformer", "path": ""}, more], "scores by Transformer, LogitScore"),
        ("modules.json", [{"type": "x.Transformer", "path": ""}], r"scores by x\.Transformer"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q", "prompts": {"q": "find: "}},
         "has a default prompt"),
    ):  # fmt: skip
        model = shutil.copytree(place / "model", tmp_path / f"{name} {len(values)}")
        (model / name).write_text(json.dumps(values))
        with pytest.raises(UserError, match=f"model.backbone: '.*{line}"):
            load_config(str(model), get_task("wiki_qa"))


@pytest.fixture
def single(tmp_path):
    """One file; every query has six documents, far from each other, of which one is relevant."""
    rows = [f"{WORDS[i % 15]},{WORDS[i % 7]} {i},{int(i % 15 == i // 6)}" for i in range(90)]
    (tmp_path / "answers.csv").write_text("\n".join(["query,document,label", *rows]) + "\n")
    return str(tmp_path / "answers.csv")


def test_a_file_is_split_between_queries(single, place):
    """In two parts and in three: no query is in two, and all documents of a query are there."""
    asked = {}
    data = DataModule("custom", str(place / "model"), single, custom=Custom("reranking"))
    data.setup("fit")
    data.setup("test")
    for name in ("train", "validation", "test"):
        queries = list(data._split(name).rows["query"])
        assert queries and all(queries.count(query) == 6 for query in queries)
        asked[name] = set(queries)
    assert sum(map(len, asked.values())) == 15 == len(set().union(*asked.values()))


def test_rows_are_drawn_query_by_query(single, place, tmp_path):
    """Held-out and dev rows; the last query may be cut, the others are whole."""
    rows = read_rows(place / "pairs" / "validation.jsonl")
    data = write_rows(tmp_path / "rows", train=rows, validation=rows)
    module = DataModule(
        "custom", str(place / "model"), str(data), custom=Custom("reranking"), hold_out=14, validation_examples=13
    )
    module.setup("fit")
    for name, number in (("held_out", 14), ("validation", 13)):
        queries = list(module._split(name).rows["query"])
        counts = sorted((queries.count(query) for query in set(queries)), reverse=True)
        assert len(queries) == number and counts[:2] == [6, 6] and len(counts) == 3


@pytest.mark.parametrize("label", [2, -0.5, -1])
def test_a_label_that_is_no_relevance_is_one_line(label):
    with pytest.raises(UserError, match=f"row 1: label {label} is no relevance; give one from 0 .none. to 1"):
        KINDS["reranking"].label_of(get_task("wiki_qa"), "row 1", {"label": label})


def test_true_is_relevant_and_false_is_not():
    labels = [KINDS["reranking"].label_of(get_task("wiki_qa"), "row 1", {"label": label}) for label in (True, False)]
    assert labels == [1.0, 0.0]


def test_one_query_cannot_be_split(place, tmp_path):
    (tmp_path / "one.csv").write_text("query,document,label\n" + "a,film,1\n" * 20)
    data = DataModule("custom", str(place / "model"), str(tmp_path / "one.csv"), custom=Custom("reranking"))
    with pytest.raises(UserError, match="has too few lists of rows, 1; to split them give more"):
        data.setup("fit")


@pytest.mark.parametrize("label", [0, 0.2])
def test_a_dev_set_without_a_relevant_document_has_no_score(label, place, tmp_path):
    write_rows(tmp_path, validation=[{"query": "a", "document": word, "label": 0} for word in WORDS[1:]])
    write_rows(tmp_path, train=[{"query": "a", "document": word, "label": label} for word in WORDS])
    data = DataModule("custom", str(place / "model"), str(tmp_path), custom=Custom("reranking"))
    with pytest.raises(UserError, match=r"validation\.jsonl' has no relevant document: every label is 0"):
        data.setup("validate")
    data._read(["train"], labelled=bool(label))
