"""The notebook of docs/ is run as a reader would, from its first cell to its last; `python tests/docs/notebook.py`
writes what its cells say into it."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "from_python.ipynb"


def outputs(source: str, space: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell in the namespace ``space`` and return its outputs, without progress bars, as the format has them."""
    tree, said, result = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(tree, "cell", "exec"), space)
        if last is not None:
            result = eval(compile(ast.Expression(last.value), "cell", "eval"), space)  # type: ignore[attr-defined]
    pieces = [piece.replace("\x1b[A", "").rstrip() for piece in re.split(r"[\r\n]", said.getvalue())]
    lines = [f"{piece}\n" for piece in pieces if piece and not re.search(r"it/s|\?it", piece)]
    found: list[dict[str, Any]] = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
    if result is not None:
        shown = {"text/markdown": result._repr_markdown_(), "text/plain": str(result)}
        data = {kind: text.splitlines(keepends=True) for kind, text in shown.items()}
        found.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data})
    return found


def texts(cell: dict[str, Any]) -> list[str]:
    """Return the lines that the outputs of a cell show."""
    found = (output.get("text") or output["data"]["text/markdown"] for output in cell["outputs"])
    return [line for lines in found for line in lines]


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with what its cells say, run in the present folder."""
    space: dict[str, Any] = {}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = cell | {"outputs": outputs("".join(cell["source"]), space, count), "execution_count": count}
        cells.append(cell)
    return notebook | {"cells": cells}


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    PATH.write_text(json.dumps(run(json.loads(PATH.read_text())), indent=1, ensure_ascii=False) + "\n")
