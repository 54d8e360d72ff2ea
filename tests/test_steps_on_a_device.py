"""What a training step asks of a device: few waits, and few operator calls beyond forward, backward and AdamW."""

import processes

from benchmarks.device.run import measure


@processes.with_second_device
def test_a_step_waits_seldom_and_makes_few_calls():
    """It waits for whether gradients are finite, and in each forward of model and teacher for whether there is padding.

    It copies every column of the batch. Other methods: test_contract.py.

    Pruning adds scores, threshold and the loss on the teacher's logits; two forwards make at most twice the calls. The
    teacher's own forward, which the dense stage has not, is left out.
    """
    runs = {name: {row["stage"]: row for row in measure(name)} for name in ("SVD", "LPAF")}
    for stages in runs.values():
        for stage, row in stages.items():
            forwards = 1 + (row["teacher"] > 0)
            assert (row["waits"], row["to_host"], row["to_device"]) == (1 + forwards, 0, 5), f"{stage}: {row}"
    prune = runs["LPAF"]["prune"]
    assert prune["calls"] - prune["teacher"] <= 1.1 * runs["LPAF"]["dense"]["calls"]
    assert prune["most"]["waits"] <= 7  # in the last step, which computes a threshold and logs
    one, two = (runs[name]["retrain"]["calls"] - runs[name]["retrain"]["teacher"] for name in ("SVD", "LPAF"))
    assert two <= 2.0 * one
