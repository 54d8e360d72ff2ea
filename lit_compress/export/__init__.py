"""Export of a compressed model as a folder that loads where this package is not installed.

It knows layers, not papers: ``Stage.deploy`` has replaced the layers of a method before.
Begin with folder.py; fuse.py replaces layers by the cheapest with the same outputs, modelling.py writes the code of the
folder; bench.py times models in the runtimes of runtimes.py.
"""
