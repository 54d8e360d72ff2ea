"""First pieces carry the labels, nothing is lost to truncation, entities are those of seqeval."""

import csv
import json
import random
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from seqeval.metrics import f1_score, precision_score, recall_score
from tiny import make_net

from lit_compress.data.batching import PaddedBatches
from lit_compress.data.custom import custom_task
from lit_compress.data.encode import encode
from lit_compress.data.readers import Place
from lit_compress.data.sources import load_split_files
from lit_compress.evaluation.metrics import build_metrics
from lit_compress.models.backbones import load_tokenizer
from lit_compress.numerics.losses import consistency_loss, distillation_loss, example_losses, task_loss
from lit_compress.tasks import KINDS
from lit_compress.tasks.records import Custom, get_task
from lit_compress.tasks.tagging import _first_pieces, _numbers

NER, KIND = get_task("conll2003"), KINDS["tagging"]


@pytest.fixture
def encoded(tiny_backbone):
    """Encode rows of (words, labels) with the tokenizer of a few words."""
    tokenizer = load_tokenizer(str(tiny_backbone), NER)

    def build(*rows, max_length=32):
        data = Dataset.from_dict({"tokens": [words for words, _ in rows], "ner_tags": [tags for _, tags in rows]})
        return tokenizer, encode(data, tokenizer, NER, max_length)

    return build


def test_only_first_pieces_are_labelled(encoded):
    tokenizer, rows = encoded((["film", "film-story,plot", "wit"], [1, 3, 0]))
    [row] = rows.to_list()
    assert tokenizer.convert_ids_to_tokens(row["input_ids"]) == [
        "[CLS]", "film", "film", "[UNK]", "story", "[UNK]", "plot", "wit", "[SEP]",
    ]  # fmt: skip
    assert row["labels"] == [-100, 1, 3, -100, -100, -100, -100, 0, -100]
    assert row["word"] == [0, 1, 2, 0, 0, 0, 0, 3, 0]
    assert row["length"] == 9 and row["example"] == 0


def test_a_long_row_goes_on_in_the_next_input(encoded):
    _, rows = encoded((["film"] * 7, list(range(7))), (["wit"], [8]), max_length=5)
    assert [row["example"] for row in rows] == [0, 0, 0, 1]
    assert [row["word"] for row in rows] == [[0, 1, 2, 3, 0], [0, 4, 5, 6, 0], [0, 7, 0], [0, 1, 0]]
    assert [label for row in rows for label in row["labels"] if label >= 0] == [*range(7), 8]


def test_inputs_know_their_rows_in_every_part_of_a_split(encoded):
    """Rows come in parts; a word without pieces makes a part be read again."""
    tokenizer, _ = encoded((["film"], [0]))
    for word in ("wit", "\u200b"):
        found = KIND.encode({"tokens": [["film"] * 4, ["plot", word]]}, [1000, 1001], tokenizer, NER, 5)
        assert found["example"] == [1000, 1000, 1001]


def test_a_word_longer_than_an_input_has_its_label_once(encoded):
    _, rows = encoded((["film", "-".join(["plot"] * 20), "wit"], [1, 2, 3]), max_length=6)
    assert [label for row in rows for label in row["labels"] if label >= 0] == [1, 2, 3]
    assert all(any(row["word"]) for row in rows)  # what holds only the middle of the word is left out


def test_a_word_without_pieces_is_unknown(encoded):
    tokenizer, rows = encoded((["film", "\u200b", "wit"], [1, 2, 3]), (["wit"], [4]))
    assert tokenizer.convert_ids_to_tokens(rows[0]["input_ids"])[1:-1] == ["film", "[UNK]", "wit"]
    assert rows[0]["labels"][1:-1] == [1, 2, 3] and rows[1]["labels"][1:-1] == [4]


def test_where_labels_are_counted_is_known_without_them(encoded):
    _, rows = encoded((["film"] * 4, [1] * 4), (["wit", "warm"], [2, 0]))
    batch = PaddedBatches(rows, 0)[[0, 1]]
    counted = KIND.counted(batch)
    del batch["labels"]
    assert torch.equal(KIND.counted(batch), counted) and counted.sum() == 6


def _tagged(rng, names, count):
    return [[rng.choice(names) for _ in range(rng.randint(1, 12))] for _ in range(count)]


OF_BIOES = str.maketrans("MLUW", "IESS")


@pytest.mark.parametrize("sign", ["-", "_", ""], ids=["dash", "underscore", "none"])
@pytest.mark.parametrize("prefixes", ["BI", "I", "IE", "BIES", "BILU", "BMES", "BMEW"])
def test_entity_scores_are_those_of_seqeval(prefixes, sign):
    """Random tags: every legal and illegal sequence; shuffled words in batches of their own."""
    rng = random.Random(len(prefixes))
    types = ("PER", "LOC", "some-thing") if sign else ("",)
    names = ["O", *(f"{p}{sign}{kind}" for p in prefixes for kind in types)]
    task = replace(NER, labels=tuple(names))
    true, predicted = _tagged(rng, names, 300), []
    predicted = [[tag if rng.random() < 0.7 else rng.choice(names) for tag in row] for row in true]
    words = [
        (names.index(p), names.index(t), row, word)
        for row, (ps, ts) in enumerate(zip(predicted, true, strict=True))
        for word, (p, t) in enumerate(zip(ps, ts, strict=True), start=1)
    ]
    rng.shuffle(words)
    metrics = build_metrics(task)
    for start in range(0, len(words), 100):
        metrics.update(*torch.tensor(words[start : start + 100]).unbind(1))
    found = {name: value.item() for name, value in metrics.compute().items()}
    true, predicted = (
        [[tag[0].translate(OF_BIOES) + tag[1:].replace("_", "-", 1) for tag in row] for row in rows]
        for rows in (true, predicted)
    )
    assert found == pytest.approx(
        {
            "entity_f1": f1_score(true, predicted), "entity_precision": precision_score(true, predicted),
            "entity_recall": recall_score(true, predicted),
            "word_accuracy": sum(p == t for p, t, *_ in words) / len(words),
        }, abs=1e-6,
    )  # fmt: skip
    assert 0.2 < found["entity_f1"] < 0.8


def test_losses_are_means_over_words(encoded):
    """Special tokens, further pieces and padding are in no term; copies stand one after the other."""
    _, rows = encoded((["film", "film-story", "wit"], [1, 3, 0]), (["plot"], [2]))
    batch = PaddedBatches(rows, 0)[[0, 1]]
    net = make_net("bert", "conll2003", dropout=0.0)
    student = KIND.logits(net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]), batch)
    teacher, counted = torch.randn_like(student), KIND.counted(batch)
    places = [(0, 1), (0, 2), (0, 5), (1, 1)]
    assert [tuple(place) for place in counted.nonzero().tolist()] == places
    picked = [torch.stack([x[place] for place in places]) for x in (student, teacher)]
    labels = torch.tensor([1, 3, 0, 2])
    assert torch.allclose(task_loss(student, batch["labels"], KIND.loss), task_loss(picked[0], labels, KIND.loss))
    for loss in (distillation_loss, consistency_loss):
        assert torch.allclose(loss(student, teacher, KIND.loss, counted=counted), loss(*picked, KIND.loss))
    singly = example_losses(picked[0], labels, KIND.loss)
    expected = torch.stack([singly[:3].mean(), singly[3]])
    assert torch.allclose(example_losses(student, batch["labels"], KIND.loss), expected)


def test_windows_of_a_row_are_put_in_order():
    """They come as long as they are, not as they stand."""
    batch = {"example": torch.tensor([4, 2, 4]), "word": torch.tensor([[0, 3, 4], [0, 1, 0], [1, 0, 2]])}
    classes = torch.tensor([[8, 1, 2], [8, 3, 8], [5, 8, 6]])
    pieces = KIND.pieces(NER, torch.nn.functional.one_hot(classes, 9).float(), batch)
    assert pieces == [(4, {3: 1, 4: 2}), (2, {1: 3}), (4, {1: 5, 2: 6})]
    found = KIND.answer(NER, {}, [piece for row, piece in pieces if row == 4])
    assert found == {"labels": [NER.labels[i] for i in (5, 6, 1, 2)]}


def _metrics(*labels):
    return KIND.metrics_of(replace(NER, labels=labels))


def test_labels_say_whether_there_are_entities():
    assert _metrics("B-PER", "O") == ("entity_f1",)
    assert _metrics("O", "U_PER", "L_PER") == _metrics("O", "B", "I") == ("entity_f1",)
    for labels in (("NOUN", "VERB"), ("O", "B-PER", "MISC"), ("O", "X-PER"), ("S", "B"), ("O",), ("O", "B-")):
        assert _metrics(*labels) == ("word_accuracy",)


def test_parts_of_speech_have_no_entities():
    task = replace(NER, labels=("NOUN", "VERB", "O"), metrics=("word_accuracy",))
    metrics = build_metrics(task)
    metrics.update(*torch.tensor([(0, 1, 0, 1), (1, 1, 0, 2)]).unbind(1))
    assert {name: float(value) for name, value in metrics.compute().items()} == {"word_accuracy": 0.5}


def test_a_token_may_begin_with_the_blank_before_its_word():
    numbers = _numbers([["ab", "c"]], [0], [[(0, 0), (0, 1), (1, 2), (2, 4), (0, 0)]])
    assert numbers == [[0, 1, 1, 2, 0]] and _first_pieces([0], numbers) == [[0, 1, 0, 2, 0]]


def byte_level(prefix):
    """A tokenizer as GPT-2's: a word after a space is another token than the word alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["[PAD]"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["film plot wit", "film", "plot", "wit"] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]")


@pytest.mark.parametrize("prefix", [False, True])
def test_words_are_a_list_where_the_model_was_trained_so(prefix):
    """Both ways are the same if the tokenizer puts a space before the first word."""
    tokenizer, words = byte_level(prefix), ["film", "wit", "zz", "plot"]
    batch = {"tokens": [words], "ner_tags": [[1, 2, 3, 4]]}
    listed = replace(NER, split_words=True)
    joined, split = (KIND.encode(batch, [0], tokenizer, task, 4) for task in (NER, listed))
    theirs = tokenizer(words, is_split_into_words=True)
    assert [i for ids in split["input_ids"] for i in ids] == theirs["input_ids"]
    numbers = theirs.word_ids()
    first = [number + 1 if number not in numbers[:i] else 0 for i, number in enumerate(numbers)]
    assert [number for part in split["word"] for number in part] == first
    assert (joined["input_ids"] == split["input_ids"]) is prefix
    note = KIND.reads_otherwise(NER, tokenizer)
    assert prefix is (note is None) and (prefix or "--data.custom.split_words true" in note)
    assert KIND.reads_otherwise(listed, tokenizer) is None


@pytest.mark.parametrize("write", [str, json.dumps])
def test_a_table_may_hold_lists_as_text(tmp_path, write):
    """As pandas and datasets write them into a CSV."""
    tokens, tags = ["EU", "rejects", "it's"], ["B-ORG", "O", "O"]
    with (tmp_path / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("tokens", "tags"), *[(write(tokens), write(tags))] * 12])
    task = custom_task(Custom("tagging"), Place(str(tmp_path / "data.csv")))
    assert task.labels == ("B-ORG", "O") and task.metrics == ("entity_f1",)
    [train] = load_split_files(task, Place(str(tmp_path / "data.csv"), whole=True), ["train"]).values()
    assert train[0] == {"tokens": tokens, "tags": [0, 1, 1]}
