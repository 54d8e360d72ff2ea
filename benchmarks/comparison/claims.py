"""The papers' claims, such as "LPAF > SVD at 0.25", tested on the finished runs of a comparison.

    python -m benchmarks.comparison.claims runs/compare_sst2 [--claims FILE]

prints a verdict on every claim in claims.yaml, or in another file.

A claim says that one value is more than ``times`` another plus ``by``. With several seeds the difference is tested over
them (Student's t: paired, where both methods ran with the same seeds and so from the same teachers; Welch's else). With
one seed it is tested over the rows of the dev set: of pairs, where every row is right or wrong, as both models answered
the same rows (McNemar's exact test; with a factor or a distance the normal distribution); else it is compared with the
standard errors that the two scores have because the dev set is a sample. Probabilities are corrected for the number of
comparisons that chance may decide (Holm). A comparison that none decides is "within noise".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import fsum, inf, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from scipy import stats

from lit_compress.evaluation.intervals import FRACTIONS, standard_error
from lit_compress.export.report import of_program
from lit_compress.run.comparison import budget_name
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import json_of, read_yaml

FILE = Path(__file__).with_name("claims.yaml")

Verdict = Literal["held", "not held", "within noise", "not measured"]
LEVEL = 0.05  # two-sided, for all claims together
EXACT = "both values are exact"
DENSE = "dense"  # the label under which a claim names the teacher
_WORST: tuple[Verdict, ...] = ("not held", "not measured", "within noise", "held")


@dataclass(frozen=True)
class Value:
    """A value.

    Attributes:
        value: a metric, a ratio, ...
        error: its standard error; None: unknown.
        rows: function that returns every dev row's share, 1 if it is right, else 0; None, or a function that returns
            None, where it is no fraction of rows, or they are not there.
    """

    value: float
    error: float | None = None
    rows: Callable[[], Sequence[float] | None] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ClaimedResult:
    """The results of one cell of a comparison.

    Attributes:
        label: of the method with its options.
        budget: e.g. ``density=0.25``.
        seed: of the run.
        scores: by name: ``metric``, ``dense`` (the metric of its teacher), ``speedup``, ``fewer_flops``, ...
    """

    label: str
    budget: str
    seed: int
    scores: Mapping[str, Value]


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        text: the claim in words.
        above: labels in falling order, or one label next to ``below``.
        below: label of the other method, ``dense`` for the teacher; None: the order among ``above``.
        budgets: at which the claim is meant; it holds if it does at each of them. (): those at which one of its
            methods has a result.
        tasks: for which it is meant; () for any.
        times: factor of the other value.
        by: by how much more the first value is to be, in the unit of the metric.
        value: name of the score that is compared.
        below_value: name of the other's score, if it is another one.
        paper: the paper's value.
    """

    text: str
    above: tuple[str, ...]
    below: str | None = None
    budgets: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    times: float = 1.0
    by: float = 0.0
    value: str = "metric"
    below_value: str | None = None
    paper: str = ""
    pairs: tuple[tuple[str, str], ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        pairs = [(name, self.below) for name in self.above] if self.below else list(pairwise(self.above))
        if not pairs:
            raise UserError(f"claims: '{self.text:.60}' names one method; give `below`, or two or more in `above`")
        object.__setattr__(self, "pairs", tuple(pairs))


def read_claims(rows: Any, budget: Any = str) -> list[Claim]:
    """Return the claims of a YAML file: a list of mappings with the attributes of :class:`Claim`.

    Args:
        rows: the content of the file.
        budget: function that returns the name of a budget as users write it.

    Raises:
        UserError: it is no such list.
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError("claims: give a list, one mapping per claim, e.g. {text: ..., above: LPAF, below: SVD}")
    known, claims = [name for name in Claim.__dataclass_fields__ if name != "pairs"], []
    for row in rows:
        for key in row:
            if key not in known:
                raise UserError(f"claims: unknown key '{key}' in '{row.get('text', row)!s:.60}'; {nearest(key, known)}")
        for key in ("text", "above"):
            if key not in row:
                raise UserError(f"claims: '{row!s:.60}' has no '{key}'")
        values = dict(row)
        for key in ("above", "budgets", "tasks"):
            value = values.get(key, ())
            values[key] = tuple(value) if isinstance(value, list | tuple) else (value,)
        for key in ("times", "by"):
            if not isinstance(values.get(key, 0), int | float):
                raise UserError(f"claims: {key} of '{row['text']:.60}' is '{values[key]}'; give a number")
        claims.append(Claim(**values | {"budgets": tuple(budget(b) for b in values["budgets"])}))
    return claims


@dataclass(frozen=True)
class _Comparison:
    """Two methods at one budget.

    Attributes:
        detail: names, values and seeds.
        p: probability of the difference by chance; None: unknown.
        test: its name; "" if a result is missing.
        gap: the difference.
    """

    detail: str
    p: float | None = None
    test: str = ""
    gap: float = 0.0

    @property
    def by_chance(self) -> bool:
        """Whether the difference may be there by chance: values such as FLOPs are exact."""
        return self.p is not None and self.test != EXACT

    def verdict(self, p: float | None) -> Verdict:
        """Return the verdict by the corrected probability."""
        if not self.test:
            return "not measured"
        if p is None or p >= LEVEL:
            return "within noise"
        return "held" if self.gap > 0 else "not held"


def evaluate_claims(
    claims: Sequence[Claim], results: Sequence[ClaimedResult], task: str, less_is_better: bool = False
) -> list[dict[str, str]]:
    """Return ``text``, ``verdict``, ``test``, ``detail`` and ``paper`` of every claim.

    Args:
        claims: to judge; they are corrected together for the number of their comparisons.
        results: the cells that are finished.
        task: that all results are of.
        less_is_better: for the score ``metric``, e.g. perplexity: "more" then means less.
    """
    compared = [
        [] if claim.tasks and task not in claim.tasks else list(_comparisons(claim, results, less_is_better))
        for claim in claims
    ]
    tested = [each for some in compared for each in some if each.by_chance]
    corrected = dict(zip(map(id, tested), holm([each.p or 0.0 for each in tested]), strict=True))
    return [_entry(claim, some, task, corrected) for claim, some in zip(claims, compared, strict=True)]


def _entry(claim: Claim, comparisons: list[_Comparison], task: str, corrected: Mapping[int, float]) -> dict[str, str]:
    """Return the verdict on a claim; ``corrected`` has the probabilities of all comparisons that chance may decide."""
    own = {"text": claim.text, "paper": claim.paper}
    if not comparisons:
        return own | {
            "verdict": "not measured", "test": "", "detail": f"is about {', '.join(claim.tasks)}, not {task}"
        }  # fmt: skip
    verdicts = [each.verdict(corrected.get(id(each), each.p)) for each in comparisons]
    details = []
    for each, verdict in zip(comparisons, verdicts, strict=True):
        text = each.detail
        if each.test:
            text += f", p {_shown(each.p)}"
        if each.by_chance and len(corrected) > 1:
            text += f", {_shown(corrected[id(each)])} corrected for {len(corrected)} comparisons"
        details.append(text + (f" ({verdict})" if len(comparisons) > 1 else ""))
    tests = dict.fromkeys(each.test for each in comparisons if each.test)
    verdict = min(verdicts, key=_WORST.index)
    return own | {"verdict": verdict, "test": "; ".join(tests), "detail": "; ".join(details)}


def _shown(p: float | None) -> str:
    return "unknown" if p is None else "below 0.001" if p < 0.001 else f"{p:.3f}"


def _comparisons(claim: Claim, results: Sequence[ClaimedResult], less_is_better: bool) -> Iterator[_Comparison]:
    """Yield the comparisons of every pair of methods, at the claim's budgets or those of the methods' results."""
    names = {name for pair in claim.pairs for name in pair}
    tried = tuple(dict.fromkeys(result.budget for result in results if result.label in names))
    for budget in claim.budgets or tried or ("any budget",):
        for above, below in claim.pairs:
            yield _compare(claim, above, below, budget, results, less_is_better)


def _compare(
    claim: Claim, above: str, below: str, budget: str, results: Sequence[ClaimedResult], less_is_better: bool
) -> _Comparison:
    """Return the comparison of one pair of methods at one budget."""
    first = _by_seed(results, above, budget, claim.value)
    if below == DENSE:
        second = _by_seed(results, above, budget, DENSE)
    else:
        second = _by_seed(results, below, budget, claim.below_value or claim.value)
    if not first or not second:
        missing = [name for name, side in ((above, first), (below, second)) if not side]
        return _Comparison(f"no finished run of {' and '.join(missing)} at {budget}")
    sign = -1.0 if less_is_better and claim.value == "metric" else 1.0
    p, test, gap = difference(first, second, claim.times, claim.by, sign)
    means = mean(s.value for s in first.values()), mean(s.value for s in second.values())
    seeds = f"{len(first)} and {len(second)} seeds" if len(first) != len(second) else _plural(len(first), "seed")
    return _Comparison(f"{above} and {below} at {budget}: {means[0]:.4f} and {means[1]:.4f}, {seeds}", p, test, gap)


def _by_seed(results: Sequence[ClaimedResult], label: str, budget: str, name: str) -> dict[int, Value]:
    return {r.seed: r.scores[name] for r in results if r.label == label and r.budget == budget and name in r.scores}


def difference(
    first: Mapping[int, Value], second: Mapping[int, Value], times: float = 1.0, by: float = 0.0, sign: float = 1.0
) -> tuple[float | None, str, float]:
    """Return the two-sided probability of a difference this large by chance (None: unknown), the test, and its mean.

    The difference is ``sign * (first - times * second) - by``.

    Args:
        first, second: scores by seed.
    """
    both = sorted(first.keys() & second.keys())
    left, right = ([value.value for value in side.values()] for side in (first, second))
    gap = sign * (mean(left) - times * mean(right)) - by
    if len(both) >= 2:
        gaps = [sign * (first[seed].value - times * second[seed].value) - by for seed in both]
        if stdev(gaps) > 1e-12:  # the same numbers in every seed say nothing about chance
            return float(stats.ttest_1samp(gaps, 0).pvalue), f"paired t-test over {len(gaps)} seeds", mean(gaps)
    elif min(len(left), len(right)) >= 2:
        if max(stdev(left), stdev(right)) > 1e-12:
            sides = [sign * one - by for one in left], [sign * times * one for one in right]
            return float(stats.ttest_ind(*sides, equal_var=False).pvalue), "Welch's t-test over seeds", gap
    elif len(left) == len(right) == len(both) == 1:
        ours, theirs = (value.rows and value.rows() for side in (first, second) for value in side.values())
        if ours and theirs and len(ours) == len(theirs) > 1:
            gaps = [sign * (a - times * b) - by for a, b in zip(ours, theirs, strict=True)]
            if {*gaps} <= {-1.0, 0.0, 1.0} and any(gaps):
                p = stats.binomtest(gaps.count(1.0), gaps.count(1.0) + gaps.count(-1.0)).pvalue
                return float(p), f"McNemar's exact test over the {len(gaps):,} rows of the dev set", mean(gaps)
            if (spread := stdev(gaps)) > 1e-12:
                p = _normal(mean(gaps) / spread * sqrt(len(gaps)))
                return p, f"paired over the {len(gaps):,} rows of the dev set", mean(gaps)
    test = "standard errors of the two scores"
    # the rows are the same ones for every seed, so that more seeds make these errors no smaller
    errors = [max((inf if s.error is None else s.error) for s in side.values()) for side in (first, second)]
    width = sqrt(errors[0] ** 2 + (times * errors[1]) ** 2)
    if width == inf:
        return None, f"{test} are unknown", gap
    if width == 0:  # both values are exact, such as FLOPs
        return (0.0 if gap else 1.0), EXACT, gap
    return _normal(gap / width), test, gap


def _normal(z: float) -> float:
    """Return the two-sided probability of a standard normal deviate."""
    return float(2 * stats.norm.sf(abs(z)))


def holm(chances: Sequence[float]) -> list[float]:
    """Return the probabilities of several tests corrected for their number, each at most 1.

    At most 5 % of such families have a corrected value below 0.05 by chance, however they depend on each other (Holm
    1979, https://www.jstor.org/stable/4615733).

    >>> [round(p, 2) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(chances), 0.0
    for done, place in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        largest = max(largest, min(1.0, (len(chances) - done) * chances[place]))
        corrected[place] = largest
    return corrected


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"


# ------------------------------------------------------------------------------------------ the results


def decided(out: Path, file: Path = FILE) -> list[dict[str, str]]:
    """Return the entries of :func:`evaluate_claims` on the finished runs of a comparison's folder.

    Args:
        out: the folder that ``compare`` wrote.
        file: YAML with the claims.
    """
    found = json_of(out / "compare.json")
    results = []
    for cell in (cell for cell in found["cells"] if cell["status"] == "done"):
        report = of_program(json_of(out / cell["run"] / "report.json"))
        results.append(ClaimedResult(cell["label"], cell["budget"], cell["seed"], scores(report, out / cell["run"])))
    less = (found["metric"] or {}).get("mode") == "min"
    return evaluate_claims(read_claims(read_yaml("claims", file), budget_name), results, found["task"], less)


def scores(report: dict[str, Any], folder: Path) -> dict[str, Value]:
    """Return the scores of a run that claims may name; ``folder`` is the run's."""
    compressed, dense, ratios = report["compressed"], report["dense"], report["ratios"]
    integers = "dtype" in (report.get("program") or {})  # the kept answers are those of the model in float32
    rows = None if integers else partial(_rows, report, folder, "compressed")
    values = {
        "metric": Value(compressed["metric"], _error(compressed), rows),
        "dense": Value(dense["metric"], _error(dense), partial(_rows, report, folder, "dense")),
        "one": Value(1.0, 0.0),
        "density": Value(compressed["density"], 0.0),
        "fewer_flops": Value(1 / ratios["flops"], 0.0),
        "fewer_params": Value(1 / ratios["params"]["total"], 0.0),
        "fewer_bytes": Value(1 / ratios["bytes"], 0.0),
    }
    if gain := (report.get("timing") or {}).get("speedup"):
        # between a tenth and nine tenths of the rounds lie 2.56 standard deviations of one round
        values["speedup"] = Value(gain["median"], (gain["high"] - gain["low"]) / 2.56)
    return values


def _rows(report: dict[str, Any], folder: Path, net: str) -> list[float] | None:
    """Return which rows a model answered right; None if the metric is not their mean or some were not kept."""
    path, metric = folder / "answers.jsonl", report["metric"]  # which runs kept before 0.3
    if metric["name"] not in FRACTIONS or not path.is_file():
        return None
    right = [float(line[net] == line["given"]) for line in map(json.loads, path.read_text().splitlines())]
    same = len(right) == metric.get("rows") and abs(fsum(right) / len(right) - report[net]["metric"]) < 1e-6
    return right if same else None


def _error(entry: dict[str, Any]) -> float | None:
    ends = entry.get("interval")
    return standard_error((ends[0], ends[1])) if ends else None


def main() -> None:
    """Print a verdict on every claim."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.comparison.claims", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("out", type=Path, help="folder of a comparison")
    parser.add_argument("--claims", type=Path, default=FILE, help="YAML file (default: claims.yaml of this folder)")
    options = parser.parse_args()
    for entry in decided(options.out, options.claims):
        print(f"{entry['verdict']}: {entry['text']}\n  {entry['detail']}")


if __name__ == "__main__":
    main()
