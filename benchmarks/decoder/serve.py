"""Tokens a second of the ordinary models of run.py, prompt and generation: PyTorch, OpenVINO, llama.cpp.

    python -m benchmarks.decoder.serve --backbone DIR --data DIR [--work DIR] [--only dense even-0.8 ...]
        [--openvino PYTHON] [--llama_cpp PYTHON --converter .../convert_hf_to_gguf.py] [--rounds 5]

Takes the models that run.py left in ``--work``, as the folders that an export has, so servers read them without
lit_compress. ``--openvino`` is a Python with ``optimum-intel``, which writes its own programs with a cache;
``--llama_cpp`` one with ``llama-cpp-python``; ``--converter`` the script in llama.cpp's source. All models of a runtime
take turns in one process (generation.py). Writes benchmarks/decoder/results/serve/<runtime>.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.decoder import run

SCRIPT = "decoder/serve"
MODELS = ("dense", "even-0.9", "even-0.8", "even-0.6", "layers-0.8")
FORMS = {"pytorch": ("float32",), "openvino": ("fp32", "int8"), "llama.cpp": ("f16", "q8_0", "q4_k_m")}
QUANTIZE = """
import sys, llama_cpp
options = llama_cpp.llama_model_quantize_default_params()
options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
sys.exit(llama_cpp.llama_model_quantize(*(path.encode() for path in sys.argv[1:]), options))
"""
PROMPT, NEW, ROUNDS = 256, 64, 5


def write_folder(options: Any, name: str) -> Path:
    """Write a model of ``--work`` as an ordinary folder with a tokenizer; return it."""
    from transformers import AutoTokenizer

    from lit_compress.export.modelling import ordinary_net
    from lit_compress.models.storage import load_net

    folder = options.work / "served" / name
    if not (folder / "tokenizer_config.json").exists():
        net = load_net(options.work / name)
        ordinary = ordinary_net(net)
        if ordinary is None:
            sys.exit(f"{name} is no ordinary model")
        ordinary.save_pretrained(folder)
        AutoTokenizer.from_pretrained(options.backbone).save_pretrained(folder)
    return folder


def write_gguf(options: Any, folder: Path, form: str) -> Path:
    """Convert a folder by llama.cpp's converter, and quantize to fewer than 8 bits by llama.cpp; return the file."""
    path = folder.parent / f"{folder.name}-{form}.gguf"
    if form == "q4_k_m" and not path.exists():
        subprocess.run([options.llama_cpp, "-c", QUANTIZE, write_gguf(options, folder, "f16"), path], check=True)
    elif not path.exists():
        line = [sys.executable, options.converter, folder, "--outfile", path, "--outtype", form]
        found = os.environ | {"PYTHONPATH": str(options.converter.parent / "gguf-py")}
        subprocess.run([*map(str, line)], check=True, env=found)
    return path


def write_openvino(options: Any, folder: Path, form: str) -> Path:
    """Convert a folder by ``optimum-cli export openvino``; return the new folder."""
    path = folder.parent / f"{folder.name}-openvino-{form}"
    if not (path / "openvino_model.bin").exists():
        words = [
            options.openvino, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", folder,
            "--task", "text-generation-with-past", "--weight-format", form, path,
        ]  # fmt: skip
        subprocess.run([*map(str, words)], check=True)
    return path


def write_form(options: Any, runtime: str, folder: Path, form: str) -> tuple[Path, int]:
    """Return what a runtime opens, and its bytes of weights."""
    if runtime == "pytorch":
        return folder, (folder / "model.safetensors").stat().st_size
    if runtime == "openvino":
        made = write_openvino(options, folder, form)
        return made, (made / "openvino_model.bin").stat().st_size
    made = write_gguf(options, folder, form)
    return made, made.stat().st_size


def measure(options: Any, runtime: str, python: str) -> None:
    """Time all models in one runtime and write the result."""
    made = {
        f"{name}/{form}": write_form(options, runtime, write_folder(options, name), form)
        for name in options.only for form in FORMS[runtime]
    }  # fmt: skip
    prompt = options.work / "served" / "prompt.json"
    prompt.write_text(json.dumps(tokens(options)))
    script = "import sys; from generation import main; main(*sys.argv[1:])"
    words = [
        python, "-c", script, runtime, options.rounds, options.new, prompt,
        *(f"{key}={path}" for key, (path, _) in made.items()),
    ]  # fmt: skip
    told = subprocess.run(
        [*map(str, words)], check=True, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
    ).stdout  # fmt: skip
    found = json.loads(told.splitlines()[-1])
    for key, (_, size) in made.items():
        found["models"][key]["bytes"] = size
    facts = {"prompt": options.prompt, "new": options.new, "threads": 1}
    common.write(options, runtime, {"name": runtime, **facts, **found, **common.frame()})
    print(runtime, "is measured", flush=True)


def tokens(options: Any) -> list[int]:
    """Return the tokens of the prompt: the first measured text."""
    import torch

    rows = torch.load(options.work / "data" / "measured.pt")["wikitext2"]
    return [int(token) for token in rows[0].flatten()[: options.prompt]]


def main() -> None:
    """Measure the runtimes that are given and missing."""
    parser = common.parser(SCRIPT, __doc__, "backbone", "data", only=MODELS, rounds=ROUNDS, work=Path("runs/decoder"))
    run.add_sizes(parser)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=NEW, help="tokens that are generated")
    parser.add_argument("--openvino", help="a Python with optimum-intel")
    parser.add_argument("--llama_cpp", help="a Python with llama-cpp-python")
    parser.add_argument("--converter", type=Path, help="llama.cpp's convert_hf_to_gguf.py")
    options = parser.parse_args()
    options.list = None
    run.prepare(options)
    pythons = {"pytorch": sys.executable, "openvino": options.openvino, "llama.cpp": options.llama_cpp}
    for runtime, python in pythons.items():
        if python and common.missing(options, runtime):
            measure(options, runtime, python)


if __name__ == "__main__":
    main()
