"""Training layers: factors next to a sparse matrix, gates, projections, masks.

The deployed layers that replace them after training are in layers/deployed, and never import this folder.
Begin with low_rank_sparse.py.
"""
