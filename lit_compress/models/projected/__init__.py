"""Models with projections: of hidden states, heads and neurons (SP3), of hidden states alone (SliceGPT).

Begin with insert.py, which puts projections into a model; fold.py multiplies them into smaller matrices. gates.py says
what can be closed and how many weights that leaves, outline.py what shapes.
"""
