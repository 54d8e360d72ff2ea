"""The picture of Pareto fronts: what is in it, and that it is the same from the same numbers."""

from __future__ import annotations

from lit_compress.analysis.pareto import COSTS, costs_of, edge_of, is_beyond, mean_costs, pareto_figure, write_pareto


def group(label: str, mean: float, **costs: float) -> dict:
    return {"label": label, "mean": mean, "bar": None, "costs": dict.fromkeys(COSTS) | costs}


def test_the_picture_has_the_nets_and_the_dense_one_in_the_order_of_the_groups(tmp_path):
    groups = [group("ours, 2$ and 3$", 0.8, flops=2.0, parameters=1e6), group("other", 0.7, flops=1.0)]
    write_pareto(groups, group("", 0.9, parameters=1e7), "accuracy", "max", tmp_path, "one")
    text = (tmp_path / "one.svg").read_text()
    assert (tmp_path / "one.png").stat().st_size > 10_000
    # a text of the picture stands in a comment before its letters; only one cost of the dense net is known
    assert text.index("<!-- ours, 2$ and 3$ -->") < text.index("<!-- dense -->") and "<!-- 10M -->" in text
    (tmp_path / "again").mkdir()
    write_pareto(groups, group("", 0.9, parameters=1e7), "accuracy", "max", tmp_path / "again", "one")
    assert (tmp_path / "again" / "one.svg").read_text() == text
    (tmp_path / "empty").mkdir()
    write_pareto([], group("", 0.9), "accuracy", "max", tmp_path / "empty")
    assert "<!-- dense -->" not in (tmp_path / "empty" / "pareto.svg").read_text()


def test_latencies_of_different_times_are_compared_by_speed_ups():
    def report(dense_ms: float, ms: float, speedup: float | None) -> dict:
        nets = {"dense": {"latency_ms": {"median": dense_ms}, "bytes": 8}, "compressed": {"latency_ms": {"median": ms}}}
        return {**nets, "ratios": {"speedup": speedup}}

    # the same net on a machine that became half as fast, and one that was not timed in turns
    found, dense = costs_of([report(10, 5, 2.0), report(20, 10, 2.0), report(15, 4, None)])
    assert [costs["latency"] for costs in found] == [7.5, 7.5, 4] and dense["latency"] == 15 and dense["bytes"] == 8
    assert mean_costs(found[1:])["latency"] == 5.75 and mean_costs(found)["bytes"] is None
    assert costs_of([]) == ([], dict.fromkeys(COSTS))


def test_nets_far_behind_stand_at_the_edge_with_their_number(tmp_path):
    assert edge_of([0.9, 0.8, 0.1], 0.9, "max") == 0.78 and edge_of([20, 25, 900], 18, "min") == 26.4
    assert edge_of([0.9, 0.8], 0.9, "max") is None and edge_of([0.1], 0.9, "max") is None
    assert edge_of([-0.1, 0.1], -0.2, "max") is None
    assert is_beyond(0.1, 0.78, "max") and not is_beyond(0.78, 0.78, "max") and not is_beyond(0.1, None, "max")
    assert is_beyond(900, 26.4, "min") and not is_beyond(25, 26.4, "min")
    groups = [group("good", 0.88, flops=2.0, parameters=1e6), group("bad", 0.135, flops=1.0, parameters=1e6)]
    write_pareto(groups, group("", 0.9, parameters=1e7), "accuracy", "max", tmp_path)
    text = (tmp_path / "pareto.svg").read_text()
    assert "<!-- 0.135 -->" in text and "<!-- bad -->" in text and "<!-- 0.3 -->" not in text


def test_numbers_at_the_edge_do_not_cover_each_other():
    many = [group(f"bad {i}", 0.1 + i / 100, flops=1.0 + i / 50, parameters=1e6 * (1 + 5 * (i == 3))) for i in range(4)]
    good, dense = group("good", 0.88, flops=2.0, parameters=1e6), group("", 0.9, flops=8.0, parameters=1e7)
    figure = pareto_figure([good, *many], dense, "accuracy", "max")
    flops, parameters = (
        [text.get_position()[1] for text in panel.texts]
        for panel in figure.axes
        if panel.get_xlabel() in (COSTS["flops"][1], COSTS["parameters"][1])
    )
    assert sorted([flops, parameters]) == [[0, 8, 16, 0], [0, 8, 16, 24]]
