"""Write texts with the programs of this folder, which go on from their cache: the likeliest token at every step.

It needs NumPy, and ONNX Runtime or PyTorch, and nothing else::

    from write import Writer

    ids = Writer(".").write(input_ids, attention_mask)  # arrays [texts, tokens] of a tokenizer

``writing.json`` says which programs there are, and which tokens begin and end a text. A net with an encoder returns
what it writes. Another returns the inputs and what follows; the padding of its inputs stands at the left.
"""

import json
from pathlib import Path

import numpy as np


class Writer:
    """A net that writes.

    Args:
        folder: with ``writing.json`` and the programs.
    """

    def __init__(self, folder):
        self.facts = json.loads((Path(folder) / "writing.json").read_text())
        self.run = {name: _load(Path(folder) / file) for name, file in self.facts["programs"].items()}

    def write(self, input_ids, attention_mask, longest=None):
        """Return ids [texts, tokens], int64; of ``longest`` new ones at most, by default what ``writing.json`` says."""
        ids, mask = np.asarray(input_ids, np.int64), np.asarray(attention_mask, np.int64)
        texts, given = len(ids), {}
        if "encode" in self.run:
            given = {"read": self.run["encode"]({"input_ids": ids, "attention_mask": mask})}
            ids = np.full((texts, 1), self.facts["start"], np.int64)
        else:  # the cache begins with one place that is masked: it is never empty
            mask = np.concatenate([np.zeros_like(mask[:, :1]), mask], axis=1)
        places = 0 if given else 1
        past = [np.zeros((texts, heads, places, size), np.float32) for heads, size in self.facts["cache"]]
        written, done = ids, np.zeros(texts, bool)
        for step in range(self.facts["longest"] if longest is None else longest):
            logits, *past = self.run["decode"]({"input_ids": ids, "attention_mask": mask, "past": past, **given})
            new = logits.argmax(axis=-1)
            if step == 0 and self.facts["first"] is not None:
                new[:] = self.facts["first"]
            new[done] = self.facts["pad"]
            done |= np.isin(new, self.facts["end"])
            ids = new[:, None].astype(np.int64)
            written = np.concatenate([written, ids], axis=1)
            if done.all():
                break
            if not given:
                mask = np.concatenate([mask, np.ones_like(ids)], axis=1)
        return written


def _load(path):
    """Return a function from arrays, or lists of them, by name to a list of arrays."""
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [item.name for item in session.get_inputs()]

        def run_onnx(given):
            arrays = _flat(given)
            return session.run(None, {name: arrays[name] for name in names})

        return run_onnx
    import torch

    module = torch.export.load(path).module()

    def tensors(value):
        return [torch.from_numpy(item) for item in value] if isinstance(value, list) else torch.from_numpy(value)

    def run(given):
        with torch.inference_mode():
            return [item.numpy() for item in module(**{name: tensors(value) for name, value in given.items()})]

    return run


def _flat(given):
    """Return the arrays of lists under names with numbers: ``past.0``, ``past.1``."""
    lists = {name: value for name, value in given.items() if isinstance(value, list)}
    numbered = {f"{name}.{i}": item for name, items in lists.items() for i, item in enumerate(items)}
    return {name: value for name, value in given.items() if name not in lists} | numbered
