"""What the golden files cover: command lines of ``fit`` and ``factorize``, each on a tiny model."""

from __future__ import annotations

import functools

from contract_cases import VARIANTS, options, shipped_methods

GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
# name -> family, task, settings of the configuration
MODELS = {
    "bert": ("bert", "sst2", {}),
    "modernbert": ("modernbert", "sst2", {}),
    "qwen3": ("qwen3", "sst2", {}),
    "llama": ("llama", "plain_text", {**GROUPED, "attention_bias": True}),
    "llama2": ("llama", "plain_text", {"num_hidden_layers": 2}),
    "gpt2": ("gpt2", "plain_text", {}),
    "opt": ("opt", "plain_text", {}),
    "phi3": ("phi3", "plain_text", {}),
    "tied": ("llama", "plain_text", {**GROUPED, "tie_word_embeddings": True}),
}

RUN = [
    "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--trainer.logger", "false",
    "--model.dense.epochs", "1", "--model.retrain.epochs", "1", "--model.retrain.learning_rate", "1e-3",
]  # fmt: skip


@functools.cache
def fits() -> dict[str, tuple[str, list[str]]]:
    """Return the runs of decoders: name -> model, options. The model is its own teacher."""
    runs = {}
    for method in ("FWSVD", "FLOP", "LLMPruner", "SecondOrder", "SliceGPT"):
        runs[f"{method} llama"] = ("llama2", options(method, RUN))
    runs["SP3 llama"] = ("llama2", options("SP3", RUN))
    return runs


def contract() -> dict[str, tuple[str, list[str]]]:
    """Return the runs of the contract test, which compares them itself: name -> method, variant."""
    names = [(method, variant) for method in shipped_methods() for variant in VARIANTS.get(method, {"": []})]
    return {f"{method} {variant}".strip(): (method, [variant]) for method, variant in names}


ROWS = ["--fisher_examples", "20"]
UNITS = ["--removes", "structures"]
PRUNED = ["--method", "LLMPruner"]
FEWER = ["--method", "Layers", "--model.prune.choice", "measured", "--model.prune.examples", "20"]
SLICED = ["--method", "SliceGPT", "--model.prune.examples", "20"]
HALF = ["--density", "0.5"]
# name, which begins with the model -> options; these are made in memory and by block
BOTH_WAYS = {
    "bert kfac": HALF,
    "bert kfac parts": [*HALF, "--data.batch_size", "56"],  # more tokens than one forward of the calibration takes
    "bert kfac ranks": ["--rank", "7", "--allocation", "uniform"],
    "llama kfac": HALF,
    "llama kfac size": ["--budget", "size=120kB"],
    "llama kfac refined": [*HALF, "--refine", "5"],
    "bert none refined": [*HALF, "--weighting", "none", "--refine", "5"],
    "bert inputs": [*HALF, "--weighting", "inputs"],
    "llama inputs": [*HALF, "--weighting", "inputs", "--allocation", "global"],
    "bert fisher": [*HALF, "--weighting", "fisher", *ROWS],
    "bert none": ["--weighting", "none"],
    "llama none": ["--weighting", "none", "--rank", "5", "--dtype", "bfloat16"],
    "bert units": [*UNITS, "--density", "0.1"],
    "opt units inputs": [*UNITS, "--density", "0.15", "--weighting", "inputs"],
    "modernbert units": [*UNITS, "--density", "0.4", "--round_to", "8"],
    "llama units uniform": [*UNITS, *HALF, "--shape", "uniform"],
    "gpt2 units uniform": [*UNITS, "--budget", "flops=0.8", "--shape", "uniform"],
    "bert pruned": [*PRUNED, *HALF, "--model.prune.keep_first", "1"],
    "llama pruned": [*PRUNED, *HALF],
    "llama pruned uniform": [*PRUNED, "--budget", "params=20K", "--shape", "uniform"],
}  # fmt: skip
IN_MEMORY = {
    "bert kfac flops": ["--budget", "flops=0.6"],
    "bert sliced": [*SLICED, "--density", "0.7"],
    "tied sliced": [*SLICED, "--density", "0.6"],
    "opt sliced": [*SLICED, "--density", "0.7"],
    "phi3 sliced": [*SLICED, "--density", "0.6", "--round_to", "4"],
    "qwen3 sliced": [*SLICED, "--budget", "params=30K"],
    "modernbert fewer": [*FEWER, *HALF],
    "llama fewer": [*FEWER, "--budget", "params=25K"],
}


@functools.cache
def groups() -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Return the cases of every golden file: file -> name -> model, options; of the contract: method, variant."""

    def on_models(lines: dict[str, list[str]], *more: str) -> dict[str, tuple[str, list[str]]]:
        return {name: (name.split()[0], [*line, *more]) for name, line in lines.items()}

    return {
        "contract": contract(),
        "fit": fits(),
        "factorize": on_models(BOTH_WAYS | IN_MEMORY),
        "by_block": on_models(BOTH_WAYS, "--by_block", "float32"),
    }
