"""What a mistake on the command line ends with, and the commands that tests of several rooms run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny import read_rows

from lit_compress.__main__ import main


def fails(capsys, *args) -> str:
    """Return the one line a command fails with."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in args])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    lines = [line for line in re.split(r"[\r\n]", err) if line.startswith("error: ")]
    assert len(lines) == 1 and err.endswith(f"{lines[0]}\n") and "Traceback" not in err
    return lines[0]


def rewrite(path: Path, text: str) -> None:
    """Write a file of a run or an export that is then without a manifest, as an earlier version left it."""
    path.write_text(text)
    (path.parent / "manifest.json").unlink(missing_ok=True)


def configure(folder: Path, file: str = "config.json", **values) -> None:
    """Change some values of a model's configuration."""
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))


def factorized(model, out: Path, *words):
    """Return the report of ``factorize`` to half of the weights; no other process loads the export."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
        main(["factorize", str(model), str(out), "--density", "0.5", *map(str, words)])
    return json.loads((out / "report.json").read_text())


def predicted(target, output: Path, *words):
    """Return the lines that ``predict`` writes."""
    main(["predict", str(target), "--output", str(output), *map(str, words)])
    return read_rows(output)


def fit(short_run, folder, *extra) -> list[str]:
    """Return the command of a short SVD run in ``folder``."""
    return ["fit", "--model", "SVD", "--model.density", "0.5", *short_run, "--run_dir", str(folder), *extra]
