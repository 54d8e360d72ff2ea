"""``python -m benchmarks.analysis``; see measure.py."""

from benchmarks.analysis.measure import main

main()
