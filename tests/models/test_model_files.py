"""Models in forms that cannot be read are one line that says what to do, in every command that takes a model."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from mistakes import configure, fails
from safetensors.torch import load_file, save_file

from lit_compress.models.backbones import load_finetuned, load_net, load_tokenizer
from lit_compress.models.files import check_form, files_of_index
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

SST2 = get_task("sst2")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 133466304\n"


@pytest.fixture
def folder(tiny_backbone, tmp_path):
    return shutil.copytree(tiny_backbone, tmp_path / "model")


def adapter(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "base"}')


def adapter_alone(folder):
    adapter(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()


def pointer(name):
    def change(folder):
        if name.endswith(".bin"):
            (folder / "model.safetensors").unlink()
        (folder / name).write_text(POINTER)

    return change


def quantized(**settings):
    return lambda folder: configure(folder, **settings)


def half_of_generation(folder):
    (folder / "generation_config.json").write_text('{"num_beams": 4, "forced_bos_tok')


def page(folder):
    (folder / "model.safetensors").write_text("Entry not found")


FORMS = {
    "adapter beside weights": (adapter, r"has a PEFT adapter \(adapter_config.json\).*merge_and_unload\(\)"),
    "adapter alone": (adapter_alone, r"has a PEFT adapter \(adapter_config.json\).*merge_and_unload\(\)"),
    "half of the settings of generation": (half_of_generation, "generation_config.json' is not readable JSON"),
    "pointer": (pointer("model.safetensors"), "'model.safetensors' is a Git LFS pointer.*run git lfs pull"),
    "pointer to a pickle": (pointer("pytorch_model.bin"), "'pytorch_model.bin' is a Git LFS pointer"),
    "pointer to a shard": (pointer("model-00001-of-00002.safetensors"), "'model-00001-of-.*' is a Git LFS pointer"),
    "pointer to a tokenizer": (pointer("tokenizer.json"), "'tokenizer.json' is a Git LFS pointer"),
    "text": (page, "'model.safetensors' is no whole safetensors file .*; download it again"),
    "gptq": (quantized(quantization_config={"quant_method": "gptq", "bits": 4}), r"is quantized \(gptq\); give the"),
    "mlx": (quantized(quantization={"group_size": 64, "bits": 4}), r"is quantized \(by its config.json\)"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_form_that_cannot_be_read_is_one_line(form, folder):
    change, words = FORMS[form]
    change(folder)
    for load in (load_net, load_finetuned, load_tokenizer):
        with pytest.raises(UserError, match=rf"^model\.\w+: '{folder}'.*{words}"):
            load(str(folder), SST2)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_integers_are_no_weights(dtype, folder):
    path, name = folder / "model.safetensors", "bert.encoder.layer.0.attention.self.query.weight"
    tensors = load_file(path)
    save_file(tensors | {name: (tensors[name] * 127).to(dtype)}, path, metadata={"format": "pt"})
    for load in (load_net, load_finetuned):
        with pytest.raises(UserError, match=rf"is quantized \('{name}' is of type \w+\); give the model in float"):
            load(str(folder), SST2)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "model-q4.gguf").write_bytes(b"GGUF"),  # beside weights that can be read
        lambda folder: (folder / "pytorch_model.bin").write_text(POINTER),  # of which safetensors are read
        lambda folder: (folder / "model.onnx").write_text(POINTER),
        lambda folder: (folder / "spiece.model").write_text(POINTER),  # tokenizer.json has the same
        quantized(quantization_config=None),
    ],
)
def test_what_is_not_read_may_be_anything(change, folder):
    change(folder)
    check_form("model", folder)
    load_tokenizer(str(folder), SST2)


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def without_a_shard(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weights = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))


def no_weights(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (truncated, "'model.safetensors' is no whole safetensors file (Error while deserializing header"),
        (without_a_shard, "'model-00002-of-00002.safetensors' is missing, which 'model.safetensors.index.json' names"),
        (no_weights, "has no weights (model.safetensors)"),
    ],
)
def test_broken_weights_are_noticed(change, words, folder):
    change(folder)
    with pytest.raises(UserError, match=f"^model: '{folder}'.*{re.escape(words)}"):
        check_form(f"model: '{folder}'", folder, whole=True)


@pytest.mark.parametrize("option", ["--model.backbone", "--model.teacher"])
def test_a_run_does_not_begin_without_weights(option, folder, tiny_backbone, tiny_data, capsys, tmp_path):
    no_weights(folder)
    other = ["--model.backbone", tiny_backbone] if option == "--model.teacher" else []
    words = [*other, option, folder, "--data.task", "sst2", "--data.path", tiny_data, "--run_dir", tmp_path / "run"]
    line = fails(capsys, "fit", "--model", "SVD", *words)
    assert f"{option[2:]}: '{folder}' has no weights" in line and not (tmp_path / "run").exists()


@pytest.mark.parametrize("elsewhere", ["../other.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_names_only_files_next_to_it(elsewhere, tmp_path):
    with pytest.raises(UserError, match="is a file; give the folder of a model"):
        check_form("model", Path(__file__))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": elsewhere}}))
    with pytest.raises(UserError, match=r"index\.json' names '.*', which is no file next to it"):
        files_of_index("model.backbone: 'm'", index)
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert files_of_index("model.backbone: 'm'", index) == ["model-1.safetensors"]
