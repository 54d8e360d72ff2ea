"""Data from files or the hub to batches: sources -> readers -> checks -> encode -> batching -> DataModule.

The meaning of columns for each type of task is in tasks/; nothing here knows a method.
Begin with datamodule.py, the only DataModule.
"""
