"""The trained sentence models as OpenVINO's programs in 8 bits.

    python -m benchmarks.embedding.programs --backbone DIR --data DIR [--work DIR] [--questions N] [--only ...]

Takes the exports and the data of ``int8`` that run.py left in ``--work``. A program is calibrated, as the dense one, on
questions and paragraphs of SQuAD's training split. It is scored by the similarity on STS-B and by both searches.

Writes benchmarks/embedding/results/programs/<export>.json; existing ones are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.embedding import run
from benchmarks.embedding.estimates import CUSTOM, PAIR, opened, scores

STUDY = "embedding/programs"
EXPORTS = ("wide-0.5", "wide-0.25")


def program(options: Any, name: str) -> dict[str, Any]:
    """Write an export as a program in 8 bits, and return its entry."""
    from lit_compress.export.integers import quantize, training_feeds
    from lit_compress.export.program import Program, program_bytes, read_program, write_program
    from lit_compress.models.storage import load_net
    from lit_compress.tasks import task_type

    folder = options.work / f"{name}-int8"
    folder.mkdir(exist_ok=True)
    data = opened(options, *CUSTOM, *PAIR, "--data.path", options.work / "int8-squad-data").build().data
    net = load_net(options.work / name).eval()
    made = write_program(net, data.tokenizer, folder, "openvino", task_type(data.record))
    quantize(path := folder / made["file"], path, "int8", training_feeds(data, "int8"))
    measured = scores(options, Program(read_program(path, tuple(made["outputs"])), net.config), options.questions)
    return {"name": name, "bytes": program_bytes(path), "scores": measured, "threads": options.threads}


def main() -> None:
    """Make what is missing."""
    parser = common.parser(STUDY, __doc__, "backbone", "data", only=EXPORTS, work=Path("runs/embedding"))
    parser.add_argument("--questions", type=int, default=run.MANY)
    options = parser.parse_args()
    options.list = None
    torch.set_num_threads(options.threads)
    for name in options.only:
        if common.missing(options, name):
            common.write(options, name, program(options, name) | common.frame())


if __name__ == "__main__":
    main()
