"""What comes from elsewhere runs no code, here or where an export is loaded, and is refused in one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import pytest
import torch
from mistakes import fails

from lit_compress.models.backbones import load_net, load_tokenizer
from lit_compress.models.storage import load_net as stored_net
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

TASK = get_task("sst2")


@pytest.fixture
def backbone(tiny_backbone, tmp_path):
    return shutil.copytree(tiny_backbone, tmp_path / "backbone")


def test_a_tokenizer_of_an_export_names_no_code_of_others(backbone, tmp_path):
    path = backbone / "tokenizer_config.json"
    named = {"AutoTokenizer": [None, "hostile--code.Tokenizer"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": named}))
    load_tokenizer(str(backbone), TASK).save_pretrained(tmp_path / "out")
    assert "auto_map" not in (tmp_path / "out" / "tokenizer_config.json").read_text()


class Hostile:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_with_code_is_refused_without_advice_to_run_it(backbone, tmp_path):
    (backbone / "model.safetensors").unlink()
    with (backbone / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"weight": Hostile(tmp_path / "ran")}, file)
    with pytest.raises(UserError) as error:
        load_net(str(backbone), TASK)
    assert "save the model as safetensors" in str(error.value) and "weights_only" not in str(error.value)
    torch.save({"weight": Hostile(tmp_path / "ran")}, backbone / "pytorch_model.bin")
    with pytest.raises(UserError, match="save the model as safetensors"):
        load_net(str(backbone), TASK)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("kind", "words"), [("pivot", "export its run again"), ("pivott", "no layer of this package")])
def test_a_layer_that_is_not_here_is_refused(kind, words, backbone):
    spec = {"kind": kind, "in_features": 32, "out_features": 32, "rank": 4}
    (backbone / "structure.json").write_text(json.dumps({"bert.encoder.layer.0.attention.self.query": spec}))
    with pytest.raises(UserError, match=rf"structure.json: .*{kind}.*{words}"):
        stored_net(backbone)


@pytest.mark.parametrize("name", ["callbacks", "logger", "profiler", "plugins"])
def test_a_stored_config_builds_no_class_that_it_names(name, tmp_path, capsys, monkeypatch):
    """What is refused later is the missing net; the class is not even looked for."""
    hostile = {"class_path": "this.does.not.exist", "init_args": {}}
    old = os.path.join(os.path.dirname(__file__), "..", "old_runs", "lpaf", "export")
    folder = shutil.copytree(old, tmp_path / "export")
    report = json.loads((folder / "report.json").read_text())
    report["config"]["trainer"][name] = [hostile] if name in ("callbacks", "plugins") else hostile
    (folder / "report.json").write_text(json.dumps(report))
    assert "this.does.not.exist" not in fails(capsys, "validate", folder, "--data.path", tmp_path / "nothing")
