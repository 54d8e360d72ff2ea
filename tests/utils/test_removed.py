"""Options of earlier versions: a line says what to do; stored ones are left out if they changed nothing."""

from __future__ import annotations

import pytest
from mistakes import fails

from lit_compress.utils.errors import UserError
from lit_compress.utils.removed import removed, removed_value, without_removed


def test_a_line_says_what_to_do():
    assert removed("model.retrain.refit") == (
        "model.retrain.refit: this option was removed in version 0.3; "
        "factorize --refine STEPS fits the blocks to the dense model's outputs"
    )
    assert removed("model.retrain.epochs") is None is removed("model.round_to")
    assert str(removed("export.round_to")).endswith("multiples of a number when the model is compressed")


def test_a_stored_value_that_is_always_used_now_is_left_out():
    stored = {"density": 0.5, "retrain": {"epochs": 3, "refit": False}}
    assert without_removed(stored, strict=True) == {"density": 0.5, "retrain": {"epochs": 3}}
    rounded = {"model": {"round_to": 8}, "export": {"round_to": None}}
    assert without_removed(rounded, strict=True) == {"model": {"round_to": 8}, "export": {}}
    with pytest.raises(UserError, match=r"round_to: 8 was removed in version 0\.3; --model\.round_to"):
        without_removed({"round_to": 8}, strict=True, group="export")
    with pytest.raises(UserError, match=r"refit: True was removed in version 0\.3; factorize --refine"):
        without_removed({"retrain": {"refit": True}}, strict=True)
    assert without_removed({"retrain": {"refit": True}}, strict=False) == {"retrain": {}}
    lora = {"recompute": None, "retrain": {"parameters": "all", "lora": {"rank": 16, "alpha": 32.0, "targets": None}}}
    assert without_removed(lora, strict=True) == {"retrain": {}}
    with pytest.raises(
        UserError, match=r"parameters: 'lora' was removed in version 0\.3; all are trained; peft trains"
    ):
        without_removed({"retrain": {"parameters": "lora"}}, strict=True)


def test_a_method_of_the_users_own_may_have_an_option_of_this_name():
    stored = {"model": {"class_path": "mine.Mine", "init_args": {"params": 7, "power": 0.25}}}
    assert without_removed(stored, strict=True) == stored
    stored["model"]["class_path"] = "lit_compress.methods.SP3"
    with pytest.raises(UserError, match=r"params: 7 was removed in version 0\.3; --model\.density 0\.0589 is 5M"):
        without_removed(stored, strict=True)


def test_an_optimizer_or_a_schedule_may_have_an_option_of_this_name():
    schedule = {"class_path": "torch.optim.lr_scheduler.PolynomialLR", "init_args": {"power": 2.0}}
    init = {"retrain": {"lr_scheduler": schedule, "epochs": 1}}
    assert (
        without_removed({"class_path": "lit_compress.methods.SVD", "init_args": init}, True, "model")["init_args"]
        == init
    )


def test_a_value_that_was_removed_has_a_line():
    line = "export.format 'torch': this value was removed in version 0.3; --format onnx writes a program, "
    assert str(removed_value("export.format", "torch")).startswith(line) and removed_value("--format", "torch")
    assert removed_value("export.format", "onnx") is None is removed_value("model.format", "x")
    with pytest.raises(UserError, match=r"axis 'element': this value was removed in version 0\.3; both is as good"):
        without_removed({"retrain": {"axis": "element"}}, strict=True)
    assert without_removed({"retrain": {"axis": "element", "epochs": 1}}, strict=False) == {"retrain": {"epochs": 1}}


def test_the_command_of_earlier_versions_names_the_module(capsys):
    line = fails(capsys, "analyze", "sweep", "model", "out", "--data.task", "sst2")
    assert "analyze: this command was removed in version 0.3" in line and "python -m benchmarks.analysis" in line
