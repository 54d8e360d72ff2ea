"""Hugging Face models: where their matrices, norms and embeddings are; swapping, slicing, saving and counting them.

The layers that replace a Linear are in layers/; a method decides which matrices it changes.
Begin with architectures.py, one record per architecture, then sites.py and surgery.py.
"""
