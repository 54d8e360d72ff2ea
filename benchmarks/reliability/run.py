"""Make all of this study, one script after another.

python -m benchmarks.reliability.run [--only kills faults memory compare_under_kills fuzz agreement]
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks import common

STUDY = "reliability"
SCRIPTS = ("kills", "faults", "memory", "compare_under_kills", "fuzz", "agreement")


def main() -> None:
    """Start the scripts; each makes what has no result yet."""
    options = common.parser(STUDY, __doc__, only=SCRIPTS).parse_args()
    for name in options.only:
        subprocess.run([sys.executable, "-m", common.module(f"{STUDY}/{name}")], check=True)


if __name__ == "__main__":
    main()
