"""Pure functions of tensors: schedules, scores, masks, decompositions, gates, losses.

They know no model, no file and no process group: sums over ranks go through a ``reduce`` callback.
Begin with decompose.py or masks.py; tests/numerics compares every function with a naive loop.
"""
