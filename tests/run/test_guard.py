"""The guard of the memory: what cannot fit ends before the work, with the option that needs less."""

from __future__ import annotations

import pytest
from mistakes import fails
from tiny import make_net

from lit_compress.__main__ import main
from lit_compress.cli.lines import read_line
from lit_compress.cli.options import CommandLine
from lit_compress.models.accounting import forward_bytes
from lit_compress.run import guard
from lit_compress.run.guard import check_memory, logits_bytes
from lit_compress.utils.errors import UserError

GB = 10**9


@pytest.fixture
def free(monkeypatch):
    """Return a function that sets the machine's free memory."""
    return lambda size: monkeypatch.setattr(guard, "free_memory", lambda: size)


@pytest.fixture
def notes(monkeypatch):
    found = []
    monkeypatch.setattr(guard, "note", found.append)
    return found


def test_what_fits_passes_what_is_near_is_warned_of_and_the_rest_is_refused(free, notes):
    free(10 * GB)
    check_memory("retrain", 8.5 * GB, "take less")
    assert not notes
    for size in (8.6, 10.9):
        check_memory("retrain", size * GB, "take less")
        assert notes.pop() == f"memory: retrain needs about {size} GB, and 10.0 GB are free; take less"
    with pytest.raises(UserError, match=r"retrain needs about 11\.1 GB, and 10\.0 GB are free; take less"):
        check_memory("retrain", 11.1 * GB, "take less")
    free(None)  # a machine that does not say
    check_memory("retrain", 10**15, "take less")


def parts_of(short_run, *words):
    return CommandLine(read_line("plan", ["--model", "SVD", "--model.density", "0.5", *short_run, *words])).ready()


def sizes(parts):
    return {name: size for name, size, _ in guard._stages(parts)}, parts.dense


def test_a_stage_needs_a_forward_four_times_the_model_and_the_teacher(short_run):
    parts = parts_of(short_run)
    found, net = sizes(parts)
    size, length = sum(4 * value.numel() for value in net.parameters()), parts.data.train_dataloader().largest[1]
    assert found["dense"] == forward_bytes(net, 8, length, "parameters") + 4 * size
    assert 4 * 0.5 * size + size < found["retrain"] < found["dense"] + size
    assert sizes(parts_of(short_run, "--data.batch_size", "1"))[0]["dense"] < found["dense"]
    untrained = sizes(parts_of(short_run, "--model.retrain.epochs", "0"))[0]
    assert untrained["dense"] == found["dense"] and untrained["retrain"] < 2 * size


def test_logits_over_a_vocabulary_count():
    """In float32; an encoder-decoder writes a quarter of what it reads."""
    assert logits_bytes(make_net("bert"), 2, 8) == 0
    assert logits_bytes(make_net("llama", "plain_text"), 2, 8) == 4 * 2 * 8 * 100
    assert logits_bytes(make_net("bart", "xsum"), 2, 8) == 4 * 2 * 2 * 100


def test_fit_and_plan_refuse_before_the_work(short_run, tmp_path, capsys, free):
    words = ["--model", "SVD", "--model.density", 0.5, *short_run]
    free(1000)
    for args in (["fit", *words, "--run_dir", tmp_path / "run"], ["plan", *words]):
        assert "half of --data.batch_size with twice --trainer.accumulate_grad_batches makes the same" in fails(
            capsys, *args
        )
    assert not (tmp_path / "run").exists()


def test_recomputation_is_named_where_it_helps(short_run, capsys, free):
    free(1000)
    plan = ["plan", "--model.density", 0.5, *short_run, "--model"]
    assert "; --model.recompute true computes activations again and keeps few; half of" in fails(capsys, *plan, "SVD")
    assert "recompute" not in fails(capsys, *plan, "SVD", "--model.recompute", "true")
    lpaf = CommandLine(read_line("plan", ["--model", "LPAF", "--model.density", "0.5", *short_run])).ready()
    less = {name: can_less for name, _, can_less in guard._stages(lpaf)}
    assert less == {"dense": True, "prune": True, "retrain": False}


@pytest.mark.slow
def test_factorize_by_block_and_validate(tiny_backbone, tiny_data, tmp_path, capsys, free):
    from transformers import AutoTokenizer

    net = make_net("bert")
    net.config.id2label, net.config.label2id = {0: "negative", 1: "positive"}, {"negative": 0, "positive": 1}
    net.save_pretrained(tmp_path / "net")
    AutoTokenizer.from_pretrained(tiny_backbone).save_pretrained(tmp_path / "net")
    data = ["--data.task", "sst2", "--data.path", tiny_data]
    factorize = ["factorize", tmp_path / "net", tmp_path / "out", *data, "--density", 0.5]
    free(1000)
    assert "--by_block has one block in memory" in fails(capsys, *factorize)
    assert "a smaller --data.batch_size, or no --distil" in fails(capsys, *factorize, "--distil", 5)
    assert "--weighting none" in fails(capsys, *factorize, "--by_block", "float32")
    assert "smaller model" in fails(capsys, "validate", tmp_path / "net", *data)
    size = sum(4 * value.numel() for value in net.parameters())
    free(int(1.3 * size))
    assert "--data.eval_batch_size 1" in fails(capsys, "validate", tmp_path / "net", *data)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]
    free(10**12)
    main([str(word) for word in ["validate", tmp_path / "net", *data]])
    assert "memory" not in capsys.readouterr().err
