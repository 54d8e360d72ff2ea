"""Models in few bits, in files of limited size, for a machine to which little can be sent, and back.

    python -m benchmarks.base_size.coding pack DIR NAME=MODEL ... [--base MODEL] [--limit MIB] [--most MIB]
    python -m benchmarks.base_size.coding unpack DIR OUT [--base MODEL]

``pack`` writes the models into DIR/part-0.zip, ...; ``unpack`` writes them to OUT/NAME. A row of a matrix is stored as
whole numbers of a step, a fraction of the standard deviation of the row, in Huffman's code. A matrix of a shape that
``--base`` has under the same name is stored as the difference from that, in larger steps: of a fine-tuned model it
is small. Rows that are zero take no space, and vectors and small matrices stay as they are. Both sides need the same
base.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from zipfile import ZipFile

import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from lit_compress.utils.manifest import MANIFEST

STEP, STEP_OF_DIFFERENCE = 1 / 20, 0.9  # of the standard deviation of a row
MIB = 2**20
SMALL = 2**10  # numbers of a tensor that stays as it is
FILE = "model.safetensors"


def encode(value: Tensor, base: Tensor | None = None) -> bytes:
    """Return a tensor in the code of this module."""
    if value.ndim != 2 or value.numel() < SMALL or not value.is_floating_point():
        return zlib.compress(save({"plain": value.contiguous()}))
    known = base if base is not None and base.shape == value.shape else None
    rows = value.float() if known is None else value.float() - known.float()
    kept = rows.any(1)
    step = rows[kept].std(1, correction=0) * (STEP if known is None else STEP_OF_DIFFERENCE)
    step = torch.maximum(step, rows[kept].abs().amax(1) / 127)
    parts = {
        "numbers": (rows[kept] / step[:, None]).round().to(torch.int8), "step": step, "kept": kept,
        "columns": torch.tensor(rows.shape[1]), "differs": torch.tensor(known is not None),
    }  # fmt: skip
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    return coder.compress(save(parts)) + coder.flush()


def decode(coded: bytes, base: Tensor | None = None) -> Tensor:
    """Return the tensor of :func:`encode`, a matrix in float32."""
    parts = load(zlib.decompress(coded))
    if "plain" in parts:
        return parts["plain"]
    rows = torch.zeros(len(parts["kept"]), int(parts["columns"]))
    rows[parts["kept"]] = parts["numbers"] * parts["step"][:, None]
    if parts["differs"]:
        assert base is not None, "packed with --base"
        rows += base.float()
    return rows


def entries(name: str, model: Path, base: Mapping[str, Tensor]) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of all that is stored of a model: its tensors, and its other files."""
    for key, value in load_file(model / FILE).items():
        yield f"{name}/tensors/{key}", encode(value, of_base(base, key))
    for path in sorted(model.glob("*")):
        if path.is_file() and path.name not in (FILE, MANIFEST):  # weights that are rounded have another sum
            yield f"{name}/files/{path.name}", zlib.compress(path.read_bytes())


def of_base(base: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return a tensor of the base, whose names may lack the model's prefix, ``mpnet.``."""
    return base.get(name, base.get(name.partition(".")[2]))


def pack(folder: Path, models: Mapping[str, Path], base: Path | None, limit: float, most: float) -> list[Path]:
    """Write models into files of at most ``limit`` MiB; leave out one with which all have more than ``most`` MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    known = load_file(base / FILE) if base else {}
    parts: list[list[tuple[str, bytes]]] = [[]]
    total, room = 0.0, limit * MIB
    for name, model in models.items():
        made = list(entries(name, model, known))
        size = sum(len(content) + 500 for _, content in made)
        if total + size > most * MIB:
            print(f"{name}: {size / MIB:.1f} MiB are too many; left out")
            continue
        total += size
        for entry in made:
            if len(entry[1]) + 500 > room:
                parts.append([])
                room = limit * MIB
            room -= len(entry[1]) + 500  # of the archive's own
            parts[-1].append(entry)
        print(f"{name}: {size / MIB:.1f} MiB")
    written = []
    for number, part in enumerate(filter(None, parts)):
        written.append(folder / f"part-{number}.zip")
        with ZipFile(written[-1], "w") as archive:
            for key, content in part:
                archive.writestr(key, content)
    return written


def unpack(folder: Path, out: Path, base: Path | None = None) -> list[Path]:
    """Write the models of all files in ``folder`` to folders of their names in ``out``; return these."""
    known = load_file(base / FILE) if base else {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for path in sorted(folder.glob("part-*.zip")):
        with ZipFile(path) as archive:
            for entry in archive.namelist():
                name, kind, key = entry.split("/", 2)
                (out / name).mkdir(parents=True, exist_ok=True)
                if kind == "tensors":
                    tensors.setdefault(name, {})[key] = decode(archive.read(entry), of_base(known, key))
                else:
                    (out / name / key).write_bytes(zlib.decompress(archive.read(entry)))
    for name, values in tensors.items():
        save_file(values, out / name / FILE, metadata={"format": "pt"})
    return [out / name for name in tensors]


def main() -> None:
    """Pack or unpack."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.base_size.coding", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("what", choices=["pack", "unpack"])
    parser.add_argument("folder", type=Path, help="folder of the files")
    parser.add_argument("models", nargs="+", help="pack: NAME=MODEL; unpack: the folder to write")
    parser.add_argument("--base", type=Path, help="model whose matrices are known on both sides")
    parser.add_argument("--limit", type=float, default=15.5, help="MiB of a file")
    parser.add_argument("--most", type=float, default=1e9, help="MiB of all files")
    given = parser.parse_args()
    if given.what == "pack":
        models = {name: Path(model) for name, _, model in (text.partition("=") for text in given.models)}
        pack(given.folder, models, given.base, given.limit, given.most)
    else:
        unpack(given.folder, Path(given.models[0]), given.base)


if __name__ == "__main__":
    main()
