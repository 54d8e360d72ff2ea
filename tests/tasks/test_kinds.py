"""What every kind has to give: a head, losses whose Fisher sums are those of single rows."""

from dataclasses import replace

import pytest
import torch
from in_memory import batch_of, collect_kronecker, cut, estimate_fisher
from tiny import DECODERS, make_batch, make_net

from lit_compress.models.backbones import empty_net, load_config, load_finetuned
from lit_compress.models.backbones import load_net as load_backbone
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net, save_net
from lit_compress.numerics.losses import example_losses, logits_losses
from lit_compress.stages.micro_batches import hidden_states
from lit_compress.tasks import KINDS, task_type, task_type_of_net
from lit_compress.tasks.records import TASKS, Writing, get_task
from lit_compress.utils.errors import UserError

OF_KIND = {kind: next(task for task in TASKS.values() if task.kind == kind) for kind in KINDS}


WRITERS = {"summarization": ("bart", "t5"), "language_modelling": ("opt", "llama", "qwen3")}
READERS = ("bert", "distilbert", "deberta-v2", "modernbert", "llama", "qwen3")
SAME = ("regression", "reranking", "multi_label")  # have the classes of classification
PAIRS = [(kind, family) for kind in KINDS for family in WRITERS.get(kind, READERS[:1] if kind in SAME else READERS)]


@pytest.mark.parametrize("kind", ["classification", "regression", "tagging", "span_qa"])
@pytest.mark.parametrize(("family", "trained"), [("llama", "plain_text"), ("qwen3", "plain_text"),
                                                 ("modernbert", "sst2")])  # fmt: skip
def test_a_new_head_keeps_the_trained_blocks(family, trained, kind, tmp_path):
    """Whatever the two nets call their base model: Llama's with a head for spans calls it otherwise."""
    old = make_net(family, trained)
    old.save_pretrained(tmp_path)
    blocks, again = (net.base_model.state_dict() for net in (old, load_backbone(str(tmp_path), OF_KIND[kind])))
    assert blocks.keys() == again.keys() and all(torch.equal(again[name], value) for name, value in blocks.items())


@pytest.mark.parametrize(("kind", "family"), PAIRS)
def test_a_net_survives_its_folder(kind, family, tmp_path):
    """Its class is known from the configuration alone, whatever the backbone was trained for before."""
    task = replace(OF_KIND[kind], writing=Writing(target_length=16))
    net = make_net(family, task.name)
    net.config.architectures = ["BertForMaskedLM"]
    save_net(net, tmp_path)
    assert type(load_net(tmp_path)) is type(net)
    config = load_config(str(tmp_path), task)
    assert type(empty_net(config)) is type(net) and type(net).__name__.endswith(KINDS[kind].suffix)
    assert task_type_of_net(config).auto_class == KINDS[kind].auto_class == task_type(task).auto_class
    if task.labels:
        assert config.id2label == dict(enumerate(task.labels))
    assert type(load_finetuned(str(tmp_path), task)) is type(net)


@pytest.mark.parametrize(("kind", "family"), PAIRS)
def test_no_forward_keeps_the_keys_and_values_of_all_blocks(kind, family, monkeypatch):
    """Only writing reads them."""
    task = OF_KIND[kind]
    net, of = make_net(family, task.name).eval(), task_type(task)
    monkeypatch.setattr("transformers.cache_utils.Cache.__init__", lambda *_, **__: pytest.fail("a cache was made"))
    of.run(net, batch_of(net, kind))


@pytest.mark.parametrize("family", ["bart", *DECODERS])
def test_a_forward_up_to_the_head_has_the_same_states(family):
    """A head over a vocabulary would take much of the time of a forward whose states alone are read; T5's runs."""
    kind = "summarization" if family == "bart" else "language_modelling"
    net, of = make_net(family, OF_KIND[kind].name).eval(), KINDS[kind]
    batch = batch_of(net, kind)
    whole, short = (of.run(net, batch, logits, output_hidden_states=True) for logits in (True, False))
    assert "logits" in whole and "logits" not in short
    for stack, other in zip(hidden_states(whole), hidden_states(short), strict=True):
        assert all(map(torch.equal, stack, other)) and len(stack) == len(other)
    net.get_output_embeddings().register_forward_hook(lambda *_: pytest.fail("the head ran"))
    collect_kronecker(net, [batch], kind, labels=None)


@pytest.mark.parametrize(("family", "kind"), [("opt", "tagging"), ("opt", "summarization"), ("bart", "embedding")])
def test_a_family_without_the_head_is_refused(family, kind, tmp_path):
    save_net(make_net(family, "sst2"), tmp_path)
    task = OF_KIND[kind]
    with pytest.raises(
        UserError, match=f"architecture {family}, which has no head for {kind}; task '{task.name}' needs"
    ):
        load_config(str(tmp_path), task)


@pytest.mark.parametrize("kind", ["classification", "embedding"])
def test_a_teacher_of_another_kind_is_refused(kind, tmp_path):
    save_net(make_net("bert", "conll2003"), tmp_path)
    with pytest.raises(UserError, match=f"is for tagging, task '{OF_KIND[kind].name}' is {kind}"):
        load_finetuned(str(tmp_path), OF_KIND[kind])


@pytest.mark.parametrize(
    ("kind", "family"),
    [("tagging", "bert"), ("span_qa", "bert"), *((kind, family) for kind in WRITERS for family in WRITERS[kind])],
)
def test_fisher_of_a_batch_is_that_of_single_rows(kind, family):
    net = make_net(family, OF_KIND[kind].name, dropout=0.0).double().eval()
    batch, sites = batch_of(net, kind), [site.name for site in find_sites(net)]
    found, sums = estimate_fisher(net, [batch], kind, sites), dict.fromkeys(sites, 0.0)
    for part in cut(batch, 1, 1, 1, 1):
        net.zero_grad()
        logits = KINDS[kind].logits(net(**KINDS[kind].inputs(net, part)), part)
        example_losses(logits, part["labels"], KINDS[kind].loss).mean().backward()
        sums = {name: value + net.get_submodule(name).weight.grad ** 2 / 4 for name, value in sums.items()}
    for name, value in sums.items():
        assert torch.allclose(found[name], value.mean(0), rtol=1e-8, atol=1e-14)
        assert value.sum() > 0


@pytest.mark.parametrize(
    ("family", "task"), [("bert", "sst2"), ("bert", "stsb"), ("llama", "plain_text"), ("bert", "stsb_embedding")]
)
def test_the_dev_loss_is_the_task_loss_of_training(family, task):
    net, kind, batch = make_net(family, task).eval(), task_type(get_task(task)), make_batch()
    if task == "plain_text":
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    if task == "stsb_embedding":
        assert kind.dev_loss(torch.zeros(4, 2, 32), batch) is None
        return
    with torch.no_grad():
        found = kind.dev_loss(kind.outputs(net, batch, None), batch)
        terms = logits_losses(kind.logits(kind.run(net, batch), batch), batch["labels"], kind.loss)
    torch.testing.assert_close(found, terms["task"])
    empty = {name: column[:0] for name, column in batch.items()}  # of a rank whose rows only fill up
    assert kind.dev_loss(kind.outputs(net, batch, None)[:0], empty).isnan()


@pytest.mark.parametrize(
    ("kind", "label", "words"),
    [
        ("classification", ["good"], "neither text nor a whole number"),
        ("classification", 0.5, "is a number with a fraction"),
        ("regression", None, "the label is null"),
        ("regression", "much", "much"),
        ("regression", "2_34", "label '2_34' is not a finite number"),
    ],
)
def test_labels_that_are_none(kind, label, words):
    with pytest.raises(UserError, match=rf"^file row 3: .*{words}"):
        KINDS[kind].label_of(OF_KIND[kind], "file row 3", {OF_KIND[kind].label: label})
