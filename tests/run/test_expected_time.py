"""The expected time of passes over texts: operations counted by hand, one line before the work."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny import make_net, write_backbone, write_texts
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lit_compress.__main__ import main
from lit_compress.data.datamodule import DataModule
from lit_compress.methods.second_order import KroneckerWeighted, SecondOrder
from lit_compress.models.accounting import counted_weights
from lit_compress.run import expected_time
from lit_compress.run.expected_time import factorize_flops, product_speed, token_flops
from lit_compress.stages.distil import NO_RECOVERY, Recovery


@pytest.mark.parametrize("tied", [True, False])
def test_operations_of_a_token(tied):
    """Those of every Linear; the output layer counts where it reads every token, a table of embeddings never."""
    net = make_net("llama", "plain_text", tie_word_embeddings=tied)
    blocks = sum(
        2 * layer.in_features * layer.out_features
        for layer in net.model.modules()
        if isinstance(layer, nn.Linear)
    )  # fmt: skip
    output = 2 * net.config.vocab_size * net.config.hidden_size
    assert token_flops(net, True) == blocks + output
    assert token_flops(net, False) == blocks + (0 if tied else output)


@pytest.mark.parametrize(("weighting", "gradients"), [("kfac", True), ("inputs", False), ("none", False)])
def test_operations_of_factorize(weighting, gradients, tiny_backbone, tiny_data):
    """Dev texts through both models twice; 20 calibration texts; 5 steps of every block; 7 steps of 16 texts."""
    data = DataModule("sst2", str(tiny_backbone), path=str(tiny_data), batch_size=16)
    settings = KroneckerWeighted(calibration_examples=20, weighting=weighting)
    method = SecondOrder(backbone=str(tiny_backbone), density=0.5, task="sst2", retrain=settings)
    dense, own = make_net("bert", "sst2"), make_net("bert", "sst2", intermediate_size=8)
    forward, smaller = token_flops(dense, False), token_flops(own, False)
    splits = data.train_tokens(), data.val_dataloader()[0].dataset.encoded
    train, dev = (sum(map(len, rows["input_ids"])) for rows in splits)
    each = train / len(data.train_tokens())
    sums = sum(w.shape[1] ** 2 + (w.shape[0] ** 2 if gradients else 0) for w in counted_weights(dense))
    calibration = 20 * each * ((3 if gradients else 1) * forward + 2 * sums) if weighting != "none" else 0

    def flops(recovery):
        return factorize_flops(method, method.stages()[-1], [dense, own], data, 2, recovery)

    plain = 2 * dev * (forward + smaller) + calibration
    assert flops(NO_RECOVERY) == pytest.approx(plain)
    step, read = min(512, 20 * each) * 3 * smaller, 20 * each * (forward + 2 * smaller)
    assert flops(Recovery(refine=5)) - plain == pytest.approx(5 * step + read)
    assert flops(Recovery(distil=7)) - plain == pytest.approx(7 * 16 * each * (forward + 3 * smaller))


def test_without_a_number_a_thousand_texts_calibrate(tiny_backbone, tiny_data, monkeypatch):
    monkeypatch.setattr("lit_compress.stages.weighting.CALIBRATION_EXAMPLES", 30)
    data = DataModule("sst2", str(tiny_backbone), path=str(tiny_data))
    nets = [make_net("bert", "sst2")] * 2

    def flops(examples):
        settings = KroneckerWeighted(calibration_examples=examples)
        method = SecondOrder(backbone=str(tiny_backbone), density=0.5, task="sst2", retrain=settings)
        return factorize_flops(method, method.stages()[-1], nets, data, 1, NO_RECOVERY)

    assert flops(None) == flops(30) < flops(31)


def test_the_speed_is_that_of_a_product():
    assert 1e7 < product_speed(torch.device("cpu")) < 1e14


@pytest.mark.parametrize(("seconds", "sides"), [(1.0, [256]), (0.001, [256, 512, 1024, 2048, 4096])])
def test_a_slow_device_multiplies_little(seconds, sides, monkeypatch):
    now = itertools.count(0, seconds)
    monkeypatch.setattr(expected_time.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(torch, "rand", lambda *side, device: torch.empty(*side, device="meta"))
    with FlopCounterMode(display=False) as counter:
        assert product_speed(torch.device("cpu")) == pytest.approx(2 * sides[-1] ** 3 / seconds)
    assert counter.get_total_flops() == sum(2 * 2 * side**3 for side in sides)


def test_commands_say_how_long_they_take(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(expected_time, "product_speed", lambda device: 1e5)
    write_backbone(tmp_path / "net", "llama", "plain_text")
    data = ["--data.task", "plain_text", "--data.path", str(write_texts(tmp_path)), "--data.max_length", "16"]
    main(["validate", str(tmp_path / "net"), *data])
    said = capsys.readouterr().err
    assert "note: time: at least about " in said and "at the 0 GFLOP/s that are reached now" in said
    main(["factorize", str(tmp_path / "net"), str(tmp_path / "out"), *data, "--calibration_examples", "20"])
    assert "note: time: at least about " in capsys.readouterr().err
    monkeypatch.setattr("lit_compress.utils.progress._noted", set())  # a line is said once in a process
    main(["factorize", str(tmp_path / "net"), str(tmp_path / "blocks"), *data, "--calibration_examples", "20",
          "--by_block", "float32"])  # fmt: skip
    assert "note: time: at least about " in capsys.readouterr().err
    main(["fit", "--model", "SVD", "--model.backbone", str(tmp_path / "net"), *data, "--model.dense.epochs", "1",
          "--model.retrain.epochs", "0", "--run_dir", str(tmp_path / "run"), "--trainer.logger", "false",
          "--trainer.enable_progress_bar", "false"])  # fmt: skip
    assert "\ntime: at least about " in capsys.readouterr().out
