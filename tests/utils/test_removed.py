"""Options of earlier versions: a line says what to do; stored ones are left out if they changed nothing."""

from __future__ import annotations

import pytest

from lit_compress.utils.errors import UserError
from lit_compress.utils.removed import removed, removed_value, without_removed


def test_a_line_says_what_to_do():
    assert removed("model.retrain.refit") == (
        "model.retrain.refit: this option was removed in version 0.3; "
        "factorize --refine STEPS fits the blocks to the dense model's outputs"
    )
    assert removed("model.retrain.epochs") is None


def test_a_stored_value_that_is_always_used_now_is_left_out():
    stored = {"density": 0.5, "retrain": {"epochs": 3, "refit": False}}
    assert without_removed(stored, strict=True) == {"density": 0.5, "retrain": {"epochs": 3}}
    with pytest.raises(UserError, match=r"refit: True was removed in version 0\.3; factorize --refine"):
        without_removed({"retrain": {"refit": True}}, strict=True)
    assert without_removed({"retrain": {"refit": True}}, strict=False) == {"retrain": {}}


def test_a_value_that_was_removed_has_a_line():
    line = "export.format 'torch': this value was removed in version 0.3; --format onnx writes a program, "
    assert str(removed_value("export.format", "torch")).startswith(line) and removed_value("--format", "torch")
    assert removed_value("export.format", "onnx") is None is removed_value("model.format", "x")
    with pytest.raises(UserError, match=r"axis 'element': this value was removed in version 0\.3; both is as good"):
        without_removed({"retrain": {"axis": "element"}}, strict=True)
    assert without_removed({"retrain": {"axis": "element", "power": 1}}, strict=False) == {"retrain": {"power": 1}}
