"""Statistics of a model on some data, collected without training it: Fisher information, second moments, gradients.

numerics/ and methods/ compute ranks and projections from them; data/ chooses the examples. Begin with statistics.py:
statistics and the walk through a model in memory; walk.py has the walk by blocks.
"""
