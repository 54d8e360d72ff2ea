"""Exports as the servers of ggml read them: names, sizes and values in a GGUF file, and what its forward gives.

llama.cpp's converter is not in the package ``gguf``, only the writer, the reader and the names. So this file converts
as that does: sizes from ``config.json``, names by ``TensorNameMap``, and with Llama's name the rows of queries and keys
in pairs, as ggml turns neighbours. A naive forward that reads the file alone has the logits of the library's class.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers import cut_uniformly, net_of, random_bases
from safetensors.torch import load_file

from lit_compress.export.fuse import compact
from lit_compress.export.modelling import write_model
from lit_compress.models.projected.fold import fold_projections
from lit_compress.models.projected.gates import GateSlots, ProjectionSpec
from lit_compress.models.projected.insert import insert_projections

gguf = pytest.importorskip("gguf")


def paired(rows, heads):
    """Rows of queries or keys: the two halves of every head become neighbours."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def convert(folder, file):
    """Write the export in ``folder`` as a GGUF file without a vocabulary."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    arch, blocks = config["model_type"], config["num_hidden_layers"]
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], blocks)
    writer, width = gguf.GGUFWriter(file, arch), config.get("head_dim")
    writer.add_block_count(blocks)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("no_vocab")
    if width is not None:
        writer.add_key_length(width)
        writer.add_value_length(width)
    for name, tensor in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            tensor = paired(tensor, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            tensor = paired(tensor, config["num_key_value_heads"])
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def forward(file, ids):
    """The logits of ``ids`` by what the file says, a block after the other."""
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    arch = fields["general.architecture"]
    tensors = {t.name: torch.from_numpy(t.data.copy()).double() for t in reader.tensors}

    def of(key, usual=None):
        return fields.get(f"{arch}.{key}", usual)

    heads, keys, eps = of("attention.head_count"), of("attention.head_count_kv"), of("attention.layer_norm_rms_epsilon")
    width, length = of("attention.key_length", of("embedding_length") // heads), len(ids)
    frequencies = of("rope.freq_base") ** (-torch.arange(0, width, 2).double() / width)
    angles = torch.arange(length).double()[:, None] * frequencies

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * tensors[f"{name}.weight"]

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)

    def turn(x):  # [tokens, heads, width]: neighbours with Llama's name, else the halves
        a, b = (x[..., ::2], x[..., 1::2]) if arch == "llama" else x.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        turned = a * cos - b * sin, a * sin + b * cos
        return torch.stack(turned, -1).flatten(-2) if arch == "llama" else torch.cat(turned, -1)

    x, mask = tensors["token_embd.weight"][ids], torch.ones(length, length).triu(1).bool()
    for i in range(of("block_count")):
        read = norm(x, f"blk.{i}.attn_norm")
        q, k, v = (linear(read, f"blk.{i}.attn_{role}").view(length, -1, width) for role in "qkv")
        if f"blk.{i}.attn_q_norm.weight" in tensors:
            q, k = norm(q, f"blk.{i}.attn_q_norm"), norm(k, f"blk.{i}.attn_k_norm")
        q, k, v = turn(q), *(t.repeat_interleave(heads // keys, 1) for t in (turn(k), v))
        scores = torch.einsum("ahd,bhd->hab", q, k) / width**0.5
        mixed = torch.einsum("hab,bhd->ahd", scores.masked_fill(mask, -torch.inf).softmax(-1), v).flatten(1)
        x = x + linear(mixed, f"blk.{i}.attn_output")
        read = norm(x, f"blk.{i}.ffn_norm")
        x = x + linear(torch.nn.functional.silu(linear(read, f"blk.{i}.ffn_gate")) * linear(read, f"blk.{i}.ffn_up"),
                       f"blk.{i}.ffn_down")  # fmt: skip
    last = norm(x, "output_norm")
    return last @ tensors.get("output.weight", tensors["token_embd.weight"]).T


def of_one_basis(net):
    """SP3's form with one basis for all blocks, of which 21 of 32 directions stay."""
    form = ProjectionSpec(("hidden",), group=100)
    insert_projections(net, random_bases(net, 100), form)
    GateSlots(net, form).set({"hidden": (torch.arange(32) < 21).float()[None]})
    return fold_projections(net)


@pytest.mark.parametrize(
    ("family", "narrow"),
    [("llama", lambda net: cut_uniformly(net, 0.4)), ("qwen2", lambda net: cut_uniformly(net, 0.6)),
     ("qwen3", lambda net: cut_uniformly(net, 0.4)), ("llama", of_one_basis)],
)  # fmt: skip
def test_the_converted_export_answers_as_the_net(family, narrow, tmp_path):
    net = narrow(net_of(family, torch.float32, task="plain_text"))
    write_model(compact(net), tmp_path)
    assert not (tmp_path / "modeling_compressed.py").exists()
    convert(tmp_path, tmp_path / "model.gguf")
    ids = torch.randint(5, 100, (12,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = net(input_ids=ids[None]).logits[0]
    assert torch.allclose(forward(tmp_path / "model.gguf", ids).float(), expected, atol=1e-4, rtol=1e-4)
