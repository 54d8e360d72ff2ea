"""Windows keep the places of the context; answers and scores come out of all windows of a question."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from answers import exact_match, token_f1
from datasets import Dataset
from tiny import make_net, read_rows
from torch.nn import functional as F

from lit_compress.data.datamodule import DataModule, PaddedBatches
from lit_compress.data.encode import encode
from lit_compress.evaluation.evaluate import write_predictions
from lit_compress.evaluation.metrics import bind, build_metrics
from lit_compress.models.backbones import load_tokenizer
from lit_compress.numerics.losses import consistency_loss, distillation_loss, task_loss
from lit_compress.tasks import KINDS, inputs_of
from lit_compress.tasks.records import get_task
from lit_compress.tasks.span_qa import merge, n_best

V1, V2, KIND = get_task("squad"), get_task("squad_v2"), KINDS["span_qa"]
CONTEXT = "the film is not so great but  the cast is fine and the plot is a story of wit and charm"


def _rows(*rows):
    """Rows of (question, context, answer, its place)."""
    return Dataset.from_dict(
        {
            "question": [q for q, *_ in rows], "context": [c for _, c, *_ in rows],
            "answers": [{"text": [a] if a else [], "answer_start": [s] if a else []} for *_, a, s in rows],
        }
    )  # fmt: skip


@pytest.fixture
def tokenizer(tiny_backbone):
    return load_tokenizer(str(tiny_backbone), V1)


def test_offsets_and_labels_of_windows(tokenizer):
    answer = "plot is a story"
    rows = _rows(("  is the cast fine", CONTEXT, answer, CONTEXT.index(answer)), ("wit", "fine wit", None, 0))
    encoded = encode(rows, tokenizer, V2, 20)
    assert set(encoded["example"][:]) == {0, 1}
    seen, whole = set(), 0
    for row in encoded.to_list():
        context = rows[row["example"]]["context"]
        words = tokenizer.convert_ids_to_tokens(row["input_ids"])
        for word, begin, end in zip(words, row["begin"], row["end"], strict=True):
            if end:
                assert context[begin:end] == word
                seen.add((row["example"], begin))
        question = words[1 : words.index("[SEP]")]
        assert question == (["is", "the", "cast", "fine"] if row["example"] == 0 else ["wit"])
        first, last = row["labels"]
        if first:
            assert context[row["begin"][first] : row["end"][last]] == answer
            whole += 1
        assert len(words) == row["length"] <= 20 and not row["truncated"]
    assert whole >= 1 and seen == {(0, m.start()) for m in re.finditer(r"\w+", CONTEXT)} | {(1, 0), (1, 5)}


def test_neighbouring_windows_share_the_stride(tokenizer):
    task = replace(V1, spans=replace(V1.spans, stride=3))
    rows = _rows(("wit", CONTEXT, "film", 4))
    windows = encode(rows, tokenizer, task, 20).to_list()
    places = [[b for b, e in zip(w["begin"], w["end"], strict=True) if e] for w in windows]
    assert all(left[-3:] == right[:3] for left, right in pairwise(places)) and len(windows) > 1


def test_blanks_before_a_question_are_no_tokens():
    """Of a tokenizer that keeps them, too; a blank before a word of the context is not part of the answer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({c: i for i, c in enumerate("<> abcdefghij")}, unk_token="<"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.post_processor = processors.TemplateProcessing(
        single="< $A >", pair="< $A > $B:1 >:1", special_tokens=[("<", 0), (">", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="<", pad_token="<")
    batch = {"question": ["ab", "  ab"], "context": ["cd e"] * 2, "answers": [{"text": ["e"], "answer_start": [3]}] * 2}
    found = KIND.encode(batch, [4, 9], tokenizer, V1, 32)
    assert found["input_ids"][0] == found["input_ids"][1] == [0, 3, 4, 1, 5, 6, 2, 7, 1]
    assert found["example"] == [4, 9] and found["labels"] == [[7, 7], [7, 7]]


def test_an_answer_and_what_it_is_worth():
    """By hand: margin = null - best score; the answer is given unless that is above the threshold."""
    row, windows = {"context": "good film"}, [(2.5, [(1.0, 0, 4), (3.0, 5, 9)]), (4.0, [(2.0, 0, 4)])]
    weights = torch.tensor([3.0, 2.0, 2.5]).exp()
    film, good, none = (weights / weights.sum()).tolist()
    for threshold, answer, probability in ((0.0, "film", film), (-0.5, "film", film), (-0.6, "", none)):
        task = replace(V2, spans=replace(V2.spans, null_threshold=threshold))
        found = KIND.answer(task, row, windows)
        assert (found["answer"], found["no_answer"]) == (answer, -0.5)
        assert found["probability"] == pytest.approx(probability)
        listed = [(entry["answer"], entry["probability"]) for entry in found["n_best"]]
        assert [text for text, _ in listed] == ["film", "", "good"]
        assert [p for _, p in listed] == pytest.approx([film, none, good])
    found = KIND.answer(V1, row, windows)
    assert found["answer"] == "film" and "no_answer" not in found and len(found["n_best"]) == 2
    assert found["probability"] == pytest.approx(film / (film + good))
    assert KIND.answer(V2, row, [(1.0, [])])["answer"] == KIND.answer(V1, row, [(1.0, [])])["answer"] == ""


def test_a_long_question_is_cut_and_marked(tokenizer):
    rows = _rows(("film " * 30, CONTEXT, "film", 4), ("wit", CONTEXT, "film", 4))
    encoded = encode(rows, tokenizer, V1, 20).to_list()
    assert {row["example"]: row["truncated"] for row in encoded} == {0: True, 1: False}
    assert all(row["input_ids"].count(tokenizer.convert_tokens_to_ids("film")) >= 10 for row in encoded[:1])


def test_loss_is_that_of_the_library_without_padding(tokenizer):
    encoded = encode(_rows(("wit", CONTEXT, "great", 20), ("wit", CONTEXT, "film", 4)), tokenizer, V1, 40)
    batch = PaddedBatches(encoded, 0)[[0, 1]]
    net = make_net("bert", "squad", dropout=0.0)
    first, last = batch["labels"].unbind(1)
    expected = net(**inputs_of(batch), start_positions=first, end_positions=last)
    logits = KIND.logits(expected, batch)
    assert logits.shape == (2, 2, batch["input_ids"].shape[1]) and batch["attention_mask"].all()
    assert torch.allclose(task_loss(logits, batch["labels"], KIND.loss), expected.loss)
    # padding changes neither the loss nor the distances
    wide = {name: F.pad(value, (0, 5)) for name, value in batch.items() if value.ndim == 2}
    wide = {**batch, **wide, "labels": batch["labels"]}
    other = make_net("bert", "squad", seed=1, dropout=0.0)
    padded, teacher = (KIND.outputs(n, wide, tokenizer) for n in (net, other))
    short, small = (KIND.outputs(n, batch, tokenizer) for n in (net, other))
    assert torch.allclose(task_loss(padded, batch["labels"], KIND.loss), expected.loss, atol=1e-5)
    values = [loss(padded, teacher, KIND.loss) for loss in (distillation_loss, consistency_loss)]
    expected = [loss(short, small, KIND.loss) for loss in (distillation_loss, consistency_loss)]
    assert min(values) > 0 and torch.allclose(torch.stack(values), torch.stack(expected), atol=1e-5)
    sum(values).backward()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)


def test_merge_takes_each_span_once_and_the_smallest_null():
    pieces = [(1.0, [(3.0, 0, 4), (2.0, 5, 9)]), (0.5, [(4.0, 5, 9), (1.0, 20, 22)])]
    assert merge(pieces, 2) == (0.5, [(4.0, 5, 9), (3.0, 0, 4)])


def _scored(task, rows, encoded, logits, batch_size=3):
    metrics = build_metrics(task)
    bind(metrics, rows)
    batches = PaddedBatches(encoded, 0)
    for start in range(0, len(encoded), batch_size):
        batch = batches[list(range(start, min(start + batch_size, len(encoded))))]
        width = batch["input_ids"].shape[1]
        outputs = logits[start : start + batch_size, :, :width]
        KIND.observe(metrics, outputs.masked_fill(batch["attention_mask"][:, None] == 0, -1e4), batch)
    return {name: value.item() for name, value in metrics.compute().items()}


@pytest.mark.parametrize("task", [V1, V2], ids=["v1.1", "v2.0"])
def test_scores_are_those_of_a_plain_evaluation(shared, tmp_path, task):
    """Random logits that often hit: n-best over windows, threshold, exact match and F1 on real questions, once more."""
    file = shared / "data" / task.name / "validation.parquet"
    rows = Dataset.from_parquet(str(file), cache_dir=str(tmp_path)).shuffle(seed=0).select(range(30))
    rows = rows.select_columns(["id", *task.text, "answers"])
    tokenizer = load_tokenizer(str(shared / "models" / "minilm-l6-h384"), task)
    encoded = encode(rows, tokenizer, task, 160)
    assert len(encoded) > 40
    logits = torch.randn(len(encoded), 2, 160, generator=torch.Generator().manual_seed(0))
    for window, row in enumerate(encoded.to_list()):
        if sum(row["labels"]) or row["example"] % 3:
            logits[window, [0, 1], row["labels"]] += 4.0 if row["example"] % 2 else 1.0
    found = _scored(task, rows, encoded, logits)

    best, null = {}, {}  # the same by loops over single tokens
    for window, row in enumerate(encoded.to_list()):
        example, size = row["example"], row["length"]
        null[example] = min(null.get(example, torch.inf), float(logits[window, :, 0].sum()))
        for i in range(size):
            for j in range(i, min(size, i + 30)):
                score = float(logits[window, 0, i] + logits[window, 1, j])
                if row["end"][i] and row["end"][j] and score > best.get(example, (-torch.inf,))[0]:
                    best[example] = (score, rows[example]["context"][row["begin"][i] : row["end"][j]])
    exact, f1 = [], []
    for example in range(30):
        golds = rows[example]["answers"]["text"] or [""]
        text = best[example][1]
        if task is V2 and null[example] - best[example][0] > 0:
            text = ""
        exact.append(exact_match(text, golds))
        f1.append(token_f1(text, golds))
    assert found["exact_match"] == pytest.approx(sum(exact) / 30) and 0.1 < found["exact_match"] < 0.95
    assert found["answer_f1"] == pytest.approx(sum(f1) / 30)
    if task is V1:
        assert found.keys() == {"exact_match", "answer_f1"}
    else:
        has = [bool(row["answers"]["text"]) for row in rows]
        mean = {w: sum(e for e, h in zip(exact, has, strict=True) if h is w) / has.count(w) for w in (True, False)}
        assert found["exact_match_answerable"] == pytest.approx(mean[True])
        assert found["exact_match_unanswerable"] == pytest.approx(mean[False])


def test_predictions_are_answers_with_n_best(shared, tmp_path):
    """Texts of the context; more is lost by a threshold than by none."""
    net = make_net("bert", "squad_v2", vocab_size=30522, max_position_embeddings=512)
    rows = Dataset.from_parquet(str(shared / "data/squad_v2/validation.parquet"), cache_dir=str(tmp_path / "c"))
    rows.select(range(12)).to_parquet(tmp_path / "validation.parquet")
    data = DataModule("squad_v2", str(shared / "models" / "minilm-l6-h384"), str(tmp_path), max_length=64)
    assert write_predictions(net, data, tmp_path / "p.jsonl") == (12, 12)
    lines = read_rows(tmp_path / "p.jsonl")
    for line, row in zip(lines, rows, strict=False):
        assert line["id"] == row["id"] and line["answer"] in line["context"] and "answers" not in line
        assert (line["answer"] == "") == (line["no_answer"] > 0) and len(line["n_best"]) == 20
        assert sum(entry["probability"] for entry in line["n_best"]) <= 1.000001
        chances = [entry["probability"] for entry in line["n_best"]]
        assert chances == sorted(chances, reverse=True)


@pytest.mark.parametrize(("number", "longest"), [(1, 1), (4, 3), (20, 30), (500, 5)])
def test_best_spans_are_those_of_a_loop(number, longest):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 12, generator=generator)
    allowed = torch.rand(3, 12, generator=generator) > 0.3
    allowed[2] = False
    allowed[2, 4] = True
    begin = torch.arange(12).expand(3, 12)
    places, scores = n_best(logits, begin, (begin + 1) * allowed, number, longest)
    assert places.shape == (3, number, 2) and torch.equal(scores[:, 0], logits[:, :, 0].sum(1))
    for row in range(3):
        spans = [
            (float(logits[row, 0, i] + logits[row, 1, j]), i, j)
            for i in range(12)
            for j in range(i, min(12, i + longest))
            if allowed[row, i] and allowed[row, j]
        ]
        expected = sorted(spans, reverse=True)[:number]
        found = [
            (score, i, j - 1) for score, (i, j) in zip(scores[row, 1:].tolist(), places[row].tolist(), strict=True)
        ]
        assert [span for span in found if span[0] > -torch.inf] == expected
