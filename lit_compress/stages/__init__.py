"""Stages that several papers share: a stage is one ``Trainer.fit`` of a method.

Code of a single paper is in its own file or folder under methods/; pure functions of tensors are in numerics/.
Begin with base.py, which has the hooks of a stage in the order in which they are called.
"""
