"""Repeating the end of a finished run from its own record: is the export the same, and its metric?"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_compress.evaluation.evaluate import evaluate
from lit_compress.export.modelling import MODULE
from lit_compress.export.report import commit, hardware, versions
from lit_compress.models.storage import load_net
from lit_compress.run.finish import export_run
from lit_compress.run.folder import Run
from lit_compress.run.results import read_report
from lit_compress.run.threads import use_threads
from lit_compress.utils.errors import UserError
from lit_compress.utils.manifest import MANIFEST
from lit_compress.version import __version__

if TYPE_CHECKING:
    from lit_compress.data.datamodule import DataModule
    from lit_compress.methods import Method

CLOSE = 1e-6  # scores that differ by less are the same: sums are rounded in another order elsewhere
_SIZES = ("density", "kept", "stored", "flops", "bytes")
_MACHINE = ("cpu", "threads", "accelerator")


@dataclass(frozen=True)
class Finding:
    """One thing that was repeated.

    Attributes:
        verdict: ``same``, ``differs``, or ``note`` for a possible reason of a difference.
        text: the compared thing, with both values if they differ.
    """

    verdict: Literal["same", "differs", "note"]
    text: str


def verify_run(run: Run, method: Method, data: DataModule) -> Iterator[Finding]:
    """Repeat the export and the metrics of a finished run in a temporary folder and yield the comparisons.

    Args:
        run: finished; nothing in it is changed.
        method: of the run, built from its config.
        data: the same.

    Raises:
        UserError: the run is not finished, or a file that is read differs from its manifest.
    """
    old = read_report(run.folder / "export")  # compared with its manifest; the other files with the repeated export
    if old is None:
        raise UserError(f"verify: '{run.folder}' has no export with a report; finish it with fit --ckpt_path last")
    use_threads(old["dense"]["params"]["sites"], old["hardware"].get("threads"))
    yield from _surroundings(old)
    yield _data(run, data)
    name = old["metric"]["name"]
    dense = evaluate(load_net(run.net("dense")), data)[f"val/{name}"]
    yield _number(f"dev {name} of the dense model", old["dense"]["metric"], dense, CLOSE)
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "export"
        new = export_run(run, out, method, data)
        yield from _files(run.folder / "export", out, (old.get("versions") or {}).get("lit_compress") == __version__)
    small, again = old["compressed"], new["compressed"]
    yield _number(f"dev {name} of the export", small["metric"], again["metric"], CLOSE)
    was = {**{key: small.get(key) for key in _SIZES}, **small["params"]}
    now = {**{key: again.get(key) for key in _SIZES}, **again["params"]}
    other = [f"{key} was {was[key]}, now {now[key]}" for key in was if was[key] is not None and was[key] != now[key]]
    yield Finding("differs", "; ".join(other)) if other else Finding("same", "density, parameters, FLOPs and bytes")


def _number(what: str, was: float, now: float, close: float) -> Finding:
    if abs(was - now) <= close:
        return Finding("same", f"{what}, {now:.6f}")
    return Finding("differs", f"{what} was {was:.6f}, now {now:.6f}")


def _surroundings(old: dict[str, Any]) -> Iterator[Finding]:
    """Yield the versions and the parts of the machine that differ from the run's."""
    pairs = [(old.get("versions") or {}, versions()), (old.get("hardware") or {}, hardware())]
    names = (pairs[0][1], _MACHINE)
    for (was, now), wanted in zip(pairs, names, strict=True):
        for name in wanted:
            if name in was and was[name] != now.get(name):
                yield Finding("note", f"{name} was {was[name]}, now {now.get(name)}")
    if old.get("commit") and old["commit"] != (now_at := commit()):
        yield Finding("note", f"commit was {old['commit']}, now {now_at}")


def _data(run: Run, data: DataModule) -> Finding:
    """Compare the facts of the data with the run's record: rows, classes, lengths."""
    was, now = run.facts(), json.loads(json.dumps(data.facts().as_dict()))
    if was is None:
        return Finding("note", "the run did not record what was in its data")
    if was == now:
        return Finding("same", f"data, {sum(split['rows'] for split in now['splits']):,} rows")
    before = {split["split"]: split for split in was["splits"]}
    for split in now["splits"]:
        for key, value in split.items():
            if (recorded := before.get(split["split"], {}).get(key)) != value:
                return Finding("differs", f"data: {key} of {split['split']} was {recorded}, now {value}")
    return Finding("differs", f"data: was {was}, now {now}")


def _files(was: Path, now: Path, same_version: bool) -> Iterator[Finding]:
    """Compare tensors, structure and other files of two exports, except reports, cards and manifests.

    Code that is not in the second is a difference; so is other code, unless another version wrote the first.
    """
    hashes = [_hash(folder / "model.safetensors") for folder in (was, now)]
    if hashes[0] == hashes[1]:
        yield Finding("same", f"tensors, sha256 {hashes[0][:12]}")
    else:
        yield Finding("differs", f"tensors: {_difference(was, now)}")
    files = (path for path in now.rglob("*") if path.is_file())
    names = {str(path.relative_to(now)) for path in files} - {"model.safetensors", "report.json", "README.md", MANIFEST}
    other = [name for name in sorted(names) if _hash(was / name) != _hash(now / name)]
    code = f"{MODULE}.py"
    if code in other and not same_version:
        yield Finding("note", f"{code} is that of another version of lit_compress; read it before you load it")
    elif code in other:
        yield Finding("differs", f"{code} is not the code that this version writes; do not load it")
    if more := sorted({str(path.relative_to(was)) for path in was.rglob("*.py")} - names):
        yield Finding("differs", f"code that the record does not make: {', '.join(more)}")
    if changed := [name for name in other if name != code]:
        yield Finding("differs", f"files: {', '.join(changed)}")
    else:
        yield Finding("same", f"{len(names)} other files" if code not in other else f"{len(names) - 1} other files")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


def _difference(was: Path, now: Path) -> str:
    """Return by how much the tensors of two exports differ."""
    from safetensors.torch import load_file

    if not (was / "model.safetensors").is_file():
        return "the run's are missing"
    old, new = (load_file(folder / "model.safetensors") for folder in (was, now))
    if {name: value.shape for name, value in old.items()} != {name: value.shape for name, value in new.items()}:
        return f"other names or shapes, {len(old)} were there, now {len(new)}"
    most = max(old, key=lambda name: float((old[name].double() - new[name].double()).abs().max()))
    return f"they differ by up to {float((old[most].double() - new[most].double()).abs().max()):.1e} ({most})"
