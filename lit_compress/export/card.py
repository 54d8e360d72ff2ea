"""The model card of an export."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_compress.export.report import markdown
from lit_compress.kinds import kind_of

if TYPE_CHECKING:
    from lit_compress.tasks import Task

_CARD = """---
library_name: transformers
pipeline_tag: {pipeline}
tags: [lit_compress, {method}, compressed]
---

# {backbone} on {task}, compressed by {method} to {density:.1%} of its block matrices

{note}Loads without lit_compress; torch and transformers are enough:

```python
from transformers import {auto_class}, AutoTokenizer

net = {auto_class}.from_pretrained(FOLDER{trust})
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
output = net(**tokenizer({example}, return_tensors="pt"))  # {results}
```

{program}## Measured

{table}

Latency: one thread, batch 1, {length} tokens, all columns interleaved in one process on {cpu}.
Reloaded in a process without lit_compress, the logits differ by at most {difference:.1e}.

## Meaning of the output

{labels}

## Files

{files}; `report.json` has every number above with the config, the versions and the machine.
"""

_FILES = """`structure.json` names the Linears that were replaced, by what and of which sizes;
`modeling_compressed.py` has the layers and puts them in place; `model.safetensors` holds their tensors, e.g.
`<site>.left` [out, rank] and `<site>.right` [rank, in]"""

_ORDINARY = "Those of any model: nothing was replaced, all matrices have become smaller alike"


_PROGRAM = """`{file}` is the same net as one program, for any batch size and length; of this folder it needs
only the tokenizer's files. From {inputs} (int64) to {outputs}, which differ by at most {difference:.1e}:

```python
{code}
```

"""

_CODE = {
    "onnx": 'outputs = onnxruntime.InferenceSession("FOLDER/{file}").run({names}, dict(inputs))  # of numpy arrays',
    "torch": 'outputs = torch.export.load("FOLDER/{file}").module()(**inputs)  # {names}',
}

_ZEROS = """Removed weights are stored as zeros: the folder is as large as the dense net's, and a forward takes as long.

"""

_ROUNDED = """Widths are filled up to multiples of {multiple} with zeros, so {stored:.1%} of the block matrices are
in the folder.

"""

_MERGED = """{count} of {sites} matrices are stored dense although the method kept less of them, so {stored:.1%} of the
block matrices are in the folder: on a CPU factors and rows of over {above:.0%} of a matrix's parameters are no faster.

"""


def card(report: dict[str, Any], task: Task) -> str:
    """Return the text of the export's README.md."""
    kind = kind_of(task)
    found, merged = report["compressed"], report["merged"]
    note = ""
    if merged["matrices"]:
        note = _MERGED.format(**merged | {"count": len(merged["matrices"]), "stored": found["stored"]})
    elif report["round_to"]:
        note = _ROUNDED.format(multiple=report["round_to"], stored=found["stored"])
    elif found["density"] < found["stored"]:
        note = _ZEROS
    program = ""
    if made := report.get("program"):
        code = _CODE[made["format"]].format(file=made["file"], names=made["outputs"])
        lists = {name: ", ".join(made[name]) for name in ("inputs", "outputs")}
        program = _PROGRAM.format(**made | lists, code=code)
    return _CARD.format(
        note=note,
        program=program,
        trust="" if report["ordinary"] else ", trust_remote_code=True",
        files=_ORDINARY if report["ordinary"] else _FILES,
        method=report["method"],
        backbone=report["config"]["model"]["init_args"]["backbone"],
        task=task.name,
        density=report["compressed"]["density"],
        pipeline=kind.pipeline,
        auto_class=kind.auto_class,
        example=kind.example(task),
        results=", ".join(kind.results),
        table=markdown(report),
        length=report["compressed"]["latency_ms"]["length"],
        cpu=report["hardware"]["cpu"],
        difference=report["export_difference"],
        labels=kind.meaning(task),
    )
