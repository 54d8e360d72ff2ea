"""What commands take of a stored config: plain values of known keys."""

from __future__ import annotations

import pytest

from lit_compress.run.config import checked_config, checked_groups, plain_config
from lit_compress.utils.errors import UserError

CLASS = {"class_path": "os.system", "init_args": {"command": "true"}}


def config(**values):
    model = {
        "class_path": "mine.Mine",
        "init_args": {"density": 0.5, "prune": {"epochs": 1, "gates": ["a", "b"], "tables": [1, [2.0, None]]}},
    }
    return {"model": model, "data": {"task": "sst2"}, "export": {}, "trainer": {"precision": "bf16-mixed"}, **values}


def test_known_keys_are_kept():
    stored = config(seed_everything=3, run_dir="x", ckpt_path="last", trust_remote_code=True, anything=CLASS)
    kept = checked_config("x", stored)
    assert kept.keys() == {"model", "data", "export", "trainer", "seed_everything"}
    assert kept["model"] == config()["model"] and kept["trainer"] == config()["trainer"]


@pytest.mark.parametrize("value", [CLASS, [CLASS], [[CLASS]], {"a": CLASS}, {1: 2}, {"class_path": "os.system"}, {2}])
def test_a_class_is_left_out_or_refused(value):
    trainer = config(trainer={"strategy": value, "devices": 1})
    assert not checked_config("x", trainer)["trainer"].get("strategy") and trainer["trainer"]["strategy"] == value
    stored = config()
    stored["model"]["init_args"]["prune"]["tables"] = value
    stored = checked_groups("x", stored) if isinstance(value, list | dict) else stored | {"export": {}}
    assert not plain_config("x", stored)["model"]["init_args"]["prune"].get("tables")
    with pytest.raises(UserError, match=r"x: model\.prune\.tables.* is no plain value"):
        plain_config("x", stored, strict=True)
    for group in ("data", "export"):
        with pytest.raises(UserError, match=rf"x: {group}\.labels.* is no plain value; a stored config cannot name"):
            checked_config("x", config(**{group: {"labels": value}}))
