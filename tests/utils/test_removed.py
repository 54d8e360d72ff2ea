"""Options of earlier versions: a line says where to read on; stored ones are left out if they changed nothing."""

from __future__ import annotations

import pytest

from lit_compress.utils.errors import UserError
from lit_compress.utils.removed import removed, without_removed


def test_a_line_names_the_option():
    line = ": this option was removed in version 0.3; see 'Removed' in CHANGELOG.md"
    assert removed("model.retrain.refit") == f"model.retrain.refit{line}"
    assert removed("model.retrain.epochs") is None is removed("model.round_to")
    assert removed("export.round_to") == f"export.round_to{line}"


def test_a_stored_value_that_is_always_used_now_is_left_out():
    stored = {"density": 0.5, "retrain": {"epochs": 3, "refit": False}}
    assert without_removed(stored, strict=True) == {"density": 0.5, "retrain": {"epochs": 3}}
    rounded = {"model": {"round_to": 8}, "export": {"round_to": None}}
    assert without_removed(rounded, strict=True) == {"model": {"round_to": 8}, "export": {}}
    with pytest.raises(UserError, match=r"round_to: 8 was removed in version 0\.3; see 'Removed' in CHANGELOG.md$"):
        without_removed({"round_to": 8}, strict=True, group="export")
    with pytest.raises(UserError, match=r"refit: True was removed in version 0\.3"):
        without_removed({"retrain": {"refit": True}}, strict=True)
    assert without_removed({"retrain": {"refit": True}}, strict=False) == {"retrain": {}}
    lora = {"recompute": None, "retrain": {"parameters": "all", "lora": {"rank": 16, "alpha": 32.0, "targets": None}}}
    assert without_removed(lora, strict=True) == {"retrain": {}}
    with pytest.raises(UserError, match=r"parameters: 'lora' was removed in version 0\.3"):
        without_removed({"retrain": {"parameters": "lora"}}, strict=True)


def test_an_option_that_changed_nothing_is_left_out_at_any_value():
    assert without_removed({"prune": {"score_learning_rate": 0.3, "block": 8}}, strict=True) == {"prune": {"block": 8}}


def test_a_method_of_the_users_own_may_have_an_option_of_this_name():
    stored = {"model": {"class_path": "mine.Mine", "init_args": {"params": 7, "power": 0.25}}}
    assert without_removed(stored, strict=True) == stored
    stored["model"]["class_path"] = "lit_compress.methods.SP3"
    with pytest.raises(UserError, match=r"params: 7 was removed in version 0\.3"):
        without_removed(stored, strict=True)


def test_an_optimizer_or_a_schedule_may_have_an_option_of_this_name():
    schedule = {"class_path": "torch.optim.lr_scheduler.PolynomialLR", "init_args": {"power": 2.0}}
    init = {"retrain": {"lr_scheduler": schedule, "epochs": 1}}
    assert (
        without_removed({"class_path": "lit_compress.methods.SVD", "init_args": init}, True, "model")["init_args"]
        == init
    )


def test_a_stored_value_that_was_removed_has_a_line():
    assert without_removed({"format": "torch"}, strict=False, group="export") == {}
    assert without_removed({"format": "onnx"}, strict=True, group="export") == {"format": "onnx"}
    with pytest.raises(UserError, match=r"removes: 'auto' was removed in version 0\.3; see 'Removed'"):
        without_removed({"retrain": {"removes": "auto"}}, strict=True)
    assert without_removed({"retrain": {"removes": "auto", "epochs": 1}}, strict=False) == {"retrain": {"epochs": 1}}
