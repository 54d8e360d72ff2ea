"""Figures and tables of models: spectra, ranks, importance of neurons, the heads, neurons and widths that are left.

It knows neither loggers nor run folders; run/tensorboard.py logs the figures of a run. Begin with truncation.py, which
measures the cost of a factorization, or pictures.py, which draws a compressed model.
"""
