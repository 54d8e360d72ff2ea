"""The summary before a run: what is counted is what is shown."""

import io
import json

import pytest
from rich.console import Console
from tiny import make_net

from lit_compress import methods
from lit_compress.__main__ import main
from lit_compress.models.accounting import dense_site_params
from lit_compress.run.plan import facts_lines, facts_table, plan_lines, target_density


def split(name="train", **values):
    return {
        "split": name, "rows": 64, "available": 872, "inputs": 64, "longest": 12, "cut": 3, "empty": 0, "repeated": 0,
        "in_train": 0, "classes": [], **values,
    }  # fmt: skip


def facts(*splits):
    return {"max_length": 128, "splits": splits}


def text(table, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_the_table_has_a_row_per_split_and_no_empty_column():
    said = text(facts_table("sst2", facts(split(), split("validation", rows=872, inputs=872, in_train=5))))
    assert "data of sst2" in said and "64 of 872" in said and "in train" in said
    assert "empty" not in said and "inputs" not in said and "repeated" not in said
    assert max(map(len, said.splitlines())) <= 80
    assert "inputs" in text(facts_table("squad", facts(split(inputs=90))))


def test_classes_are_listed_with_their_counts_most_frequent_first():
    few = [{"name": "bad", "count": 2}, {"name": "good", "count": 1062}]
    many = [{"name": f"c{i}", "count": i} for i in range(20)]
    first, second, last = facts_lines(facts(split(classes=few), split("validation", classes=many)))
    assert first == "rows of each class in train: good: 1,062, bad: 2"
    counts = ", ".join(f"c{i}: {i}" for i in range(19, 12, -1))
    assert second == f"rows of each class in validation: {counts}, 12 more, c0: 0"
    assert "128 tokens" in last


def test_what_will_be_done():
    net, steps = make_net("bert"), {"dense": 6315, "prune": 12630, "retrain": 3}
    assert list(plan_lines(methods.LPAF(task="sst2", density=0.25), net, steps)) == [
        "LPAF: dense 3 epochs = 6,315 steps, prune 3 epochs = 12,630 steps, retrain 3 epochs = 3 steps",
        "weights of the sites 16,384 -> about 4,096 (density 0.25), of the model 23,586 -> about 11,298",
    ]
    *_, zeros = plan_lines(methods.PLATON(task="sst2"), net, steps)
    assert zeros.startswith("the removed weights are stored as zeros")


@pytest.mark.parametrize(
    ("name", "options", "density"),
    [
        ("LPAF", {"density": 0.5}, 0.5),
        ("SVD", {"density": 0.25}, 0.25),
        ("Magnitude", {"density": 0.3}, 0.3),
        ("CoFi", {"density": 0.4}, 0.4),
        ("LoSparse", {"density": 0.4}, 0.4),
        ("Layers", {"density": 0.75}, 0.5),  # one of two blocks
    ],
)
def test_the_target_is_that_of_the_last_stage(name, options, density):
    method = getattr(methods, name)(task="sst2", **options)
    assert target_density(method, make_net("bert")) == pytest.approx(density)


def test_a_density_of_the_whole_net():
    net, steps = make_net("bert"), {"dense": 1, "retrain": 10}
    _, line = plan_lines(method := methods.SecondOrder(task="sst2", density=0.4, scope="all"), net, steps)
    assert line == "weights of the model 23,586 -> about 9,434 (density 0.4), embeddings included"
    assert target_density(method, net) == 0.4


def test_the_target_of_a_rank_and_of_a_number_of_weights():
    net = make_net("bert").to("meta")
    rank = target_density(methods.SVD(task="sst2", rank=4), net)
    sites = [(32, 32)] * 4 + [(64, 32), (32, 64)]
    assert rank == pytest.approx(sum(4 * (a + b) for a, b in sites) / sum(a * b for a, b in sites))
    count = 6000
    left = target_density(methods.SP3(task="sst2", params=str(count)), net) * dense_site_params(net)
    assert 0.95 * count < left <= count


@pytest.mark.slow
def test_a_run_shows_and_keeps_what_it_has_found(short_run, tmp_path, capsys, tiny_data):
    """Before anything is trained, and once."""
    rows = [json.loads(line) for line in (tiny_data / "train.jsonl").read_text().splitlines()]
    args = ["fit", "--model", "SVD", "--model.density", "0.5", *short_run, "--run_dir", str(tmp_path / "run"),
            "--data.validation_examples", "30"]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_compress.cli.fitting.run_stages", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(args)
    said = capsys.readouterr().out
    assert "rows of each class in train: negative: 50, positive: 50" in said and "30 of 40" in said
    assert "SVD: dense 2 epochs = 26 steps, retrain 2 epochs = 26 steps" in said
    assert "weights of the sites 16,384 -> about 8,192 (density 0.5)" in said
    main([*args, "--ckpt_path", "last"])
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["data"] == json.loads((tmp_path / "run" / "data.json").read_text())
    train, dev = report["data"]["splits"]
    assert (train["rows"], train["available"], dev["rows"], dev["available"]) == (100, 100, 30, 40)
    assert train["repeated"] == 100 - len({row["sentence"] for row in rows})
    assert report["metric"]["rows"] == 30 and report["metric"]["available"] == 40
    score, (low, high) = report["compressed"]["metric"], report["compressed"]["interval"]
    said = capsys.readouterr().out
    assert f"\ndev accuracy {score:.4f} ± {(high - low) / 3.919928:.4f} (30 of 40 rows)\n" in said
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert "The dev metric is measured on 30 of 40 rows" in card
    assert f"between {low:.4f} and {high:.4f}" in card
