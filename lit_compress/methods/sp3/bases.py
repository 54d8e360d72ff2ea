"""SP3's projections from second moments of hidden states (section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_compress.calibration.second_moments import Grams
from lit_compress.models.projected.insert import Bases, identity_bases
from lit_compress.numerics.pca import centred_axes, principal_axes, query_key_projections

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RIDGE = 1e-6  # share of the mean eigenvalue that is added to a head's second moments


def bases_of(grams: Grams, centred: bool = True) -> tuple[Bases, Tensor]:
    """Return the projections, and the share of every direction in the energy of its site [sites, d], falling.

    Args:
        grams: second moments from :func:`~lit_compress.calibration.second_moments.collect_grams`.
        centred: True removes the mean of each input over its dimensions (R); False for the authors' axes, without R.
    """
    axes_of = [(centred_axes if centred else principal_axes)(gram) for gram in grams.sites]
    query, key, value = [], [], []
    for q, k, v in grams.heads:
        pairs = [query_key_projections(a, b, RIDGE) for a, b in zip(q, k, strict=True)]
        query.append(torch.stack([of_queries for of_queries, _ in pairs]))
        key.append(torch.stack([of_keys for _, of_keys in pairs]))
        value.append(principal_axes(v)[0].mT.contiguous())
    shares = torch.zeros(grams.sites.shape[:2], dtype=torch.float64)
    for row, (_, energy) in zip(shares, axes_of, strict=True):
        row.copy_(energy / energy.sum().clamp_min(torch.finfo(torch.float64).tiny))
    return Bases([axes for axes, _ in axes_of], query, key, value), shares


def shared_bases(net: PreTrainedModel, make: Callable[[], Bases], group: int = 1) -> Bases:
    """Make the projections on rank 0 and return them on every rank of the default process group.

    Eigenvectors of equal eigenvalues would differ between machines.
    """
    distributed = torch.distributed
    bases = make() if distributed.get_rank() == 0 else identity_bases(net, group)
    received = []
    for part in (bases.sites, bases.query, bases.key, bases.value):
        # copies: the identity is one tensor many times, and a broadcast writes into what it is given
        tensors = [tensor.clone(memory_format=torch.contiguous_format).to(net.device) for tensor in part]
        for tensor in tensors:
            distributed.broadcast(tensor, 0)
        received.append([tensor.cpu() for tensor in tensors])
    return Bases(*received)
