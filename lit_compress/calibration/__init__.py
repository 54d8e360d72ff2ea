"""Statistics of a net on some data, collected without training it: Fisher information, second moments.

numerics/ and methods/ compute ranks and projections from them; data/ chooses the examples.
Begin with fisher.py, which FWSVD uses, or second_moments.py, which SP3 uses.
"""
