"""The expected memory is said before the work; what cannot fit ends there, with the option that needs less."""

from __future__ import annotations

from math import inf

import pytest
import torch
from mistakes import fails
from tiny import make_net

from lit_compress.__main__ import main
from lit_compress.methods import FWSVD, LPAF, SVD, LoSparse, SecondOrder
from lit_compress.methods.losparse import LowRankPlusSparse
from lit_compress.methods.lpaf import MixedRank
from lit_compress.models.activations import forward_bytes
from lit_compress.numerics import chunked_logits
from lit_compress.run import expected_memory as memory
from lit_compress.run.expected_memory import Need, check_need
from lit_compress.stages.weighting import Weighted
from lit_compress.utils.errors import UserError

GB = 10**9


@pytest.fixture
def free(monkeypatch):
    """Return a function that sets the machine's free memory."""
    monkeypatch.setattr(memory, "resident", lambda: 0)
    return lambda size: monkeypatch.setattr(memory, "free_memory", lambda: size)


@pytest.fixture
def notes(monkeypatch):
    found = []
    for module in ("run.expected_memory", "cli.one_shot", "cli.targets", "cli.by_block"):
        monkeypatch.setattr(f"lit_compress.{module}.note", found.append)
    return found


def test_what_fits_passes_what_is_near_is_warned_of_and_the_rest_is_refused(free, notes):
    need = Need("retrain", {"model": 3 * GB, "activations": GB})
    free(5 * GB)
    check_need(need, lambda: 1 / 0)
    assert not notes
    free(int(3.9 * GB))
    check_need(need, lambda: "take less")
    assert notes == ["memory: retrain needs about 4.0 GB more, and 3.9 GB are free; take less"]
    free(2 * GB)
    with pytest.raises(UserError, match=r"retrain needs about 4\.0 GB more, and 2\.0 GB are free; take less"):
        check_need(need, lambda: "take less")


def test_what_is_not_sure_is_not_refused(free, notes):
    free(GB)
    check_need(Need("retrain", {"model": 4 * GB}, sure=False), lambda: "take less")
    assert len(notes) == 1


def test_a_machine_that_does_not_say_refuses_nothing(free):
    free(None)
    check_need(Need("retrain", {"model": 10**15}), lambda: 1 / 0)


def test_the_line_has_the_parts():
    line = Need("retrain", {"model": 3 * GB, "teacher": 0, "activations": GB}).line()
    assert line == "memory: about 4.0 GB at the peak, in retrain (model 3.0 GB, activations 1.0 GB)"


def test_an_accelerator_has_no_libraries_in_its_memory():
    need = Need("retrain", {"model": 2e9, "libraries": 1e9})
    assert need.on(None) == need.on(torch.device("cpu")) == need
    assert need.on(torch.device("cuda")).line() == "memory: about 2.0 GB at the peak, in retrain (model 2.0 GB)"


def test_fit_says_it_and_refuses_with_a_batch_that_fits(short_run, tmp_path, capsys, free, monkeypatch):
    monkeypatch.setattr(memory, "LIBRARIES", 0)
    args = ["fit", "--model", "SVD", "--model.density", 0.5, *short_run, "--run_dir", tmp_path / "run"]
    needs = {}
    for batch in (8, 1):
        with monkeypatch.context() as patch:
            patch.setattr("lit_compress.cli.fitting.run_stages", lambda *_: 1 / 0)
            patch.setattr(
                memory,
                "largest_of",
                lambda found, batch=batch: needs.setdefault(batch, max(found, key=lambda n: n.total)),
            )
            with pytest.raises(ZeroDivisionError):
                main([*map(str, args[:-1]), str(tmp_path / f"run{batch}"), "--data.batch_size", str(batch)])
        assert f"{needs[batch].line()}\n" in capsys.readouterr().out
    assert needs[8].total > 1.2 * needs[1].total
    free(int(needs[1].total * 1.01))
    line = fails(capsys, *args)
    assert "--data.batch_size 1 --trainer.accumulate_grad_batches 8" in line and "stage" not in line
    assert not (tmp_path / "run").exists()
    free(1000)
    assert "--model.retrain.parameters lora" in (line := fails(capsys, *args)) or "smaller model" in line
    assert not (tmp_path / "run").exists()


def test_a_stage_without_training_needs_no_memory_for_it(short_run, tmp_path, monkeypatch):
    """It was planned with activations, gradients and moments, up to five times what it took on a GPU."""
    monkeypatch.setattr("lit_compress.cli.fitting.run_stages", lambda *_: 1 / 0)
    found, original = [], memory.fit_needs
    monkeypatch.setattr(memory, "fit_needs", lambda *args: found.append(list(original(*args))) or iter(found[-1]))
    for epochs in (1, 0):
        words = ["fit", "--model", "SVD", "--model.density", 0.5, *short_run, "--model.retrain.epochs", epochs]
        with pytest.raises(ZeroDivisionError):
            main([*map(str, words), "--run_dir", str(tmp_path / str(epochs))])
    trained, untrained = (needs[-1] for needs in found)
    assert [need.phase for need in found[0]] == ["dense", "retrain"] and "gradients and moments" in trained.parts
    assert set(untrained.parts) == {"model", "dense model", "activations", "logits", "libraries"}
    assert untrained.total < trained.total


def test_plan_refuses_too(short_run, capsys, free):
    free(1000)
    assert "memory: " in fails(capsys, "plan", "--model", "SVD", "--model.density", 0.5, *short_run)


def test_factorize_validate_and_by_block(tiny_backbone, tiny_data, tmp_path, capsys, free, notes):
    from tiny import make_net
    from transformers import AutoTokenizer

    net = make_net("bert")
    net.config.id2label, net.config.label2id = {0: "negative", 1: "positive"}, {"negative": 0, "positive": 1}
    net.save_pretrained(tmp_path / "net")
    AutoTokenizer.from_pretrained(tiny_backbone).save_pretrained(tmp_path / "net")
    data = ["--data.task", "sst2", "--data.path", tiny_data]
    out = tmp_path / "out"
    factorize = ["factorize", tmp_path / "net", out, *data, "--density", 0.5]
    free(1000)
    assert "--by_block float32" in fails(capsys, *factorize) or "--data.eval_batch_size" in fails(capsys, *factorize)
    assert "a smaller --data.batch_size needs less, no --distil" in fails(
        capsys, *factorize, "--distil", 5, "--data.batch_size", 4096
    )
    assert "--weighting none" in fails(capsys, *factorize, "--by_block", "float32")
    assert "smaller model" in fails(capsys, "validate", tmp_path / "net", *data)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]
    free(10**12)
    main([str(word) for word in factorize])
    main([str(word) for word in [*factorize[:2], tmp_path / "out2", *factorize[3:], "--by_block", "float32"]])
    main([str(word) for word in ["validate", tmp_path / "net", *data]])
    said = [line for line in notes if line.startswith("memory: about")]
    assert [line.split(" in ")[1].split(" (")[0] for line in said] == [
        "the calibration of factorize",
        "factorize --by_block",
        "evaluation",
    ]


@pytest.mark.parametrize(
    ("vocabulary", "length", "tokens", "largest"),
    [(8000, 8, 1, "gradient"), (500, 64, 8, "activations"), (500, 64, 10**6, "logits")],
)
def test_a_step_over_a_vocabulary_has_its_peak_at_one_moment(vocabulary, length, tokens, largest, monkeypatch):
    """In the loss, in a block, or when a tied embedding has two gradients: their parts are not added up."""
    monkeypatch.setattr(chunked_logits, "ELEMENTS", 2 * vocabulary * tokens)
    settings = {"vocab_size": vocabulary, "max_position_embeddings": 64, "num_hidden_layers": 4}
    net, teacher = (
        make_net("gemma3_text", "plain_text", seed, tie_word_embeddings=True, **settings) for seed in (0, 1)
    )
    method = SVD(task="plain_text", backbone="unused", density=0.5)
    stage, shape, numbers = method.stages()[-1], (4, length), sum(value.numel() for value in net.parameters())
    kept, teaches = (forward_bytes(n, *shape, graph) for n, graph in ((net, "parameters"), (teacher, "none")))
    for most in (inf, 0):  # blocks recompute above it
        states = 4 * 4 * length * 4 * net.config.hidden_size
        whole, left = (kept, kept) if most else (kept / 4 + states, states)
        moments = {
            "gradient": 4 * vocabulary * net.config.hidden_size,
            "activations": whole + teaches,
            "logits": left + 5 * 4 * min(tokens, 4 * length) * 2 * vocabulary,
        }
        assert max(moments, key=moments.get) == largest
        need = memory._training(method, stage, net, teacher, shape, False, most)
        assert need.total == memory.LIBRARIES + 5 * 4 * numbers + moments[largest]


def test_every_stage_says_which_moments_it_sums():
    """LPAF and LoSparse sum them, too, if their factors are those under K-FAC."""
    made = [
        SVD(density=0.5),
        FWSVD(density=0.5),
        FWSVD(density=0.5, retrain=Weighted(weighting="inputs")),
        SecondOrder(density=0.5),
        LPAF(density=0.5, retrain=MixedRank(weighting="kfac")),
        LoSparse(density=0.5, prune=LowRankPlusSparse(weighting="kfac", init="finetuned")),
        LoSparse(density=0.5),
    ]
    assert [method.stages()[-1].moments for method in made] == [None, None, "inputs", "kfac", "kfac", "kfac", None]
