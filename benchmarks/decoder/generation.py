"""Tokens a second of ordinary decoders in one runtime, in turns.

serve.py calls :func:`main` in that runtime's own Python, which need not have lit_compress. ``RUNTIME``: ``pytorch``
(folders), ``openvino`` (folders of ``optimum-cli``; needs optimum-intel), ``llama.cpp`` (GGUF files; needs
llama-cpp-python). Every round continues the same tokens with every model: once with one token, once
with ``NEW`` more, greedily, one thread, seconds of the processor. Prints one JSON object: versions of the runtime, and
for every model the seconds of the rounds and the tokens of the answer.
"""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

Answer = Callable[[list[int], int], list[int]]
PACKAGES = {
    "pytorch": ("torch", "transformers"),
    "openvino": ("openvino", "optimum-intel", "transformers"),
    "llama.cpp": ("llama_cpp_python",),
}


def greedy(model: Any) -> Answer:
    """Return a function that continues tokens with a model of transformers or optimum."""
    import torch

    def answer(tokens: list[int], new: int) -> list[int]:
        ids = torch.tensor([tokens])
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new
        )
        return list(made[0, len(tokens) :].tolist())

    return answer


def open_pytorch(path: str, _: int) -> Answer:
    """Return the model in a folder, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return greedy(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())


def open_openvino(path: str, _: int) -> Answer:
    """Return the model in a folder that ``optimum-cli export openvino`` wrote."""
    optimum = import_module("optimum.intel")  # of that Python: it needs an older transformers
    return greedy(optimum.OVModelForCausalLM.from_pretrained(path, ov_config={"INFERENCE_NUM_THREADS": 1}))


def open_llama_cpp(path: str, length: int) -> Answer:
    """Return the model in a GGUF file."""
    llama_cpp = import_module("llama_cpp")  # of that Python
    model = llama_cpp.Llama(path, n_ctx=length, n_batch=length, n_threads=1, n_threads_batch=1, verbose=False)

    def answer(tokens: list[int], new: int) -> list[int]:
        model.reset()
        chosen: list[int] = []
        for token in model.generate(tokens, temp=0.0, repeat_penalty=1.0):
            chosen.append(int(token))
            if len(chosen) == new:
                return chosen
        raise AssertionError("it never ends by itself")

    return answer


OPEN = {"pytorch": open_pytorch, "openvino": open_openvino, "llama.cpp": open_llama_cpp}


def measure(answers: dict[str, Answer], tokens: list[int], new: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return for every model the seconds of the prompt and of ``new`` tokens behind it, and those tokens."""
    found: dict[str, dict[str, Any]] = {name: {"prompt": [], "generation": []} for name in answers}
    for counted in (False, *[True] * rounds):  # the first round warms up
        for name, answer in answers.items():
            start = time.process_time()
            answer(tokens, 1)
            middle = time.process_time()
            made = answer(tokens, 1 + new)
            if counted:
                found[name]["prompt"].append(middle - start)
                found[name]["generation"].append(time.process_time() - middle - (middle - start))
            found[name]["tokens"] = made
    return found


def main(runtime: str, rounds: str, new: str, prompt: str, *models: str) -> None:
    """Measure, and print what was found."""
    tokens = json.loads(Path(prompt).read_text())
    length = len(tokens) + int(new) + 8
    answers = {name: OPEN[runtime](path, length) for name, path in (model.split("=", 1) for model in models)}
    versions = {package: importlib.metadata.version(package) for package in PACKAGES[runtime]}
    found = measure(answers, tokens, int(new), int(rounds))
    print(json.dumps({"runtime": versions, "models": found}))
