"""The expected time of passes over texts: operations counted by hand, one line before the work."""

from __future__ import annotations

import pytest
import torch
from tiny import make_net, write_backbone, write_texts
from torch import nn

from lit_compress.__main__ import main
from lit_compress.run import expected_time
from lit_compress.run.expected_time import product_speed, token_flops


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


def test_the_speed_is_that_of_a_product():
    assert 1e7 < product_speed(torch.device("cpu")) < 1e14


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
