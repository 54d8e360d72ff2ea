"""Workers: each run once, a failed run stops nothing, chosen rates; jobs here are forks that write a report."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace

import pytest
from forks import Fork

from lit_compress.export.report import of_program
from lit_compress.run import workers
from lit_compress.run.comparison import Comparison, Plan
from lit_compress.run.workers import Fit, Worker, last_line
from lit_compress.utils.errors import UserError


def job(place, name, rate=0.1, teacher="seed=1", held_out=0.5, label="A", cell=""):
    """A job whose words say what its report will have; "fail" instead of a number: why it fails."""
    needed = job(place, teacher, None, None, label="") if isinstance(teacher, str) else teacher
    folder = Fit(place, name, (), label=label).folder
    return Fit(
        place, name, (str(folder), str(held_out)), label=label, cell=cell or name, rate=rate, teacher=needed,
        method="SVD", budget="density=0.25",
    )  # fmt: skip


def results(place, *jobs):
    """What is gathered of the runs."""
    return Plan(Comparison({}, [], learning_rates=(0.1, 0.2), updates=4, hold_out=2), place, jobs, "sst2").gather()


def pretend(words, log, handle, environment):
    """Stand in for ``start_process``: a fork that counts itself and writes what ``fit`` would."""
    folder, value = words

    def work():
        with open(f"{folder}.made", "a") as made:
            made.write("x")
        time.sleep(0.05)
        if value.startswith("fail"):
            log.write_text(f"some line\nerror: {value}\na last line\n")
            return 2
        os.makedirs(folder, exist_ok=True)
        net = {"metric": float(value), "interval": [0.4, 0.6], "density": 0.25}
        report = {"task": "sst2", "stages": {}, "metric": {"name": "accuracy", "mode": "max"},
                  "compressed": net, "dense": net,
                  "ratios": {"flops": 0.5, "params": {"total": 0.5}, "bytes": 0.5}}  # fmt: skip
        with open(f"{folder}/stages.json", "w") as file:
            json.dump([{"name": "retrain", "held_out": {"val/accuracy": float(value)}}], file)
        with open(f"{folder}/report.json", "w") as file:
            json.dump(report, file)
        return 0

    return Fork(work, handle)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "start_process", pretend)
    monkeypatch.setattr(workers, "POLL", 0.01)
    for name in ("runs", "teachers"):
        (tmp_path / name).mkdir()
    return tmp_path


def made(some):
    file = some.folder.with_name(f"{some.name}.made")
    return len(file.read_text()) if file.exists() else 0


def test_two_workers_make_every_run_once(place):
    jobs = [job(place, f"a-{i}") for i in range(6)]
    teacher = jobs[0].teacher
    if not (other := os.fork()):
        Worker(jobs, 2).work()
        os._exit(0)
    Worker(jobs, 2).work()
    assert os.waitpid(other, 0)[1] == 0
    assert [made(some) for some in (teacher, *jobs)] == [1] * 7
    Worker(jobs).work()
    assert [made(some) for some in jobs] == [1] * 6


def test_a_run_whose_worker_was_killed_keeps_its_lock(place, monkeypatch):
    """Its process goes on: nobody else starts the run before that has ended."""
    some, (read, write) = job(place, "a", teacher=None), os.pipe()

    def pause(*_):
        os.write(write, str(os.getpid()).encode())
        signal.pause()
        return 1

    if not (worker := os.fork()):
        monkeypatch.setattr(workers, "start_process", lambda words, log, handle, environment: Fork(pause, handle))
        Worker([some]).work()
    child = int(os.read(read, 20))
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    (cell,) = results(place, some)["cells"]
    assert cell["status"] == "unfinished" and some.lock() is None
    Worker([some]).work(until=time.time() + 0.1)
    assert made(some) == 0
    os.kill(child, signal.SIGKILL)
    Worker([some]).work()
    assert some.done and not (place / "locks" / some.name).stat().st_mode & 0o111


def test_a_run_that_is_killed_after_its_report_is_done(place, monkeypatch):
    def killed(words, log, handle, environment):
        pretend(words, log, handle, environment).wait()
        return Fork(lambda: 137, handle)

    monkeypatch.setattr(workers, "start_process", killed)
    some, said = job(place, "a", teacher=None), []
    Worker([some], ended=lambda *e: said.append(e)).work()
    assert said == [(some, None)] and some.state["error"] is None and some.status == "done"


def test_a_failed_run_is_marked_stops_nothing_and_is_tried_anew(place):
    bad, good = (job(place, name, rate, held_out=held_out, cell="both")
                 for name, rate, held_out in (("bad", 0.1, "fail: no"), ("good", 0.2, 0.7)))  # fmt: skip
    said = []
    for _ in range(2):
        Worker([bad, good], ended=lambda *e: said.append(e)).work()
    assert made(bad) == 2 and made(good) == 1 and bad.error == "fail: no"
    failed = ("bad", "fail: no")
    assert [(some.name, error) for some, error in said][1:] == [failed, ("good", None), failed]
    alone, later = job(place, "alone", held_out="fail: x"), job(place, "later")
    Worker([alone]).work()
    both, one, none = results(place, bad, good, alone, later)["cells"]
    assert (both["status"], both["run"], both["learning_rate"]) == ("done", "runs/good", 0.2)
    assert both["error"] == "1 of 2 learning rates failed: fail: no"
    assert (one["status"], one["error"], none["status"]) == ("failed", "fail: x", "missing")
    (good.folder / "report.json").unlink()
    assert results(place, good)["cells"][0]["status"] == "unfinished"


def test_without_its_teacher_no_run_is_made(place):
    some = job(place, "a", teacher=job(place, "seed=1", None, None, "fail: memory", label=""))
    Worker([some]).work()
    assert made(some) == 0 and some.error == "its teacher seed=1 failed: fail: memory"


def test_held_out_rows_choose_the_rate(place):
    jobs = [job(place, f"a-{rate}", rate, held_out=1 - rate, cell="a") for rate in (0.1, 0.2)]
    other = job(place, "b", None, held_out=0.5, label="B")
    Worker([*jobs, other]).work()
    found = results(place, *jobs, other)
    a, b = found["cells"]
    assert (a["learning_rate"], a["run"], [one["held_out"] for one in a["tried"]]) == (0.1, "runs/a-0.1", [0.9, 0.8])
    assert (b["learning_rate"], b["tried"], b["status"]) == (None, [], "done")
    assert "not on the dev set" in found["fairness"]


def test_a_run_whose_export_is_a_program_of_integers_counts_as_that_program():
    """Metric, interval and bytes are the program's."""
    nets = {"metric": 0.75, "density": 1, "interval": [0.6, 0.9], "bytes": 40, "latency_ms": {"median": 3.0}}
    report = {"compressed": nets, "dense": nets, "metric": {"name": "accuracy", "rows": 4},
              "ratios": {"flops": 1, "params": {"total": 1}, "bytes": 1, "metric": 1, "speedup": 2.0},
              "stages": {"dense": nets, "compressed": nets}, "timing": {"speedup": {"median": 2.0}}}  # fmt: skip
    assert of_program(report) is report and of_program(report | {"program": {"file": "model.onnx"}})["program"]
    made = {"dtype": "int8", "metric": 0.5, "interval": [0.3, 0.7], "bytes": 10}
    small = of_program(report | {"program": made})
    untimed = {"latency_ms": dict.fromkeys(("median", "p10", "p90"))}  # PyTorch's is not the program's
    assert small["compressed"] == nets | {"metric": 0.5, "interval": [0.3, 0.7], "bytes": 10} | untimed
    assert small["stages"] == {"dense": small["dense"], "compressed": small["compressed"]} and small["dense"] == nets
    assert small["ratios"]["speedup"] is small["timing"] is None


def test_a_run_of_other_options_is_refused(place):
    Worker([job(place, "a")]).work()
    job(place, "a").check_same()
    bad, corrected = job(place, "bad", held_out="fail: no"), job(place, "bad", held_out=0.7)
    Worker([bad]).work()
    corrected.check_same()
    Worker([corrected]).work()
    assert corrected.done
    with pytest.raises(UserError, match=r"has 'a' with other options: 0.5, now 0.6; give another --out"):
        job(place, "a", held_out=0.6).check_same()
    plan = Plan(Comparison({}, [], updates=4, hold_out=2), place, [job(place, "a")], data={"train": "key"}, batch=8)
    assert plan.gather() and plan.check() is None
    with pytest.raises(UserError, match=r"has runs with other train rows; give the same rows, or another --out"):
        replace(plan, data={"train": "other"}).check()
    with pytest.raises(UserError, match=r"has runs of a global batch of 8, now 16 \(batch_size, .*, devices\)"):
        replace(plan, batch=16).check()


def test_why_a_run_failed_is_one_line(tmp_path):
    log = tmp_path / "log"
    log.write_text("Traceback\n  File x\nValueError: a \t b\n")
    assert last_line(log, 1) == "ValueError: a b"
    assert last_line(log, -9) == "killed by signal 9; was memory short?"
    assert last_line(tmp_path / "none", 3) == "exit code 3"


@pytest.mark.parametrize(
    ("at_once", "given", "threads"), [(1, None, None), (2, None, "4"), (16, None, "1"), (2, "3", "3")]
)
def test_processes_at_once_share_the_cores(at_once, given, threads, place, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    environments = []
    monkeypatch.setattr(workers, "start_process", lambda *args: environments.append(args[3]) or pretend(*args))
    Worker([job(place, "a", teacher=None)], at_once).work()
    assert environments[0].get("OMP_NUM_THREADS") == threads


def test_a_run_that_was_killed_in_an_earlier_version_is_unfinished(tmp_path):
    job = Fit(tmp_path, "a", ("fit",), label="SVD")
    job.record(status="running")
    assert job.status == "unfinished"
