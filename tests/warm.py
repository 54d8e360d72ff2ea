"""Preparations of a process, made in the server that processes.py forks from, so that no fork makes them again.

No gradient is computed: autograd counts the devices at its first backward, and a fork may have a second one.
"""

import contextlib
import io

import torch
from quick import quick_runs
from tiny import make_net
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from lit_compress.__main__ import main
from lit_compress.models.accounting import forward_bytes

with quick_runs(), contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["fit", "--model", "SVD", "--print_config"])  # makes the parser of its options
get_checkpoint_conversion_mapping("bert")
with torch.random.fork_rng(devices=[]):
    forward_bytes(make_net("bert", dropout=0.1), 8, 9, "parameters")
