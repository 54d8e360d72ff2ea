"""What a mistake on the command line ends with, and the run that tests of several commands share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


def fit(short_run, folder, *extra) -> list[str]:
    """Return the command of a short SVD run in ``folder``."""
    return ["fit", "--model", "SVD", "--model.density", "0.5", *short_run, "--run_dir", str(folder), *extra]
