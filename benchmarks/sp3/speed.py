"""What SP3 costs: the calibration of BERT-base, a step with gates, and the forward of a narrow net.

    python -m benchmarks.sp3.speed [--only speed step calibration] [--rounds 10] [--threads 1]

Writes benchmarks/sp3/results/speed/<part>-cpu-<threads>.json; existing ones are kept. `python -m benchmarks.tables`
shows them.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks import common, timing

GOALS = {"calibration seconds": 60, "calibration MiB over the net": 1024, "step": 1.6, "speedup at 6 %": 4.0}
DIMENSIONS = ("hidden", "qk", "vo", "neurons")


def batches_of(examples: int, length: int, size: int = 32) -> list[dict[str, torch.Tensor]]:
    """Return random examples of one length."""
    ids = torch.randint(5, 30000, (examples, length), generator=torch.Generator().manual_seed(0))
    return [
        {
            "input_ids": part,
            "attention_mask": torch.ones_like(part),
            "index": torch.arange(i * size, i * size + len(part)),
        }
        for i, part in enumerate(ids.split(size))
    ]


def calibration(examples: int, length: int) -> dict[str, Any]:
    """Time the calibration of BERT-base, and its memory over a forward of the same batch."""
    from lit_compress.calibration.second_moments import bases_of, collect_grams

    net, batches = timing.random_bert().eval(), batches_of(examples, length)
    with torch.inference_mode():
        net(input_ids=batches[0]["input_ids"])
    before, start = timing.peak_mib(), time.perf_counter()
    grams = collect_grams(net, batches, min(4096, examples * length))
    middle = time.perf_counter()
    bases_of(grams)
    end = time.perf_counter()
    return {
        "seconds": {"forwards": middle - start, "projections": end - middle, "all": end - start},
        "mib_over_the_net": timing.peak_mib() - before, "examples": examples, "length": length,
    }  # fmt: skip


def narrow_bert(net: Any, density: float) -> Any:
    """Return ``net`` as SP3 leaves it at a density, the same fraction of every dimension, heads and layers whole."""
    from lit_compress.export.fuse import fuse
    from lit_compress.models.projected.gates import GateSlots, gate_shapes, gated_size
    from lit_compress.models.projected.projections import fold_projections, identity_bases, insert_projections

    insert_projections(net, identity_bases(net), DIMENSIONS)
    shapes, size = gate_shapes(net, DIMENSIONS), gated_size(net, DIMENSIONS)

    def kept(fraction: float) -> dict[str, torch.Tensor]:
        return {n: (torch.arange(units) < fraction * units).expand(groups, -1) for n, (groups, units) in shapes.items()}

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if size.count(kept(middle)) <= density * size.total else (low, middle)
    heads = net.config.num_attention_heads
    z = {n: mask.float().repeat(1, heads if n in ("qk", "vo") else 1) for n, mask in kept(low).items()}
    GateSlots(net, DIMENSIONS).set(z)
    return fuse(fold_projections(net))


def speed(rounds: int) -> dict[str, Any]:
    """Time forwards of BERT-base dense and at 6 %, batch 1 and 32, length 128, interleaved."""
    from lit_compress.models.accounting import density, forward_times
    from lit_compress.utils.timing import summary

    dense = timing.random_bert().eval()
    small = narrow_bert(timing.random_bert().eval(), 0.06)
    found: dict[str, Any] = {"density": density(small)}
    for batch in (1, 32):
        threads = torch.get_num_threads()
        shape = {"batch": batch, "length": 128, "threads": threads}
        times = [{**summary(ms), **shape} for ms in forward_times([dense, small], 128, batch, threads, rounds)]
        found[f"batch {batch}"] = {"dense": times[0], "6 %": times[1], "ratio": times[0]["median"] / times[1]["median"]}
    return found


def step(rounds: int) -> dict[str, Any]:
    """Time a step with gates, projections and matched hidden states against a dense distillation step, interleaved."""
    from lit_compress.layers.training.gated import HardConcrete
    from lit_compress.models.projected.gates import GATES, GateSlots, gate_shapes, gated_size
    from lit_compress.models.projected.projections import identity_bases, insert_projections
    from lit_compress.numerics.losses import distillation_loss, lagrangian, layer_distillation_loss, matched_layers_loss

    teacher, dense, gated = (timing.random_bert(timing.MINILM).eval() for _ in range(3))
    insert_projections(gated, identity_bases(gated), GATES)
    for name, parameter in gated.named_parameters():
        frozen = ".weight" in name and "pooler" not in name and "classifier" not in name
        parameter.requires_grad_(not frozen)
    shapes = gate_shapes(gated, GATES)
    modules = {n: HardConcrete(*s, 10.0, copies=12 if n in ("qk", "vo") else 1) for n, s in shapes.items()}
    places, size, price = GateSlots(gated, GATES), gated_size(gated, GATES), torch.zeros(1, requires_grad=True)
    batch = batches_of(32, 64)[0]
    inputs = {n: batch[n] for n in ("input_ids", "attention_mask")}
    dense.train()
    gated.train()

    def one(net: Any, own: bool) -> None:
        if own:
            places.set({n: gate.sample() for n, gate in modules.items()})
        out = net(**inputs, output_hidden_states=True)
        with torch.no_grad():
            target = teacher(**inputs, output_hidden_states=True)
        loss = distillation_loss(out.logits, target.logits, "classification")
        compare = matched_layers_loss if own else layer_distillation_loss
        loss = loss + compare(out.hidden_states, target.hidden_states, batch["attention_mask"])
        if own:
            loss = loss + lagrangian(size.density({n: g.log_alpha for n, g in modules.items()}), 0.5, price, price)
        loss.backward()
        for parameter in net.parameters():
            parameter.grad = None

    seconds: dict[str, list[float]] = {"dense": [], "gated": []}
    for round_ in range(rounds + 2):
        for name, net in (("dense", dense), ("gated", gated)):
            start = time.perf_counter()
            one(net, name == "gated")
            if round_ >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds, "ratio": timing.ratio(seconds["gated"], seconds["dense"])}


def main() -> None:
    """Measure what is missing."""
    parts = {
        "speed": lambda options: speed(options.rounds),
        "step": lambda options: step(options.rounds),
        "calibration": lambda options: calibration(options.calibration_examples, timing.LENGTH),
    }
    parser = common.parser("sp3/speed", __doc__, rounds=10, only=tuple(parts))
    parser.add_argument("--calibration_examples", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for part in options.only:
        name = f"{part}-cpu-{options.threads}"
        if not (options.results / f"{name}.json").exists():
            timing.store(options, name, parts[part](options), part=part, threads=options.threads, goals=GOALS)


if __name__ == "__main__":
    main()
