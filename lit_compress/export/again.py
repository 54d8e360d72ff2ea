"""An export made from an export: a copy of its folder, with another program next to the same weights."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.export.card import write_report_and_card
from lit_compress.export.certificate import Certificate
from lit_compress.export.choices import Choices
from lit_compress.export.copying import PROGRAMS, copy_export
from lit_compress.export.folder import check_out, read_task, write_programs
from lit_compress.export.modelling import check_own_code, renew_code
from lit_compress.export.quantize import INTEGERS
from lit_compress.models.own_code import trusts_code
from lit_compress.models.storage import load_net
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_folder, read_json

if TYPE_CHECKING:
    from lit_compress.data.datamodule import DataModule


def check_again(source: Path, asked: dict[str, Any]) -> None:
    """Refuse choices that would change the weights of an export.

    Args:
        source: folder of the export.
        asked: the choices that were made, by name.

    Raises:
        UserError: one of them is not a program.
    """
    for name, value in asked.items():
        if name not in ("format", "max_drop") and not (name == "dtype" and value in INTEGERS):
            raise UserError(
                f"export: --{name} {value} changes the weights, and '{source}' is an export; give the run, or "
                f"'factorize ... --{name} {value}'; nearest: --format onnx"
            )


def export_again(source: Path, out: Path, data: DataModule, choices: Choices) -> dict[str, Any]:
    """Copy an export to ``out``, with the program that is asked for in place of any other; return its report.

    Args:
        source: folder of the export.
        out: folder to write; an earlier export there is replaced.
        data: of its task, read with its tokenizer; texts are read only for a program.
        choices: ``format``, ``dtype`` if that is of integers, and ``max_drop``.

    Raises:
        UserError: ``out`` has other files; ``source`` a link out of it, or changed code; the program cannot be written,
            or differs.
    """
    choices.check()
    check_out(out)
    report = read_json("export", source / "report.json", dict)
    with atomic_folder(out) as temporary:
        net = load_net(source)
        check_own_code(f"export: '{source}'", net, source)
        copy_export(f"export: '{source}'", source, temporary)
        renew_code(net, temporary)
        if choices.format == "hf":
            choices.check_drop(report)
            return report
        for path in temporary.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in PROGRAMS):
                path.unlink()
        choices.check_net(net)
        certificate = Certificate(net, data, "validation")
        certificate.entries += [entry for entry in report["certificate"] if entry["format"] == "hf"]
        report.pop("program", None)
        report["config"] = report["config"] | {"trust_remote_code": trusts_code()}  # not the source's, on the card
        write_programs(report, net, data, temporary, choices, certificate, same=True)
        choices.check_drop(report)
        write_report_and_card(temporary, report, read_task(data), net)
    return report
