"""The end of a run: its export, and the same once more from its own record, to see whether both are equal."""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lit_compress.evaluation.evaluate import constant_answer, evaluate
from lit_compress.export.choices import AS_IS, Choices
from lit_compress.export.folder import Export, write_export
from lit_compress.export.modelling import MODULE
from lit_compress.export.report import Measured, commit, hardware, versions
from lit_compress.models.budget import shown
from lit_compress.models.outline import file_bytes
from lit_compress.models.own_code import trusts_code
from lit_compress.models.shards import net_bytes
from lit_compress.models.storage import load_net
from lit_compress.run.folder import Run
from lit_compress.run.results import read_report
from lit_compress.run.runner import use_threads
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import link_if_equal
from lit_compress.utils.manifest import MANIFEST
from lit_compress.utils.progress import note
from lit_compress.version import __version__

if TYPE_CHECKING:
    from lit_compress.data.datamodule import DataModule
    from lit_compress.methods import Method

CLOSE = 1e-6  # scores that differ by less are the same: sums are rounded in another order elsewhere
_SIZES = ("density", "kept", "stored", "flops", "bytes")
_MACHINE = ("cpu", "threads", "accelerator")


def export_run(run: Run, out: Path, method: Method, data: DataModule, choices: Choices = AS_IS) -> dict[str, Any]:
    """Export the model of the last stage of ``run`` to ``out``; write and return the report.

    The folder appears only after another process has loaded it and computed the same logits.

    Args:
        run: a finished run.
        out: folder to write; an earlier export there is replaced.
        method: the method of the run.
        data: for the dev metric of the exported model.
        choices: as :func:`write_export`.

    Raises:
        UserError: a stage is not finished; ``out`` has other files; a check fails.
    """
    done, stages = (run.finished(), ["dense", *(stage.name for stage in method.stages() if stage.name != "dense")])
    missing = [name for name in stages if name not in done]
    if missing:
        raise UserError(
            f"export: stage {missing[0]} of '{run.folder}' is not finished; continue it with fit --ckpt_path last"
        )
    key = f"val/{data.record.metrics[0]}"
    of_files = done["dense"].get("dtype", "float32")
    dtype = getattr(torch, of_files)

    def measured(name: str) -> Measured:
        net, entry = load_net(run.net(name)), done[name]
        size = entry.get("bytes") or file_bytes(copy.deepcopy(net).to(dtype))  # of a teacher that was given
        return Measured(net, size, entry["metric"][key], entry["initial"].get(key))

    *before, last = map(measured, stages)
    if dtype != torch.float32:
        stored = shown("size", net_bytes(run.net("dense")))
        note(
            f"MB on disk: the dense model counts as {of_files}, as its files are; {run.net('dense')} is float32, "
            f"{stored}"
        )
    nets = dict(zip(stages, before, strict=False))
    more = {name: value for name, value in done[stages[-1]].items() if name == "calibration"}
    known = {"data": run.facts(), "license": done["dense"].get("license")}
    known["tried"] = (run.removal() or {}).get("tried")
    constant = constant_answer(data)
    more |= {name: value for name, value in known.items() if value}
    more |= {"constant": constant.score, "constant_error": constant.error}
    budget = (method.budget, run.density(method.budget.asked) or method.density) if method.budget else None
    config = run.config() | {"trust_remote_code": trusts_code()}
    source = Export(last.net, nets, type(method).__name__, data, config, last.initial, more, budget)
    return write_export(out, source, choices)


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
    facts, name = json.loads(json.dumps(data.facts().as_dict())), old["metric"]["name"]
    rows = sum(split["rows"] for split in facts["splits"])
    yield _values(f"data, {rows:,} rows", *map(_by_split, (run.facts() or {"splits": []}, facts)))
    dense = evaluate(load_net(run.net("dense")), data)[f"val/{name}"]
    yield _metric(f"dev {name} of the dense model", old["dense"]["metric"], dense)
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "export"
        new = export_run(run, out, method, data)
        yield from _files(run.folder / "export", out, (old.get("versions") or {}).get("lit_compress") == __version__)
    small, again = old["compressed"], new["compressed"]
    yield _metric(f"dev {name} of the export", small["metric"], again["metric"])
    keys = [key for key in _SIZES if small.get(key) is not None]
    was, now = ({**{key: one[key] for key in keys}, **one["params"]} for one in (small, again))
    yield _values("density, parameters, FLOPs and bytes", was, now)


def _metric(what: str, was: float, now: float) -> Finding:
    if abs(was - now) <= CLOSE:
        return Finding("same", f"{what}, {now:.6f}")
    return Finding("differs", f"{what} was {was:.6f}, now {now:.6f}")


def _values(what: str, was: dict[str, Any], now: dict[str, Any]) -> Finding:
    other = [f"{key} was {was.get(key)}, now {value}" for key, value in now.items() if was.get(key) != value]
    return Finding("differs", f"{what}: {'; '.join(other)}") if other else Finding("same", what)


def _by_split(facts: dict[str, Any]) -> dict[str, Any]:
    splits = {f"{key} of {split['split']}": value for split in facts["splits"] for key, value in split.items()}
    return {key: value for key, value in facts.items() if key != "splits"} | splits


def _surroundings(old: dict[str, Any]) -> Iterator[Finding]:
    """Yield the versions and the parts of the machine that differ from the run's."""
    machine = {name: value for name, value in hardware().items() if name in _MACHINE}
    for recorded, now in ((old.get("versions"), versions()), (old.get("hardware"), machine)):
        for name, value in now.items():
            if (was := (recorded or {}).get(name, value)) != value:
                yield Finding("note", f"{name} was {was}, now {value}")
    if old.get("commit") and old["commit"] != (now_at := commit()):
        yield Finding("note", f"commit was {old['commit']}, now {now_at}")


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


def share_weights(net: Path, export: Path) -> None:
    """Replace the weights of the last stage's model by hard links to the equal files of its export.

    A run then has them once on disk. Files that differ stay, e.g. those of another dtype or vocabulary.

    Args:
        net: folder of the stage's model.
        export: folder of the export.
    """
    for path in net.glob("*.safetensors"):
        link_if_equal(path, export / path.name)
