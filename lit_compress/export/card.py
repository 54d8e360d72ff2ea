"""The model card of an export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from yaml import YAMLError

from lit_compress.export.modelling import REFUSAL
from lit_compress.export.report import counted, markdown, speed_lines
from lit_compress.models.backbones import EMBEDDED
from lit_compress.tasks import task_type

if TYPE_CHECKING:
    from lit_compress.tasks.records import Task

HERE = "."  # as the code of a card calls its folder

_CARD = """
# {name} on {task}, compressed by {method} to {density:.1%} of its block matrices

{origin}{note}Loads without lit_compress; torch and transformers are enough:

```python
from transformers import {auto_class}, AutoTokenizer

folder = "{here}"  # this folder, or its name on the hub
net = {auto_class}.from_pretrained(folder{trust})
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer({example}, return_tensors="pt")
output = net(**inputs)  # {results}
```
{refusal}
{program}## Measured

{table}

The metric is that of {rows} of the dev set{error}.
{checked}
## Meaning of the output

{labels}

## Files

{files}; `report.json` has every number above with the config, the versions and the machine.
"""

_CHECKED = """Latency: one thread, batch 1, {length} tokens, all columns interleaved in one process on {cpu}{speed}.
Reloaded in a process without lit_compress, the logits differ by at most {difference:.1e}.

## Certificate

On texts of the data, {shapes} tokens, the logits differ from those of the net before export, relative above 1, by

| file | at most | allowed | verdict |
|---|---|---|---|
{certificate}
"""

_BY_BLOCK = """The net was made and measured with one block at a time in memory: it was not timed, and not loaded whole.
"""

_FILES = """`structure.json` names the modules that were replaced, by what and of which sizes;
`modeling_compressed.py` has the layers and puts them in place; {holds} their tensors"""

_FACTORS = ", e.g. `<site>.left` [out, rank] and `<site>.right` [rank, in]"

_PIVOT = """. A matrix in pivot form has
`<site>.right`, some of its rows (those of several matrices that read the same input stand in one), `<site>.rest`
[rest, rank], so that rest @ right are its other rows, and `<site>.order`, where in [right; rest @ right] each row is"""

_REFUSAL = """
The code of this folder puts the compressed matrices in place. Without `trust_remote_code=True`, which `pipeline` takes,
too, loading ends with `{error}`.
"""

_ORDINARY = "Those of any model of its family: its sizes stand in `config.json`"


_PROGRAM = """`{file}` is the same net as one program, for any batch size and length; of this folder it needs
only the tokenizer's files. From {inputs} (int64) to {outputs}{differs}:

```python
{code}
```

"""

_CODE = {
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("{file}")
arrays = {{item.name: inputs[item.name].numpy() for item in session.get_inputs()}}
outputs = dict(zip({names}, session.run({names}, arrays)))""",
    "torch": """import torch

outputs = torch.export.load("{file}").module()(**inputs)  # {names}""",
    "openvino": """import openvino

model = openvino.compile_model("{file}", "CPU")  # reads openvino_model.bin, too
found = model({{item.any_name: inputs[item.any_name].numpy() for item in model.inputs}})
outputs = {{name: found[name] for name in {names}}}""",
}

_WRITING = """{programs} write with the net's cache, the likeliest token at every step, without beams. They are
called by `write.py`, which needs NumPy and the runtime:

```python
from write import Writer

ids = Writer(".").write(inputs["input_ids"], inputs["attention_mask"])
texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
```

"""

_ERROR = """; with another sample of as many it would be between {:.4f} and {:.4f} in 95 of 100
cases, and usually off by the standard error"""

_ZEROS = """Removed weights are stored as zeros: the folder is as large as the dense net's, and a forward takes as long.

"""

_SOME_ZEROS = """Some of the removed weights are stored as zeros: {stored:.1%} of the block matrices are in the
folder, {density:.1%} without the zeros.

"""

_ROUNDED = """Widths are filled up to multiples of {multiple} with zeros, so {stored:.1%} of the block matrices are
in the folder.

"""

_MERGED = """{count} of {sites} matrices are stored dense although the method kept less of them ({kept:.1%} of all), so
{stored:.1%} of the block matrices are in the folder: on a CPU {why}.

"""
_WHY = {
    "large": "factors and rows of over {above:.0%} of a matrix's\nparameters are no faster",
    "slower": "their factors and rows took longer, measured on\nthe machine that exported the net",
}


_VOCABULARY = """The tokenizer is the small one of this folder: {rows:,} of {of:,} pieces are left, those of the
training data and all single characters, with which other words are spelled.

"""


_EMBEDDINGS = """The table of token embeddings is stored {form}, in {bytes:,} bytes of {of:,}; it is off by
{error:.1%} of its norm.

"""


_HALF = """The weights are stored as {dtype}, in which `from_pretrained` loads them and the metric is measured.

"""

_INT8 = """This program has weights and activations of 8 bits, by ONNX Runtime, with the ranges of {examples} training
examples. Its dev {name} is {metric:.4f}{error}. Before it was quantized its outputs differed by at most
{difference:.1e}.

"""


def _is_repository_name(name: str) -> bool:
    """Say whether a name could be that of a repository: the hub refuses a card whose ``base_model`` could not."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def model_name(backbone: str) -> str:
    """Return how others know a backbone: its name on the hub, else that of its folder or of the run that made it."""
    folder = Path(backbone).expanduser()
    if not folder.is_dir():
        return backbone.partition("@")[0]
    try:
        given = str(json.loads((folder / "config.json").read_text()).get("_name_or_path") or "")
    except (OSError, ValueError):
        given = ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        return given
    folder = folder.resolve()
    return folder.parent.parent.name if folder.name == "net" else folder.name


def license_of(backbone: str) -> str:
    """Return the licence that the card in a backbone's folder names, which an export inherits; else ``unknown``."""
    try:
        return str(ModelCard.load(Path(backbone).expanduser() / "README.md").data.license or "unknown")
    except (OSError, ValueError, YAMLError):
        return "unknown"


def for_repository(text: str, name: str) -> str:
    """Return a card whose code loads the repository ``name`` in place of its own folder."""
    return text.replace(f'folder = "{HERE}"', f'folder = "{name}"')


def _metadata(report: dict[str, Any], task: Task, name: str, licence: str) -> ModelCardData:
    """Return what the hub reads: origin, licence, data and the dev metric with its number of rows."""
    kind, hub = task_type(task), task.hub or (task.name, None)
    result = EvalResult(
        task_type=kind.pipeline, dataset_type=hub[0], dataset_name=task.name, dataset_config=hub[1],
        dataset_split=task.validation[0], metric_type=report["metric"]["name"],
        metric_value=report["compressed"]["metric"], metric_args={"n": report["metric"]["rows"]},
    )  # fmt: skip
    return ModelCardData(
        model_name=f"{name.rpartition('/')[2]}-{task.name}-{report['method'].lower()}",
        base_model=None if name == EMBEDDED or not _is_repository_name(name) else name,
        license=licence,
        datasets=[hub[0]] if task.hub else None,
        library_name=kind.library,
        pipeline_tag=kind.pipeline,
        tags=["lit_compress", report["method"], "compressed"],
        eval_results=[result],
    )


def _certificate(entries: list[dict[str, Any]]) -> dict[str, str]:
    """Return the shapes and the rows of the certificate."""
    lines = []
    for item in entries:
        found, allowed = ("-" if item[key] is None else f"{item[key]:.1e}" for key in ("difference", "allowed"))
        lines.append(f"| `{item['file']}` | {found} | {allowed} | {item['verdict']} |")
    return {"shapes": " and ".join(f"{texts} x {tokens}" for texts, tokens in entries[0]["shapes"]),
            "certificate": "\n".join(lines)}  # fmt: skip


def _checked(report: dict[str, Any]) -> str:
    """Return what is said of latency and of the comparisons after the export."""
    if report["export_difference"] is None:
        return _BY_BLOCK
    return _CHECKED.format(
        **_certificate(report["certificate"]),
        length=report["compressed"]["latency_ms"]["length"],
        cpu=report["hardware"]["cpu"],
        speed="".join(f"; {line}" for line in speed_lines(report)),
        difference=report["export_difference"],
    )


def card(report: dict[str, Any], task: Task, factors: bool) -> str:
    """Return the text of the export's README.md.

    Args:
        report: of the export.
        task: of the export.
        factors: whether matrices were replaced by factors.
    """
    kind, model = task_type(task), report["config"]["model"]["init_args"]
    name, commit = model_name(model["backbone"]), model.get("revision")
    holds = "the files of `model.safetensors.index.json` hold" if "by_block" in report else "`model.safetensors` holds"
    files = _FILES.format(holds=holds) + (_PIVOT if report.get("pivot") else _FACTORS if factors else "")
    found, merged = report["compressed"], report["merged"]
    note = ""
    if merged["matrices"]:
        why = _WHY[merged["by"]].format(**merged)
        note = _MERGED.format(
            **merged | {"count": len(merged["matrices"]), "stored": found["stored"], "kept": found["kept"], "why": why}
        )
    elif report["round_to"]:
        note = _ROUNDED.format(multiple=report["round_to"], stored=found["stored"])
    elif found["density"] < found["stored"]:
        note = (_SOME_ZEROS if found["stored"] < 1 else _ZEROS).format(**found)
    if report["vocabulary"]:
        note += _VOCABULARY.format(**report["vocabulary"])
    if table := report["embeddings"]:
        form = "as 8-bit integers with one scale per row" if table["form"] == "int8" else "as two factors"
        note += _EMBEDDINGS.format(**table | {"form": form})
    if report["dtype"] != "float32":
        note += _HALF.format(dtype=report["dtype"])
    program = ""
    if made := report.get("program"):
        code = _CODE[made["format"]].format(file=made["file"], names=made["outputs"])
        lists = {name: ", ".join(made[name]) for name in ("inputs", "outputs")}
        differs = "" if "dtype" in made else f", which differ by at most {made['difference']:.1e}"
        program = _PROGRAM.format(**made | lists, code=code, differs=differs)
        if "dtype" in made:
            between = ", between {:.4f} and {:.4f} in 95 of 100 samples".format(*made["interval"] or (0, 0))
            name = report["metric"]["name"]
            program += _INT8.format(**made | {"name": name, "error": between if made["interval"] else ""})
        if made.get("writing"):
            programs = [f"`{name}`" for name in made["writing"]["files"][2:]]
            program += _WRITING.format(programs=" and ".join(programs))
    metadata = _metadata(report, task, name, report.get("license") or license_of(model["backbone"])).to_yaml()
    return f"---\n{metadata}\n---\n" + _CARD.format(
        checked=_checked(report),
        origin=f"Made from `{name}` at commit `{commit}`.\n\n" if commit else "",
        note=note,
        program=program,
        trust=", trust_remote_code=True" if report["refuses"] else "",
        refusal=_REFUSAL.format(error=REFUSAL) if report["refuses"] else "",
        files=_ORDINARY if report["ordinary"] else files,
        method=report["method"],
        name=name,
        here=HERE,
        rows=counted(report),
        error=_ERROR.format(*found["interval"]) if found["interval"] else "",
        task=task.name,
        density=report["compressed"]["density"],
        auto_class=kind.auto_class,
        example=kind.example(task),
        results=", ".join(kind.results),
        table=markdown(report),
        labels=kind.meaning(task),
    )
