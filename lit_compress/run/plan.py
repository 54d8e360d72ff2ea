"""What a run has found and is about to do, shown before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_compress.stages.rank_rule import RankRule

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

    from lit_compress.data.facts import DataFacts
    from lit_compress.methods.base import Method

MOST_CLASSES = 8  # that are listed with their counts


@dataclass(frozen=True)
class StagePlan:
    """A stage that will be trained: its name, epochs and optimizer steps."""

    name: str
    epochs: int
    steps: int


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        method: its name.
        stages: in order.
        sites: weights of the dense net's sites.
        total: all weights of the dense net.
        density: fraction of the weights of the sites that is asked for, or of what ``of`` says.
        stores_zeros: the removed weights stay in the exported file.
        of: what the density counts: ``sites``, ``net`` (all weights), ``flops`` or ``milliseconds`` of the sites.
    """

    method: str
    stages: tuple[StagePlan, ...]
    sites: int
    total: int
    density: float
    stores_zeros: bool
    of: str = "sites"

    @property
    def sites_after(self) -> int:
        """Weights of the sites that are left."""
        return round(self.density * self.sites)

    @property
    def total_after(self) -> int:
        """All weights that are left."""
        if self.of == "net":
            return round(self.density * self.total)
        return self.total - self.sites + self.sites_after


def target_density(method: Method, net: PreTrainedModel) -> float:
    """Return the fraction of the weights of the sites of ``net`` that the last stage of ``method`` is to leave.

    With scope ``all`` it is that of all weights, with a price that of the price. The stages must have been checked:
    some find their density in the net.
    """
    last = method.stages()[-1]
    last.check(net)
    rule = getattr(last, "ranks", None)
    return rule.density_of(net) if isinstance(rule, RankRule) else float(getattr(last, "density", method.density))


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines that say what will be done."""
    stages = ", ".join(f"{s.name} {s.epochs} epochs = {s.steps:,} steps" for s in plan.stages)
    yield f"{plan.method}: {stages}"
    if plan.of == "net":
        yield (
            f"weights of the net {plan.total:,} -> about {plan.total_after:,} (density {plan.density:.4g}), "
            "embeddings included"
        )
    elif plan.of == "sites":
        yield (
            f"weights of the sites {plan.sites:,} -> about {plan.sites_after:,} (density {plan.density:.4g}), "
            f"of the net {plan.total:,} -> about {plan.total_after:,}"
        )
    else:
        yield (
            f"the sites keep {plan.density:.4g} of their {plan.of}; of their {plan.sites:,} weights as many as that "
            "allows"
        )
    if plan.stores_zeros:
        yield "the file keeps its size: the removed weights are stored as zeros"


_COLUMNS = ("rows", "inputs", "longest", "cut", "empty", "repeated", "in_train")


def facts_table(task: str, facts: DataFacts) -> Table:
    """Return a table with a row per split; columns in which all is 0 are left out."""
    from rich.table import Table

    shown = Table(title=None)
    names = [n for n in _COLUMNS if n in ("rows", "longest", "cut") or any(getattr(s, n) for s in facts.splits)]
    if all(split.inputs == split.rows for split in facts.splits):
        names.remove("inputs")
    shown.add_column(f"data of {task}")
    for name in names:
        shown.add_column(name.replace("_", " "), justify="right")
    for split in facts.splits:
        cells = {name: f"{getattr(split, name):,}" for name in names}
        if split.rows < split.available and split.inputs >= split.rows:
            cells["rows"] += f" of {split.available:,}"
        shown.add_row(split.split, *cells.values())
    return shown


def facts_lines(facts: DataFacts) -> Iterator[str]:
    """Yield the classes of every split with their counts, and what the columns of the table mean."""
    for split in facts.splits:
        if split.classes:
            ordered = sorted(split.classes, key=lambda c: -c["count"])
            shown = [f"{c['name']} {c['count']:,}" for c in ordered]
            if len(shown) > MOST_CLASSES:
                shown[MOST_CLASSES - 1 : -1] = [f"{len(shown) - MOST_CLASSES} more"]
            yield f"classes of {split.split}: {', '.join(shown)}"
    yield f"longest: tokens of the longest input; cut: inputs of more than {facts.max_length} tokens"
