"""What becomes of damaged files: thousands of configs, data files, exports and models, a process for each.

    python -m benchmarks.reliability.fuzz [--only data configs exports models] [--share 1.0]

A case must end in one line, as a user's mistake does, or be read; no traceback, no code of a file, no hang, bounded
memory. What must not be is printed and stored. Needs Hypothesis. Writes benchmarks/reliability/results/fuzz/KIND.json.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import common

COUNTS = {"exports": 500, "models": 300, "configs": 400, "data": 2000}
SAVED = 50  # cases between two writes of the result: a run that is stopped has counted what it did


def draw(strategy: Any, number: int, use: Any) -> None:
    """Call ``use`` with as many different cases, always the same ones."""
    from hypothesis import HealthCheck, Phase, given, settings

    @settings(
        max_examples=number, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def every(case: Any) -> None:
        use(case)

    every()


def measure(kind: str, number: int, save: Callable[[dict[str, Any]], None]) -> None:
    """Count what becomes of the cases of a kind; ``save`` gets the counts and the findings again and again."""
    from benchmarks.reliability import cases, checks

    strategy, check = {
        "data": (cases.data_cases, checks.check_data),
        "configs": (cases.config_cases, checks.check_config),
        "exports": (cases.export_cases, checks.check_folder),
        "models": (cases.model_cases, checks.check_folder),
    }[kind]
    counts: Counter[str] = Counter()
    findings: list[dict[str, str]] = []
    memory = [0.0]
    start = time.time()

    def use(case: Any) -> None:
        answer = checks.in_child(check, case)
        memory.append(answer.get("mib", 0.0))
        what = "findings" if "found" in answer else "read" if answer["line"] is None else "refused"
        counts[what] += 1
        if what == "findings":
            findings.append({"found": answer["found"], "case": repr(case)[:1000]})
            print(kind, answer["found"], "|", repr(case)[:300], flush=True)
        if not sum(counts.values()) % SAVED:
            tell()

    def tell() -> None:
        save({
            "cases": sum(counts.values()), "refused": counts["refused"], "read": counts["read"],
            "findings": findings, "seconds": round(time.time() - start), "most_mib": round(max(memory)),
        })  # fmt: skip

    draw(strategy, number, use)
    tell()


def warm_up() -> None:
    """Read what is whole, so that all is imported before the processes are forked."""
    from benchmarks.reliability import checks

    whole: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (checks.check_data, (("sst2", None, "train.jsonl"), "bytes", [])),
        (checks.check_data, (("sst2", None, "train.parquet"), "bytes", [])),
        (checks.check_config, ("SVD", [], {}, None)),
        (checks.check_folder, ("lpaf", "export", ("config.json", "bytes", []))),
        (checks.check_folder, ("lpaf", "model", ("config.json", "bytes", []))),
    ]
    here = os.getcwd()
    for check, case in whole:
        with tempfile.TemporaryDirectory() as work:
            found = checks.outcome(check, case, Path(work))
            assert found == {"line": None}, (found, case)
    os.chdir(here)


def main() -> None:
    """Try all kinds and store the counts."""
    parser = common.parser("reliability/fuzz", __doc__, only=tuple(COUNTS))
    parser.add_argument("--share", type=float, default=1.0, help="of the cases, to try the script")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    import lit_compress.cli.commands  # noqa: F401  imported once, before the processes are forked
    from lit_compress.utils.progress import silence_libraries

    torch.set_num_threads(1)
    silence_libraries()
    warnings.simplefilter("ignore")
    random.seed(0)
    warm_up()
    for kind in options.only:

        def save(value: dict[str, Any], kind: str = kind) -> None:
            common.write(options, kind, {"name": kind, **value, **common.frame()})

        measure(kind, max(1, int(COUNTS[kind] * options.share)), save)
        print(kind, "done", flush=True)


if __name__ == "__main__":
    main()
