"""A job is built once; its variants share everything but the method."""

from __future__ import annotations

from lit_compress.cli.lines import read_line
from lit_compress.cli.options import CommandLine


def test_a_job_is_built_again_only_after_its_options_have_changed(short_run):
    cli = CommandLine(read_line("plan", ["--model", "SVD", "--model.density", "0.5", *short_run]))
    job = cli.ready()
    assert cli.build() is job
    cli.config.model.init_args.teacher = "runs/x/dense/net"
    assert cli.build() is not job and cli.build().method.teacher == "runs/x/dense/net"


def test_a_variant_has_a_new_method_and_the_same_data(short_run):
    job = CommandLine(read_line("plan", ["--model", "SecondOrder", *short_run])).build()
    dense, other = job.dense, job.at(0.3, tokens=5)
    assert other.data is job.data and other.dense is dense and other.method is not job.method
    assert (job.method.density, other.method.density) == (0.25, 0.3)
    assert (other.at().method.density, other.tokens, job.tokens) == (0.3, 5, None)
