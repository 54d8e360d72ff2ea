"""Keep a notebook's random state, warning filters and log levels unchanged by a call."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from transformers.utils import logging as transformers_logging

from lit_compress.cli.parsers import silence_libraries
from lit_compress.utils.errors import user_error

_SEED = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run one call as a command runs, with gradients, and leave random numbers, warnings and logging as they were."""
    known = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    levels = {logger: logger.level for logger in known}
    shown, seeds = warnings.formatwarning, {name: os.environ.get(name) for name in _SEED}
    bars = transformers_logging.is_progress_bar_enabled()
    with torch.inference_mode(False), torch.enable_grad(), isolate_rng(), warnings.catch_warnings():
        silence_libraries()
        transformers_logging.disable_progress_bar()  # of its files, which are parts of the work
        try:
            yield
        except Exception as error:
            if (line := user_error(error)) is None or line is error:
                raise
            raise line from None  # parsers wrap it in a long text
        finally:
            warnings.formatwarning = shown
            if bars:
                transformers_logging.enable_progress_bar()
            for logger in logging.root.manager.loggerDict.values():
                if isinstance(logger, logging.Logger):
                    logger.setLevel(levels.get(logger, logging.NOTSET))
            for name, value in seeds.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
