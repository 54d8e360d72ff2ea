"""Write texts with the programs of this folder, which continue from their cache: the likeliest token at every step.

It needs NumPy and ONNX Runtime, and nothing else::

    from write import Writer

    ids = Writer(".").write(input_ids, attention_mask)  # arrays [texts, tokens] of a tokenizer

``writing.json`` says which programs there are, and which tokens begin and end a text. A model with an encoder returns
the new tokens. Other models return inputs and new tokens; their inputs are padded on the left.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np


class Writer:
    """A model that writes; ``folder`` has ``writing.json`` and the programs."""

    def __init__(self, folder: str | Path) -> None:
        from onnxruntime import InferenceSession

        self.facts = json.loads((Path(folder) / "writing.json").read_text())
        programs = {name: Path(folder) / file for name, file in self.facts["programs"].items()}
        self.programs = {
            name: InferenceSession(path, providers=["CPUExecutionProvider"]) for name, path in programs.items()
        }

    def _run(self, name: str, **given: Any) -> list[np.ndarray]:
        arrays, program = flat(given), self.programs[name]
        return program.run(None, {item.name: arrays[item.name] for item in program.get_inputs()})

    def write(self, input_ids: Any, attention_mask: Any, longest: int | None = None) -> np.ndarray:
        """Return ids [texts, tokens], int64; at most ``longest`` new ones, default: as in ``writing.json``."""
        ids, mask = np.asarray(input_ids, np.int64), np.asarray(attention_mask, np.int64)
        texts, given = len(ids), {}
        if "encode" in self.programs:
            given = {"read": self._run("encode", input_ids=ids, attention_mask=mask)}
            ids = np.full((texts, 1), self.facts["start"], np.int64)
        else:  # the cache begins with one place that is masked: it is never empty
            mask = np.concatenate([np.zeros_like(mask[:, :1]), mask], axis=1)
        places = 0 if given else 1
        past = [np.zeros((texts, heads, places, size), np.float32) for heads, size in self.facts["cache"]]
        written, done = ids, np.zeros(texts, bool)
        for step in range(self.facts["longest"] if longest is None else longest):
            logits, *past = self._run("decode", input_ids=ids, attention_mask=mask, past=past, **given)
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


def flat(given: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of lists under names with numbers: ``past.0``, ``past.1``."""
    arrays: dict[str, Any] = {}
    for name, value in given.items():
        arrays |= {f"{name}.{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
    return arrays
