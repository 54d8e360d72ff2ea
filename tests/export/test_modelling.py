"""The modelling file of an export, which others run with ``trust_remote_code``: what it may import and call."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lit_compress.export.modelling import MODULE, code_of
from lit_compress.layers import LAYERS

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


@pytest.mark.parametrize(
    "line",
    ["import os", "from . import other", "import torch.utils, subprocess", "open('x')", "torch.load('x')", "eval('1')",
     "from urllib import request", "torch.hub.list('x')", "x.__class__.__subclasses__()", "run = exec",
     "net.save_pretrained('x')"],
)  # fmt: skip
def test_what_would_be_found(line):
    assert forbidden(line)
