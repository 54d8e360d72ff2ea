"""SP3 (Hu et al. 2024): gates on principal directions of hidden states, on heads, neurons and layers.

The statistics are in calibration/second_moments.py, the mathematics in numerics/pca.py.
Begin with sp3.py; insert.py puts projections into a net, fold.py multiplies them into smaller matrices.
"""
