"""Deployed layers: each class is self-contained, and its source is copied into the export.

They import nothing from this package; the layers of training are in layers/training.
Begin with low_rank.py.
"""
