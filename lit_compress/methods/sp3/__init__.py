"""SP3 (Hu et al. 2024): gates on principal directions of hidden states, on heads, neurons and layers.

The statistics are in calibration/second_moments.py, the mathematics in numerics/pca.py, the models with projections in
models/projected/. Begin with sp3.py.
"""
