"""The statistics of a model in memory, by the walk that methods use, in one call each."""

from lit_compress.calibration.gradients import DiagonalFisher, Gradients
from lit_compress.calibration.moments import Moments
from lit_compress.calibration.statistics import whole


def estimate_fisher(net, batches, kind, sites, *, estimator="per_example", reduce=None):
    """The Fisher information of some Linears."""
    statistic = DiagonalFisher(sites=sites, estimator=estimator)
    return whole(net, statistic, batches, kind, reduce=reduce)


def mean_gradients(net, batches, kind, sites, *, squares=False, reduce=None):
    """The mean gradients of some Linears."""
    return whole(net, Gradients(sites=sites, squares=squares), batches, kind, reduce=reduce)


def collect_kronecker(
    net, batches, kind, sites=None, *, labels="drawn", seed=0, dtype=None, device="cpu", table=None, reduce=None
):
    """The Kronecker factors of all sites, or of some."""
    return whole(net, Moments(labels, seed, sites, dtype, table), batches, kind, device=device, reduce=reduce)
