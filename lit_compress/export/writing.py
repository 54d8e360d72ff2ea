"""Programs with which a model writes text from its cache: ``decode``, and ``encode`` where the model has an encoder.

``decode`` reads tokens, and the keys and values of those before them, and returns the logits of the next token with all
keys and values. ``encode`` returns the keys and values of the text that is read, so that no matrix is in both.
``write.py`` (writer.py) calls them. The exporters of transformers divide a model otherwise: their ``prefill`` and
``decode`` both hold all matrices, and there is no loop that writes.
"""

from __future__ import annotations

import inspect
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_compress.export import writer
from lit_compress.export.program import TOLERANCE, Inputs, write_graph
from lit_compress.models.accounting import random_inputs
from lit_compress.models.sites import Model
from lit_compress.utils.files import write_json

NEW, BEGIN = 8, 16  # tokens that are written to compare, and those of the text before them


def write_writing(net: Model, folder: Path, texts: list[Inputs]) -> dict[str, Any] | None:
    """Write the programs, ``writing.json`` and ``write.py`` into ``folder``, compared with ``net`` on ``texts``.

    Returns:
        The names of the ``files``, their ``bytes``, how many ``tokens`` were written to compare, and by how much at
        most the logit of such a token is below the model's largest (``difference``, relative above 1). None if it
        cannot be done, with a warning.
    """
    files = ["write.py", "writing.json", "decode.onnx", "encode.onnx"]
    try:
        parts = _parts(net)
        batch, any_ = torch.export.Dim("batch", min=1), torch.export.Dim.DYNAMIC
        for name, (module, given, outputs) in parts.items():
            free: dict[str, Any] = {
                key: [{0: batch, 2: any_}] * len(value) if isinstance(value, list) else {0: batch, 1: any_}
                for key, value in given.items()
            }
            names = {"input_names": [*writer.flat(given)], "output_names": outputs}
            write_graph(module, given, free, folder / f"{name}.onnx", **names)
        cache = parts["decode"][1]["past"]
        write_json(folder / "writing.json", _facts(net, cache, {name: f"{name}.onnx" for name in parts}))
        shutil.copyfile(writer.__file__, folder / "write.py")
        tokens, difference = _compare(net, folder, texts)
        if not difference <= TOLERANCE["onnx"]:
            raise ValueError(f"other tokens than the model writes, off by {difference:.1e}")
    except Exception as error:  # exporters and runtimes raise anything
        for name in files:
            (folder / name).unlink(missing_ok=True)
        reason = (str(error).strip().split("\n")[0] or type(error).__name__)[:120]
        warnings.warn(
            f"export: no programs that write with the cache of {type(net).__name__} ({net.config.model_type}), "
            f"model.onnx gives logits only: {reason}",
            stacklevel=2,
        )
        return None
    files = [name for name in files if (folder / name).exists()]
    size = sum((folder / name).stat().st_size for name in files)
    return {"files": files, "bytes": size, "tokens": tokens, "difference": difference}


def _parts(net: Model) -> dict[str, tuple[nn.Module, dict[str, Any], list[str]]]:
    """Return the programs by name: the module, example inputs, names of the outputs."""
    inputs = random_inputs(net, 3, 9)
    inputs["attention_mask"][1, 5:] = 0
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        cache = net(**inputs, use_cache=True).past_key_values
    own = cache.self_attention_cache if net.config.is_encoder_decoder else cache
    past = [tensor.new_zeros(3, tensor.shape[1], 6, tensor.shape[3]) for tensor in _tensors(own)]
    outputs = ["logits", *(f"present.{i}" for i in range(len(past)))]
    if not net.config.is_encoder_decoder:
        longer = torch.cat([mask.new_zeros(3, 6), mask], dim=1)
        return {"decode": (_Decode(net), {"input_ids": ids, "attention_mask": longer, "past": past}, outputs)}
    read = _tensors(cache.cross_attention_cache)
    given = {"input_ids": ids[:, :4].clone(), "attention_mask": mask, "past": past, "read": read}
    names = [f"read.{i}" for i in range(len(read))]
    read_from = {"input_ids": ids, "attention_mask": mask}
    return {"decode": (_Decode(net), given, outputs), "encode": (_Encode(net), read_from, names)}


class _Encode(nn.Module):
    """From a text to its keys and values in every block of the decoder."""

    def __init__(self, net: Model) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        """Return keys, values, keys, ... of the blocks."""
        output = self.net(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=input_ids[:, :1], use_cache=True
        )
        return _tensors(output.past_key_values.cross_attention_cache)


class _Decode(nn.Module):
    """From tokens, and keys and values of those before them, to the logits of the next and all keys and values."""

    def __init__(self, net: Model) -> None:
        super().__init__()
        self.net, self.takes = net, inspect.signature(net.forward).parameters

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past: list[Tensor], read: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Return logits [texts, vocabulary], then keys, values, keys, ... of the blocks.

        The mask is of the text that is read; without an encoder, of all tokens, those of ``past`` first.
        """
        from transformers import DynamicCache, EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        own = DynamicCache(zip(past[::2], past[1::2], strict=True))  # all tokens, also if a block reads few of them
        if read is None:
            places = (attention_mask.cumsum(-1) - 1).clamp_min(0)[:, attention_mask.shape[1] - input_ids.shape[1] :]
            more = {"position_ids": places, "logits_to_keep": 1}  # logits of the last token alone
            output = self.net(
                input_ids=input_ids, attention_mask=attention_mask, past_key_values=own, use_cache=True,
                **{name: value for name, value in more.items() if name in self.takes},
            )  # fmt: skip
        else:
            both = EncoderDecoderCache(own, DynamicCache(zip(read[::2], read[1::2], strict=True)))
            # what the encoder found is in the cache; of its output only the number of texts and tokens is read
            state = attention_mask[:, :, None].expand(-1, -1, self.net.config.hidden_size).to(read[0].dtype)
            output = self.net(
                decoder_input_ids=input_ids, attention_mask=attention_mask, past_key_values=both, use_cache=True,
                encoder_outputs=BaseModelOutput(last_hidden_state=state),
            )  # fmt: skip
        return [output.logits[:, -1], *_tensors(own)]


def _tensors(cache: Any) -> list[Tensor]:
    """Return keys, values, keys, ... of the blocks that have an attention; these are the first ones of the cache."""
    layers = [layer for layer in cache.layers if layer.keys is not None]
    if layers != cache.layers[: len(layers)]:
        raise ValueError("some blocks of the decoder read nothing of the encoder")
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def _facts(net: Model, past: list[Tensor], programs: dict[str, str]) -> dict[str, Any]:
    """Return the settings of ``write.py``."""
    chosen, reads = net.generation_config, net.config.is_encoder_decoder
    ends, pad = chosen.eos_token_id, chosen.pad_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return {
        "programs": programs, "cache": [[tensor.shape[1], tensor.shape[3]] for tensor in past],
        "start": chosen.decoder_start_token_id if reads else None,
        "first": chosen.forced_bos_token_id if reads else None,
        "end": ends, "pad": pad if pad is not None else [*ends, 0][0], "longest": chosen.max_new_tokens or 20,
    }  # fmt: skip


def _compare(net: Model, folder: Path, texts: list[Inputs]) -> tuple[int, float]:
    """Return how many tokens the programs write, and how far the model's logit of one is below its largest, at most."""
    write, off, count, reads = writer.Writer(folder), [torch.zeros(1)], 0, net.config.is_encoder_decoder
    for inputs in texts:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        if not reads:  # padding is at the right here
            ids, mask = (value[:, : min(BEGIN, int(mask.sum(dim=1).min()))] for value in (ids, mask))
        written = torch.from_numpy(write.write(ids.numpy(), mask.numpy(), NEW))
        with torch.inference_mode():
            more = {"attention_mask": mask, "decoder_input_ids": written[:, :-1]} if reads else {}
            output = net(input_ids=ids if reads else written[:, :-1], **more)
        begin = int(write.facts["first"] is not None) if reads else ids.shape[1] - 1  # that is not chosen
        logits, new = output.logits[:, begin:], written[:, begin + 1 :]
        ends = torch.isin(new, torch.tensor(write.facts["end"], dtype=torch.int64)).long()
        valid = ends.cumsum(dim=1) - ends == 0  # what follows the end is padding
        below = logits.amax(dim=-1) - logits.gather(-1, new[..., None])[..., 0]
        off.append((below / logits.abs().amax().clamp_min(1))[valid])
        count += int(valid.sum())
    return count, float(torch.cat(off).max())
