"""Metrics, and loops over a split outside training: evaluate and predict.

The validation of a stage uses the same metrics in methods/base.py; tasks/ knows the meaning of a task's outputs.
Begin with metrics.py.
"""
