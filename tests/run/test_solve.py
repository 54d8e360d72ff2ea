"""The density that meets a budget: found by bisection, and the best of all densities."""

from types import SimpleNamespace

import pytest
from tiny import make_net

from lit_compress import methods
from lit_compress.export.choices import AS_IS, Choices
from lit_compress.export.fuse import fuse
from lit_compress.export.speed_asked import Place
from lit_compress.methods.second_order import KroneckerWeighted
from lit_compress.methods.sp3 import ProjectedPruning
from lit_compress.models.accounting import count_params, flops
from lit_compress.models.outline import estimated_bytes, file_bytes
from lit_compress.models.surgery import factorize, without_values
from lit_compress.numerics.search import TRIES
from lit_compress.run import solve as module
from lit_compress.run.job import Job
from lit_compress.run.solve import GRAPH, Outline, cost, outline, solve
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

LENGTH = 12


def empty(**options):
    net = make_net("bert", **options)
    return without_values(lambda: type(net)(net.config))


@pytest.fixture(scope="module")
def dense():
    return empty()


def job_of(name, asked, dense, choices=AS_IS, **settings):
    """A job of texts of 12 tokens."""
    texts = SimpleNamespace(record=get_task("sst2"), max_length=LENGTH, tokenizer=None)
    job = Job(getattr(methods, name)(task="sst2", budget=asked, **settings), texts, {}, 0, choices)
    job.dense = dense
    return job


@pytest.mark.parametrize(
    ("name", "asked"),
    [("SVD", "flops=0.5"), ("SVD", "size=60kB"), ("SecondOrder", "params=13k"), ("LoSparse", "size=60kB"),
     ("CoFi", "params=13k"), ("SP3", "params=13k")],
)  # fmt: skip
def test_no_other_density_is_nearer(name, asked, dense):
    job = job_of(name, asked, dense)
    budget, found = job.method.budget, outline(job, solve(job))
    limit = budget.value * (flops(dense, LENGTH) if budget.kind == "flops" else 1)
    every = [cost(budget, outline(job, i / 40)) for i in range(6, 30, 2 if budget.kind != "flops" else 6)]
    assert limit >= cost(budget, found) >= max(value for value in every if value <= limit) - 2e-3 * limit
    assert cost(budget, found) > 0.95 * limit


@pytest.mark.parametrize("name", ["SVD", "FWSVD", "LPAF", "LowRankI"])
def test_the_outline_of_ranks_is_the_net_that_is_built(name, dense):
    """Ranks fill the density of a budget: one more for some matrices."""
    job, net = job_of(name, "params=12345", dense).at(0.37), make_net("bert")
    small, found = fuse(factorize(net, job.method.rule.allocate(net), None)), outline(job)
    assert not found.about and found.params == count_params(small)
    assert found.flops == flops(small, LENGTH) and found.bytes == file_bytes(small)
    plain = outline(job_of(name, None, dense, density=0.37))
    assert plain.params.sites < found.params.sites <= 0.37 * 16384
    assert 0.37 * 16384 - found.params.sites < 96


def test_a_size_counts_the_program_of_integers(monkeypatch):
    job = job_of(
        "SVD", "size=300kB", empty(hidden_size=128, intermediate_size=512), Choices(format="onnx", dtype="int8")
    )
    monkeypatch.setattr(module, "bytes_of_shapes", lambda net, *_: estimated_bytes(net, 8, GRAPH["onnx"]))
    found = outline(job, density := solve(job))
    assert 0.4 < density < 0.5 and 298_000 < found.bytes <= 300_000
    assert found.bytes == estimated_bytes(found.net, 8, GRAPH["onnx"]) != file_bytes(found.net)


@pytest.mark.parametrize(("form", "dtype"), [("onnx", "int8"), ("openvino", "float32")])
def test_the_program_that_is_written_has_the_size(form, dtype, monkeypatch):
    """It has a part that is not estimated; ``model.safetensors`` has another size."""
    choices, writes = Choices(format=form, dtype=dtype), []
    dense = empty(hidden_size=128, intermediate_size=512)  # else the graph takes more than the weights

    def written(net, *_):
        writes.append(net)
        return 70_000 + round(1.1 * Outline(net, net, LENGTH, False, choices=choices).bytes)

    monkeypatch.setattr(module, "bytes_of_shapes", written)
    job = job_of("SVD", f"size={round(0.7 * written(dense))}", dense, choices)
    density = solve(job)
    assert 1 <= len(writes[1:]) <= 3
    assert 0.99 * job.method.budget.value < written(outline(job, density).net) <= job.method.budget.value


def test_a_smaller_table_makes_a_small_file_possible(dense):
    asked = "size=30kB"
    with pytest.raises(UserError, match=r"at least 37.* kB; nearest: size=0.037\d*MB; less with .*s int8 or --.*16$"):
        solve(job_of("SecondOrder", asked, dense))
    with pytest.raises(UserError, match=r"at least 67.* kB; nearest: \S*MB; less with --export.vocabulary data$"):
        solve(job_of("SecondOrder", asked, dense, Choices(format="onnx", dtype="int8")))
    with pytest.raises(UserError, match=r"nearest: size=\S*MB$"):
        solve(job_of("SecondOrder", "size=5kB", dense, Choices("hf", "data", "int8", "float16")))
    job = job_of("SecondOrder", asked, dense, Choices(embeddings="int8"))
    assert 0.98 * 30e3 < outline(job, solve(job)).bytes <= 30e3


def test_what_cannot_be(dense):
    for asked, words in (
        ("params=1M", "more than the dense model has, 23,586"),
        ("flops=0.05", "of the FLOPs; nearest: flops=0.141"),
    ):
        with pytest.raises(UserError, match=words):
            solve(job_of("SVD", asked, dense))
    with pytest.raises(UserError, match="Magnitude, which stores the removed weights as zeros"):
        job_of("Magnitude", "size=20MB", dense)
    retrain = KroneckerWeighted(removes="structures", weighting="inputs")
    assert 0 < solve(job_of("SecondOrder", "size=60kB", dense, retrain=retrain)) < 1


def test_a_size_above_the_dense_model_is_refused_in_the_dtype_of_the_file(dense):
    """In float32 it has 99 kB, in 16 bits half of it, so 60 kB leave nothing to do there."""
    single = file_bytes(dense) / 1e3
    for asked, dtype, size in (("size=200MB", "float32", f"{single:.4g} kB"), ("size=60kB", "float16", "in float16"),
                               ("size=200MB", "bfloat16", "in bfloat16")):  # fmt: skip
        with pytest.raises(UserError, match=f"'{asked}' is more than the dense model has, .*{size}; nearest: a sm"):
            solve(job_of("SVD", asked, dense, Choices(dtype=dtype)))
    assert solve(job_of("SVD", "size=40kB", dense, Choices(dtype="float16"))) < 1


def test_whole_sublayers_may_go_for_a_small_budget(dense):
    job = job_of("SecondOrder", "params=7300", dense, retrain=KroneckerWeighted(removes="structures"))
    found = outline(job, solve(job))
    assert found.params.sites > 0 and 7100 < found.params.total <= 7300


@pytest.mark.parametrize("asked", ["size=60kB", "speedup=9x@onnx,1x12"])
def test_settings_that_never_work_are_refused_as_without_a_budget(asked, dense, monkeypatch):
    monkeypatch.setattr(module, "programs_of", lambda *_: ByWeights())
    with pytest.raises(UserError, match=r"^prune\.tokens: 4 tokens are fewer than the 32 dimensions"):
        solve(job_of("SP3", asked, dense, prune=ProjectedPruning(tokens=4)))


def test_a_density_and_the_dense_net_need_no_search(dense):
    assert solve(job_of("PLATON", "density=0.3", dense)) == 0.3
    assert solve(job_of("SVD", "flops=1", dense)) == 1.0


class ByWeights:
    """Programs whose milliseconds are 10 and the thousands of weights of the matrices."""

    place = Place("onnx", ((1, LENGTH),), AS_IS)

    def __init__(self):
        self.asked = 0

    def gains(self, net):
        self.asked += 1
        return [{"batch": 1, "length": LENGTH, **dict.fromkeys(("median", "low", "high"), 26.384 / milliseconds(net))}]


def milliseconds(net):
    return 10 + count_params(net).sites / 1e3


@pytest.mark.parametrize("name", ["SVD", "CoFi", "SecondOrder"])
def test_a_speed_up_is_found_by_few_programs(name, dense, monkeypatch):
    timed = ByWeights()
    monkeypatch.setattr(module, "programs_of", lambda *_: timed)
    job = job_of(name, "speedup=1.5x", dense)
    found = outline(job, solve(job))
    assert 26.384 / 1.5 >= milliseconds(found.net) > 0.92 * 26.384 / 1.5 and timed.asked <= TRIES
    assert solve(job_of(name, "speedup=1x", dense)) == 1.0


def test_a_speed_up_that_no_shape_reaches(dense, monkeypatch):
    monkeypatch.setattr(module, "programs_of", lambda *_: ByWeights())
    with pytest.raises(UserError, match=r"by SVD, which reaches 2\.(.*)x; nearest: speedup=2\.(.*)x@onnx,1x12$"):
        solve(job_of("SVD", "speedup=9x@onnx,1x12", dense))


@pytest.mark.parametrize("name", [name for name in methods.__all__ if name != "Method"])
def test_every_method_says_what_it_leaves(name, dense):
    job = job_of(name, "density=0.5", dense).at(0.5)
    found = outline(job)
    if job.method.stores_zeros:
        assert found.params == count_params(dense)
    else:
        assert 0.45 <= found.params.sites / 16384 <= 0.5
        assert found.flops < flops(dense, LENGTH)
