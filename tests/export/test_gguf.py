"""Exports as the servers of ggml read them: names, sizes and values in a GGUF file, and what its forward gives.

llama.cpp's converter is not in the package ``gguf``, only the writer, the reader and the names. So gguf_files.py
converts as that does: sizes from ``config.json``, names by ``TensorNameMap``, and with Llama's name the rows of queries
and keys in pairs, as ggml turns neighbours. A naive forward that reads the file alone has the logits of the library's
class.
"""

from __future__ import annotations

import pytest
import torch
from gguf_files import convert
from helpers import cut_uniformly, net_of, random_bases

from lit_compress.export.fuse import compact
from lit_compress.export.modelling import write_model
from lit_compress.models.projected.fold import fold_projections
from lit_compress.models.projected.gates import GateSlots, ProjectionSpec
from lit_compress.models.projected.insert import insert_projections

gguf = pytest.importorskip("gguf")


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
        q, (k, v) = turn(q), (t.repeat_interleave(heads // keys, 1) for t in (turn(k), v))
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
