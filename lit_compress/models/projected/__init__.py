"""Models with projections: of hidden states, heads and neurons (SP3), of hidden states alone (SliceGPT).

Begin with projections.py, which puts them into a model and multiplies them into smaller matrices. gates.py knows the
gates, and the shapes and the number of weights that they leave.
"""
