"""The statistics of a model in memory, by the walk that methods use, in one call each; examples for them."""

import torch

from lit_compress.calibration.gradients import DiagonalFisher, Gradients
from lit_compress.calibration.moments import Moments
from lit_compress.calibration.statistics import whole


def estimate_fisher(net, batches, kind, sites, *, reduce=None):
    """The Fisher information of some Linears."""
    return whole(net, DiagonalFisher(sites=sites), batches, kind, reduce=reduce)


def mean_gradients(net, batches, kind, sites, *, reduce=None):
    """The mean gradients of some Linears."""
    return whole(net, Gradients(sites=sites), batches, kind, reduce=reduce)


def collect_kronecker(
    net, batches, kind, sites=None, *, labels="drawn", seed=0, device="cpu", reduce=None, by_text=False
):
    """The Kronecker factors of all sites, or of some."""
    return whole(net, Moments(labels, seed, sites, by_text), batches, kind, device=device, reduce=reduce)


def batch_of(net, kind="classification", size=4, length=9, seed=1):
    """Examples of different lengths, padded at the right as the data is; the first has no padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 100, (size, length), generator=generator)
    lengths = torch.randint(3, length + 1, (size, 1), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    ids[mask == 0] = net.config.pad_token_id
    if net.config.is_encoder_decoder:
        ids[torch.arange(size), lengths[:, 0] - 1] = net.config.eos_token_id
    batch = {"input_ids": ids, "attention_mask": mask, "index": torch.arange(size) + 20}
    number = lambda high, *shape: torch.randint(0, high, shape, generator=generator)  # noqa: E731
    match kind:
        case "classification":
            batch["labels"] = number(2, size)
        case "regression":
            batch["labels"] = torch.rand(size, generator=generator) * 5
        case "tagging":
            first = (number(2, size, length) == 1) & (mask == 1)
            first[:, 1] = True
            batch["word"] = first.cumsum(1) * first
            batch["labels"] = number(9, size, length).masked_fill(~first, -100)
        case "span_qa":
            batch["labels"] = number(3, size, 2)
        case "summarization":
            batch["labels"] = number(95, size, 6) + 5
            for row, end in enumerate(number(5, size) + 2):
                batch["labels"][row, end:] = -100
        case "language_modelling":
            batch["labels"] = number(100, size, length).masked_fill(mask == 0, -100)
    return batch


def cut(batch, *sizes):
    """Split a batch; cut off the columns that are only padding."""
    parts = [dict(zip(batch, columns, strict=True)) for columns in zip(*(v.split(sizes) for v in batch.values()))]  # noqa: B905
    for part in parts:
        longest, full = int(part["attention_mask"].sum(1).max()), part["input_ids"].shape[1]
        target = int((part["labels"] != -100).nonzero()[:, -1].max()) + 1
        for name, value in part.items():
            if value.ndim == 2 and value.shape[1] == full:
                part[name] = value[:, :longest]
            elif value.ndim == 2 and name == "labels" and value.shape[1] == 6:
                part[name] = value[:, :target]
    return parts
