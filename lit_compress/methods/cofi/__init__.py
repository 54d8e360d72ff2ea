"""CoFi (Xia et al. 2022): gates on layers, heads, neurons and hidden dimensions; and LoSparse inside it.

The mathematics of gates is in numerics/, the training that CoFi shares with SP3 in stages/gated.py. Begin with cofi.py;
gates.py puts gates into a model, cut.py removes the closed parts.
"""
