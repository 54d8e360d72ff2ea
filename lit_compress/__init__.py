"""Smaller, faster transformer language models: one LightningModule per compression method."""

__version__ = "0.1.0"
