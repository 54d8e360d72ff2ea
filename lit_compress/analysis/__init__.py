"""Figures and tables of models and results: the structure of a compressed model, speed-ups, Pareto fronts.

It knows neither loggers nor run folders; run/loggers.py logs the figure of a run. Begin with pictures.py, which
draws a compressed model, or pareto.py, which draws metrics against costs.
"""
