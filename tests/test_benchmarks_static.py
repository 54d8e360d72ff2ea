"""Static vectors: means and logistic regression against naive loops, a real table by model2vec, both kinds of tasks."""

import numpy as np
import pytest
import torch
from tiny import make_net
from transformers import AutoTokenizer

from benchmarks.comparison.static import distil, fit_head, read, score
from benchmarks.embedding.static import RARE, NoBlocks, Table, vectors_of
from lit_compress.data.datamodule import DataModule


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_backbone):
    """A table that model2vec made of the tiny model and saved."""
    pytest.importorskip("model2vec"), pytest.importorskip("skeletoken")
    out = tmp_path_factory.mktemp("static") / "vectors"
    distil(tiny_backbone, out)
    return out


def test_vectors_are_those_of_model2vec(folder):
    from model2vec import StaticModel

    texts = ["a great film", "great film film, film", "zzq"]
    theirs = StaticModel.from_pretrained(folder).encode(texts)
    static = read(folder)
    np.testing.assert_allclose(static.vectors(texts), theirs, atol=1e-3)  # theirs are added in 16 bits
    assert static.bytes == (folder / "model.safetensors").stat().st_size


def test_classes_are_learned_on_training_rows_and_scored_on_dev_rows(folder, tiny_backbone, tiny_data):
    data = DataModule(task="sst2", backbone=str(tiny_backbone), path=str(tiny_data), batch_size=8)
    static = fit_head(read(folder), data)
    scores = score(static, data)
    answers = static.answers([data.val_dataloader()[0].dataset.rows["sentence"]]).argmax(1)
    labels = [batch["labels"] for batch in data.val_dataloader()[0]], [b["index"] for b in data.val_dataloader()[0]]
    right = [int(answers[i]) == int(label) for label, i in zip(*map(torch.cat, labels), strict=True)]
    assert scores["val/accuracy"] == pytest.approx(sum(right) / len(right)) and scores["val/accuracy"] > 0.6
    assert scores["val/accuracy_low95"] < scores["val/accuracy"] and scores["val/rows"] == len(right)
    assert static.bytes > read(folder).bytes


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_vectors_of_a_sentence_model_are_those_of_its_tokens(family, tmp_path, tiny_backbone):
    """A token alone in the dense model, less the mean over the vocabulary; frequent ones count less."""
    net = make_net(family, "stsb_embedding", dropout=0.0).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_backbone)
    (tmp_path / "texts.txt").write_text("film film film\nfilm great\n")
    found = vectors_of(net, tokenizer, tmp_path / "texts.txt")
    first, last, film, great = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", "film", "great"])
    with torch.no_grad():
        rows = [net(torch.tensor([[first, i, last]])).last_hidden_state[0].mean(0) for i in range(len(found))]
    mean, shares = torch.stack(rows).mean(0), {film: 0.8, great: 0.2}
    for token, row in enumerate(rows):
        weight = 0.0 if token in tokenizer.all_special_ids else RARE / (RARE + shares.get(token, 0.0))
        torch.testing.assert_close(found[token], (row - mean) * weight, rtol=1e-4, atol=1e-5)
    net.embeddings, net.encoder = Table(found), NoBlocks()
    states = net(torch.tensor([[film, great]])).last_hidden_state
    torch.testing.assert_close(states[0], found[[film, great]])
