"""Costs, speed-ups, tables and figures of models and results.

It knows neither loggers nor run folders; run/loggers.py logs the figure of a run. Begin with costs.py, then
pictures.py, which draws models and results.
"""
