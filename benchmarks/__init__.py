"""Benchmarks, one folder per study. From the root of the repository: ``python -m benchmarks.<study>.run --help``."""
