"""The files of an exported model: what its code may do, and ordinary models, which load without code of ours."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path

import pytest
import torch
from tiny import WORDS, write_backbone
from transformers import AutoModelForCausalLM

from lit_compress.__main__ import main
from lit_compress.export.modelling import MODULE, code_of
from lit_compress.layers import LAYERS
from lit_compress.models.storage import load_net

PACKAGES = {"__future__", "torch", "transformers", "math", "typing"}
CALLS = {"open", "exec", "eval", "compile", "input", "print", "globals", "locals", "vars", "breakpoint", "__import__"}
OF_MODULES = {"load", "save", "hub", "from_file", "from_pretrained", "push_to_hub", "system", "popen", "__globals__",
              "__builtins__", "__subclasses__", "__code__", "__mro__", "__bases__", "__loader__"}  # fmt: skip
ALLOWED = {"super().save_pretrained", "nn.Embedding.from_pretrained"}  # the folder's own; a table from a tensor
OLD = sorted((Path(__file__).resolve().parents[1] / "old_runs").glob(f"*/export/{MODULE}.py"))
HOME = "lit_compress.layers.deployed"
DEPLOYED = {kind: layer for kind, layer in LAYERS.items() if layer.__module__.startswith(HOME)}
FILES = {
    "all": code_of("BertForSequenceClassification", DEPLOYED),
    **{path.parts[-3]: path.read_text() for path in OLD},
}


def forbidden(code: str) -> list[str]:
    """Return what a modelling file may not have: other imports, input or output, ways round these rules."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            level = getattr(node, "level", 0)
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            found += [name for name in names if level or name.partition(".")[0] not in PACKAGES]
        elif isinstance(node, ast.Name) and node.id in CALLS:
            found.append(node.id)
        elif isinstance(node, ast.Attribute) and node.attr in OF_MODULES | {"save_pretrained"}:
            found += {ast.unparse(node)} - ALLOWED
    return found


@pytest.mark.parametrize("name", FILES)
def test_it_computes_and_does_nothing_else(name):
    code = FILES[name]
    assert forbidden(code) == []
    assert all(f"class {layer.__name__}(" in code for layer in DEPLOYED.values()) or name != "all"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An export of a Llama that lost heads and neurons, as many in every layer."""
    folder, rng = tmp_path_factory.mktemp("ordinary"), random.Random(0)
    for split, lines in (("train", 40), ("validation", 12)):
        rows = [" ".join(rng.choices(WORDS, k=8)) for _ in range(lines)]
        (folder / f"{split}.txt").write_text("\n".join(rows) + "\n")
    dense = write_backbone(folder / "dense", "llama", "plain_text", num_attention_heads=8, head_dim=4,
                           num_key_value_heads=4)  # fmt: skip
    main(["factorize", str(dense), str(folder / "out"), "--data.task", "plain_text", "--data.path", str(folder),
          "--data.max_length", "24", "--density", "0.25", "--removes", "structures", "--shape", "uniform"])  # fmt: skip
    return folder / "out"


@pytest.mark.slow
def test_the_librarys_own_class_loads_it(small):
    """No code of the folder runs. The export was loaded in a process without this package."""
    own, ids = AutoModelForCausalLM.from_pretrained(small).eval(), torch.arange(5, 25)[None]
    assert type(own).__module__.startswith("transformers.models.")
    with torch.no_grad():
        assert torch.equal(own(input_ids=ids).logits, load_net(small)(input_ids=ids).logits)


def test_its_files_are_those_of_its_family(small):
    config, report = (json.loads((small / name).read_text()) for name in ("config.json", "report.json"))
    assert report["ordinary"] and not report["refuses"] and report["compressed"]["density"] <= 0.25
    assert config["architectures"] == [type(load_net(small)).__name__] and "auto_map" not in config
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"] < 8 and config["head_dim"] == 4
    assert config["intermediate_size"] < 64 and config["hidden_size"] == 32
    assert not (small / "modeling_compressed.py").exists()
    assert "trust_remote_code" not in (small / "README.md").read_text()
