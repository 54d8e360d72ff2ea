"""Writing of GGUF files as llama.cpp's converter does, which is not in the package ``gguf``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor


def paired(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of queries or keys with the two halves of every head as neighbours."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def convert(folder: Path, file: Path, pieces: Sequence[str] = (), kind: str = "F32") -> None:
    """Write the model in ``folder`` as a GGUF file.

    Args:
        folder: of a Llama, Qwen2 or Qwen3.
        file: to write.
        pieces: its vocabulary: an unknown piece, a padding one, an end, a begin, characters, and what they merge to; ()
            for none.
        kind: of the matrices' values.
    """
    import gguf

    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    arch, blocks = config["model_type"], config["num_hidden_layers"]
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], blocks)
    writer, width = gguf.GGUFWriter(str(file), arch), config.get("head_dim")
    writer.add_block_count(blocks)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2" if pieces else "no_vocab")
    if pieces:
        writer.add_tokenizer_pre("default")
        writer.add_token_list(list(pieces))
        writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (len(pieces) - 4))
        writer.add_token_merges([f"{piece[:-1]} {piece[-1]}" for piece in pieces[4:] if len(piece) > 1])
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_bos_token_id(3)
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
        values = np.ascontiguousarray(tensor.numpy())
        if kind == "F32" or tensor.ndim < 2:
            writer.add_tensor(found, values)
            continue
        quantized = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(found, gguf.quants.quantize(values, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
