"""Vectors of texts: drawn targets and metrics against loops, and a net that is compressed by texts alone."""

import json
import math
import random

import pytest
import torch
from in_memory import collect_kronecker
from mistakes import factorized, fails, predicted
from tiny import WORDS, make_net, read_rows, write_backbone, write_bert, write_rows
from torch.nn.functional import normalize

from lit_compress.data.custom import custom_task
from lit_compress.data.datamodule import DataModule
from lit_compress.data.facts import changed_inputs, token_counts
from lit_compress.data.readers import Place
from lit_compress.data.settings import pooling_of
from lit_compress.evaluation.metrics import build_metrics
from lit_compress.export.integers import training_feeds
from lit_compress.models.backbones import load_finetuned
from lit_compress.models.backbones import load_net as load_backbone
from lit_compress.numerics.sampled_labels import draw_noise, fisher_loss
from lit_compress.tasks import KINDS
from lit_compress.tasks.records import Custom, get_task
from lit_compress.tasks.sentences import Pooling
from lit_compress.utils.errors import UserError

KIND = KINDS["embedding"]
TEXTS = Custom(kind="embedding")
DOCUMENTS = Custom(kind="embedding", text=["query", "document"])


def _vectors(*shape, seed=0):
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)


def test_targets_are_drawn_around_each_vector():
    """E[g g^T] of the drawn losses is the identity; a draw hangs on seed and example, not on the batch."""
    logits = torch.zeros(3000, 1, 3, dtype=torch.float64, requires_grad=True)
    loss = fisher_loss(logits, "vectors", "drawn", index=torch.arange(3000), seed=1)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(gradient[:, 0].T @ gradient[:, 0] / 3000, torch.eye(3).double(), atol=0.1)
    alone = draw_noise(logits[[7]], torch.tensor([7]), seed=1)
    assert torch.equal(alone[0], gradient[7])


def _ndcg(query, documents, right):
    """Return nDCG@10 and recall@10 of a query by a loop."""
    ranked = sorted(range(len(documents)), key=lambda i: -float(query @ documents[i]))[:10]
    gains = [1 / math.log2(place + 2) for place, number in enumerate(ranked) if number in right]
    best = sum(1 / math.log2(place + 2) for place in range(min(10, len(right))))
    return sum(gains) / best, len(right & set(ranked)) / len(right)


def test_retrieval_is_that_of_loops_however_rows_are_batched(tmp_path):
    """Row 0 and row 5 ask the same; row 3 and row 4 have the same document; the third text is no one's."""
    documents, queries = _vectors(30, 8), _vectors(15, 8, seed=1)
    asks, has, other = list(range(15)), list(range(15)), list(range(15, 30))
    asks[5], has[4] = 0, 3
    rows = torch.stack([queries[asks], documents[has], documents[other]], 1)
    numbers = torch.tensor([asks, [100 + i for i in has], [100 + i for i in other]]).T
    there = sorted({*has, *other})
    wanted = {}
    for ask, document in zip(asks, has, strict=True):
        wanted.setdefault(ask, set()).add(there.index(document))
    scores = [_ndcg(queries[ask], documents[there], right) for ask, right in wanted.items()]
    for order in (torch.arange(15), torch.randperm(15)):
        metrics = build_metrics(custom_task(DOCUMENTS, Place(str(tmp_path))))
        for part in order.split(4):
            metrics.update(rows[part], numbers[part], index=part)
        found = metrics.compute()
        assert list(found) == ["ndcg_at_10", "recall_at_10"]
        for name, values in zip(found, zip(*scores, strict=True), strict=True):
            assert float(found[name]) == pytest.approx(sum(values) / len(values), abs=1e-6)


def _batch(first, second=None):
    """Return the batch of lists of token ids."""
    batch = {"index": torch.arange(len(first))}
    for end, rows in (("", first), ("_2", second)):
        if rows is None:
            continue
        longest = max(map(len, rows))
        column = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        batch |= {f"input_ids{end}": column, f"attention_mask{end}": mask}
    return batch


def test_vectors_of_pairs_are_those_of_single_texts():
    """The mean of their states; tests/tasks/test_sentences.py has the other ways."""
    net = make_net("bert", "stsb_embedding", dropout=0.0).double().eval()
    first, second = [[5, 6, 7, 8], [9, 10]], [[11], [12, 13, 14, 15, 16]]
    batch = _batch(first, second)
    found = KIND.logits(net(**KIND.inputs(net, batch)), batch)
    for row in range(2):
        for text, ids in enumerate((first[row], second[row])):
            vector = net(torch.tensor([ids])).last_hidden_state[0].mean(0)
            assert torch.allclose(found[row, text], vector / vector.norm(), atol=1e-12)


def test_an_evaluation_pads_no_query_to_the_length_of_its_document():
    net = make_net("bert", "stsb_embedding", dropout=0.0).double().eval()
    batch = _batch([[5, 6, 7, 8], [9, 10]], [[11], [12, 13, 14, 15, 16, 17, 18]])
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    read = []
    watch = net.embeddings.register_forward_hook(lambda _, args, states: read.append(states.shape[:2]))
    with torch.no_grad():
        found = KIND.outputs(net, batch, None)
        watch.remove()
        together = KIND._vectors(KIND.run(net, batch), batch)
    assert read == [(2, 4), (2, 7)]
    assert torch.allclose(found.double(), together, atol=1e-6)


def test_rows_of_several_texts_are_ordered_by_their_longest_text(place):
    """Queries have one token here, and documents many; the memory guard counts with documents."""
    texts = [f"{' '.join(['film'] * n)}" for n in (3, 9, 1, 7, 5, 2, 8, 4, 6)]
    rows = [{"query": "plot", "document": text} for text in texts]
    folder = write_rows(place / "ordered", train=rows, validation=rows)
    data = DataModule("custom", str(place / "model"), str(folder), custom=DOCUMENTS, batch_size=3, eval_batch_size=3)
    [loader] = data.val_dataloader()
    widths = [batch["input_ids_2"].shape[1] for batch in loader]
    assert [width - widths[-1] for width in widths] == [6, 3, 0]
    assert loader.largest == (3, widths[0]) and data.train_dataloader().largest == (6, widths[0])
    assert {split["longest"] for split in data.facts()["splits"]} == {widths[0]}


@pytest.mark.parametrize("family", ["deberta-v2", "llama"])
def test_kronecker_factors_do_not_depend_on_batches(family):
    net = make_net(family, "stsb_embedding", dropout=0.0).double().eval()
    batch = _batch([[5, 6, 7, 8], [9, 10], [3]], [[11], [12, 13, 14, 15, 16], [7, 8]])
    rows = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(3)]
    for once in (False, True):
        whole, alone = (collect_kronecker(net, batches, "embedding", by_text=once) for batches in ([batch], rows))
        for name, factors in whole.items():
            assert torch.allclose(factors.gradients(), alone[name].gradients(), rtol=1e-9, atol=1e-15)
            assert torch.allclose(factors.inputs(), alone[name].inputs(), rtol=1e-9, atol=1e-12)


def test_every_text_of_a_pair_counts_once():
    """As much as one of another length, by a loop over texts."""
    net = make_net("bert", "stsb_embedding", dropout=0.0).double().eval()
    first, second = [[5, 6, 7, 8], [9, 10], [3]], [[11], [12, 13, 14, 15, 16], [7, 8]]
    name, seen = "encoder.layer.0.intermediate.dense", []
    module = net.get_submodule(name)
    watch = module.register_forward_hook(lambda _, args, y: seen.append(args[0][0]))
    for ids in (*first, *second):
        net(torch.tensor([ids]))
    watch.remove()
    factors = collect_kronecker(net, [_batch(first, second)], "embedding", [name], by_text=True)[name]
    assert torch.allclose(factors.inputs(), sum(x.T @ x / len(x) for x in seen) / 6, rtol=1e-9, atol=1e-12)
    assert torch.allclose(factors.mean, sum(x.mean(0) for x in seen) / 6, rtol=1e-9, atol=1e-12)
    assert factors.tokens == 6


def test_a_model_with_another_head_gives_states(tiny_backbone):
    """The head is left out, a pooler that the file lacks is 0, and none of it is trained."""
    task = get_task("stsb_embedding")
    net = load_backbone(str(tiny_backbone), task)
    KIND.freeze(net)
    assert type(net).__name__ == "BertModel"
    frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
    assert frozen == ["pooler.dense.weight", "pooler.dense.bias"]


def test_a_text_without_tokens_has_one_vector_wherever_it_stands(tmp_path):
    """As tokenizers without special tokens make of an empty one."""
    folder = write_backbone(tmp_path / "net", "gpt2", "stsb_embedding")
    texts = [("", "film"), ("film", ""), ("great plot so", "the film")]
    rows = [{"sentence1": first, "sentence2": second, "label": 1.0} for first, second in texts]
    data = DataModule("stsb_embedding", str(folder), str(write_rows(tmp_path / "data", train=rows, validation=rows)))
    [batch] = data.val_dataloader()[0]
    found = KIND.outputs(load_backbone(str(folder), data.record).eval(), batch, data.tokenizer)
    order = batch["index"].argsort()
    assert torch.allclose(found[order[0]], found[order[1]].flip(0), atol=1e-6) and found.norm(dim=-1).min() > 0.5


def test_a_score_is_of_two_texts(tmp_path):
    with pytest.raises(UserError, match="label: 'score' is a score of two texts, data"):
        custom_task(Custom(kind="embedding", label="score"), Place(str(tmp_path)))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A sentence model, and texts in rows of one and of two."""
    folder, rng = tmp_path_factory.mktemp("embedding"), random.Random(0)
    write_bert(folder / "model", "stsb_embedding", dropout=0.0, initializer_range=0.3)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(40)]
    rows = [{"text": text} for text in texts]
    write_rows(folder / "texts", train=rows[:28], validation=rows[28:])
    pairs = [{"query": a, "document": b} for a, b in zip(texts[::2], texts[1::2], strict=True)]
    write_rows(folder / "pairs", train=pairs[:12], validation=pairs[12:])
    return folder


def test_labels_of_texts_are_the_vectors_of_the_teacher(place):
    data = DataModule("custom", str(place / "model"), str(place / "texts"), custom=TEXTS)
    net = load_finetuned(str(place / "model"), data.record)
    [loader] = data.val_dataloader()
    for batch in loader:
        with torch.no_grad():
            vectors = KIND.logits(net(**KIND.inputs(net, batch)), batch)
        assert torch.allclose(batch["labels"], vectors.flatten(1), atol=1e-6)


def test_tokens_of_all_texts_of_a_row_count(place):
    data = DataModule("custom", str(place / "model"), str(place / "pairs"), custom=DOCUMENTS)
    rows = read_rows(place / "pairs" / "train.jsonl")
    words = sum(len(f"{row['query']} {row['document']}".split()) for row in rows)
    counts = token_counts(data.train_tokens(), 100)
    assert int(counts[5:].sum()) == words and int(counts[:5].sum()) == 4 * len(rows)  # [CLS] and [SEP] of every text
    assert changed_inputs(data.train_tokens(), data.train_tokens(), range(100)) == 0


def test_a_program_of_integers_reads_all_texts_of_a_row(place):
    """Not queries alone: the ranges of activations are those of documents as well."""
    data = DataModule("custom", str(place / "model"), str(place / "pairs"), custom=DOCUMENTS)
    rows = read_rows(place / "pairs" / "train.jsonl")
    words = sum(len(f"{row['query']} {row['document']}".split()) + 4 for row in rows)
    assert sum(int(feed["attention_mask"].sum()) for feed in training_feeds(data, "int8")) == words


def test_an_export_says_how_vectors_are_made(place, capsys):
    """The model is compressed by texts alone."""
    from transformers import AutoModel, AutoTokenizer

    export, asked = place / "small", ["--data.task", "custom", "--data.custom.kind", "embedding"]
    report = factorized(place / "model", export, *asked, "--data.path", place / "texts")
    assert report["metric"]["name"] == "teacher_cosine" and report["dense"]["metric"] == pytest.approx(1)
    assert report["dense"]["interval"] == pytest.approx([1, 1]) and report["compressed"]["interval"][0] < 1
    assert report["calibration"]["measured_loss"] == pytest.approx(1 - report["compressed"]["metric"], abs=1e-5)
    modules = json.loads((export / "modules.json").read_text())
    assert [item["path"] for item in modules] == ["", "1_Pooling", "2_Normalize"]
    assert json.loads((export / "1_Pooling" / "config.json").read_text())["pooling_mode_mean_tokens"] is True
    assert pooling_of(str(export)) == Pooling(max_length=64)
    pairs = (*asked, "--data.path", place / "pairs", "--data.custom.text", "[query,document]")
    line = ("export", export, place / "again", "--format", "openvino", "--dtype", "int8", *pairs)
    assert "was measured by teacher_cosine, and these rows give ndcg_at_10; give the rows it was" in fails(
        capsys, *line
    )
    lines = predicted(export, place / "predictions.jsonl")
    net = AutoModel.from_pretrained(export, trust_remote_code=True).eval()
    tokens = AutoTokenizer.from_pretrained(export)([line["text"] for line in lines], return_tensors="pt", padding=True)
    with torch.no_grad():
        states, weights = net(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
    vectors = normalize((states * weights).sum(1) / weights.sum(1), dim=-1)
    assert torch.allclose(torch.tensor([line["vector"] for line in lines]), vectors, atol=1e-6)


def test_the_answer_to_two_texts_is_their_cosine():
    one, other = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    told = KIND.answer(get_task("stsb_embedding"), {}, [torch.stack([one, other])])
    assert told == {"similarity": pytest.approx(24 / 25), "vectors": [[3.0, 4.0], [4.0, 3.0]]}
    assert KIND.answer(get_task("stsb_embedding"), {}, [one[None]]) == {"vector": [3.0, 4.0]}
