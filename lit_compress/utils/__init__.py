"""Helpers of all other folders: one-line errors, the cache, files, progress bars, sharded tensors, timing.

Nothing here knows about compression.
Begin with errors.py: every user's mistake is a UserError.
"""
