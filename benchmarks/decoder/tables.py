"""The table of a real decoder without training, from results/*.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp
from statistics import mean, median, stdev
from typing import Any

from benchmarks.common import load, origin, spread, table

STUDY, INTEGERS, SERVED = "decoder", "decoder/integers", "decoder/serve"
TITLE = "A real decoder: SmolLM2-135M"
ABOUT = (
    "SmolLM2-135M at 0.9 to 0.6 of the blocks' matrices, without and with training: perplexity on WikiText-2 and news."
)
NAMES = {
    "structures": "K-FAC heads and neurons, uniform",
    "free": "K-FAC heads and neurons, free",
    "nearest": "nearest Kronecker product, heads and neurons, uniform",
    "reduce": "K-FAC-reduce, heads and neurons, uniform",
    "even": "K-FAC heads and neurons, uniform, multiples of 32",
    "components": "K-FAC components",
    "inputs": "moments of the inputs (SVD-LLM's weighting)",
    "svd": "SVD",
    "llm_pruner": "LLM-Pruner",
    "slicegpt": "SliceGPT",
    "layers": "whole blocks, by measured loss",
    "sublayers": "attentions and feed-forward networks, by measured loss (of an earlier version)",
    "search": "one search over sub-layers, heads and neurons",
    "rounds": "whole blocks, removed and refined in three rounds",
}
REFINED_ON = {"no": "", "same texts": ", refined", "both kinds": ", refined on both kinds",
              "both kinds, distilled": ", refined on both kinds and distilled",
              "both kinds, distilled at 1": ", refined on both kinds and distilled at a temperature of 1"}  # fmt: skip  # cell -> end of a name
TEXTS = {"wikitext2": "WikiText-2", "news": "news"}
DISTILLED = 300  # steps of rows without another number
# points on each side of a mean in the picture, of every tenth step; points of distillations that are not in it
SMOOTHED, FEW = 5, 40
COLORS = ("#1f6fb4", "#c44e52", "#4a9b5b", "#8a63b5")
WRITTEN = "-written-"  # in the names of rows that read texts of the dense model
RUNTIMES = ("pytorch", "openvino", "llama.cpp")

HEAD = """## Perplexity right after `factorize`

SmolLM2-135M-Instruct. Its weights are 4-bit values made float, and every row starts from them. Dense: {dense}; the float32 file has
{dense_mb:.0f} MB.

- *Texts*: {texts} blocks of {tokens} tokens of WikiText-2's test split, and the first {tokens} tokens of {texts} articles of CNN/DailyMail's test split.
  WikiText-2 is read as people write: headings and sentences with `<unk>` are left out, and the spaces around marks are removed. So the
  perplexities differ from those of papers.
- *Calibration*: {calibrated} blocks of WikiText-2's validation split, read the same way. Whole blocks are chosen on 8 of them. LLM-Pruner reads 10
  and keeps the first four and the last two blocks whole, as in its paper.
- *more*: how much higher the perplexity is than the dense one, in %. Errors are standard errors over the texts. The errors of *more* are over
  the differences, text by text.
- *refined*: {steps}
- *seconds* of the processor with one thread, statistics included, which one process gathers for all densities. *GB* is the peak memory of
  that process, *MB* the float32 file.

Only finished rows are shown.
"""
REFINED = (
    "the blocks were trained for {steps} steps each without labels (`--refine {steps}`); the seconds are added. *same texts*: the calibration's."
    "\n  *both kinds*: 256 blocks, of the same split of WikiText-2 and of as many letters of CNN/DailyMail's validation split."
    "\n  *distilled*: then the whole model, on all texts of both kinds, two a step in bf16-mixed, at a temperature of 2 (`--distil 300 --distil_rate 1e-4 --model.distillation.temperature 2`)."
    "\n  *at 1*: at a temperature of 1, the default. *600 steps*: `--distil 600`. *outputs alone*: `--model.distillation.alpha_layers 0`."
    "\n  *more texts*: 4,662 paragraphs of SQuAD's training split and 995 articles in place of the 500 texts, so that none is read twice."
)
PROGRAMS = """## With integers

The same models as OpenVINO programs, on the same texts, with the bytes of the program. *int8*: a scale per row of the weights, `--dtype int8`. *int8 and activations*:
also the activations have 8 bits with fixed ranges, as with `--dtype int8` in version 0.2. *int4*: the weights of the matrices of the blocks, and 8 bits for the table.
A scale is for 32 or 64 weights. *Rounded* reads no texts, the others 32 blocks of the calibration. *asymmetric*: a zero for as many weights
as a scale. *mixed*: the most sensitive tenth of the blocks' weights has 8 bits. *seconds* of the processor with one thread, for the quantization
alone, and *GB*, the peak memory of its process. A dash: not measured.

**The dense weights were 4-bit values before**: in GGUF's Q4_1, 32 weights share a scale and a smallest value. This file has 98 MB and loses nothing.
So asymmetric 4 bits in groups of 32 can be nearly lossless for the dense model, and are lossless with a smallest value in float, as in GGUF. They are not
for other weights, as of every smaller model on this page, and of models that were stored in 16 bits. Rows of equal bytes are therefore unfair
to everything but the dense model.
"""
WAYS = {
    "activations": "int8 and activations",
    "int8": "int8",
    "round-64": "int4, 64, rounded",
    "round": "int4, 32, rounded",
    "round-asymmetric": "int4, 32, rounded, asymmetric",
    "scales": "int4, 32, scale estimation",
    "gptq": "int4, 32, GPTQ",
    "awq-scales": "int4, 32, AWQ and scale estimation",
    "awq-scales-gptq": "int4, 32, AWQ, scale estimation and GPTQ",
    "awq-scales-64": "int4, 64, AWQ and scale estimation",
    "awq-scales-asymmetric": "int4, 32, AWQ and scale estimation, asymmetric",
    "awq-scales-mixed": "int4, 32, AWQ and scale estimation, mixed",
    "awq-scales-trained": "int4, 32, AWQ and scale estimation, then trained by NNCF",
    "round-trained": "int4, 32, rounded while it is trained",
    "round-trained-states": "int4, 32, the same with hidden states",
}

SPEED = """## Tokens a second

The ordinary models as a server has them: PyTorch reads the export, OpenVINO what `optimum-cli export openvino` makes of it (with a cache),
llama.cpp what its converter `convert_hf_to_gguf.py` makes of it.

- A prompt of {prompt} tokens of WikiText-2, then {new} tokens, greedily, one text at a time. Tokens per second of one thread's processor time,
  median of {rounds} rounds in which all models of a runtime take turns. *times*: of the dense model in the same form and round, with the range.
- *same tokens*: how many of the first {new} tokens the same model also gives in PyTorch, before the first other one. A dash: that model was
  made again since.
- *MB*: the file of weights.
"""


def sections() -> Iterator[str]:
    """Yield the tables that have results."""
    found = {result["name"]: result for result in load(STUDY)}
    if dense := found.pop("dense", None):
        yield from _perplexities(found, dense)
    yield from _served(sorted(load(SERVED), key=lambda result: RUNTIMES.index(result["name"])))


def _perplexities(found: dict[str, dict[str, Any]], dense: dict[str, Any]) -> Iterator[str]:
    steps = {result["refined"]["steps"] for result in found.values() if "refined" in result}
    yield HEAD.format(
        dense=", ".join(f"{perplexity(dense['losses'][key])} on {name}" for key, name in TEXTS.items()),
        dense_mb=dense["bytes"] / 1e6, texts=len(dense["losses"]["news"]),
        tokens=dense["tokens"], calibrated=dense["calibrated"],
        steps=REFINED.format(steps=steps.pop()) if steps else "no row is.",
    )  # fmt: skip
    yield table(
        ["density", "method", "refined", *(f"{name}{what}" for name in TEXTS.values() for what in ("", ", more")),
         "seconds", "GB", "MB"],
        [_row(result, dense) for result in sorted(found.values(), key=_place)],
    )  # fmt: skip
    yield origin(dense, STUDY, dense["threads"])
    if small := load(INTEGERS):
        yield PROGRAMS
        rows = [(found.get(r["of"], dense), r) for r in sorted(small, key=lambda r: r["bytes"])]
        yield table(
            ["MB", "method", "density", "integers", *(f"{name}{what}" for name in TEXTS.values() for what in ("", ", more")),
             "seconds", "GB"],
            [[f"{r['bytes'] / 1e6:.1f}", NAMES.get(of["method"], "dense") + _ending(of), f"{of['target']:.1f}", WAYS[r["way"]],
              *_scores(r, dense), f"{r['seconds']:.0f}" if "seconds" in r else "-",
              f"{r['memory_mib'] / 1024:.1f}" if "memory_mib" in r else "-"] for of, r in rows],
        )  # fmt: skip
        yield origin(small[0], INTEGERS, small[0]["threads"])


def _served(served: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not served:
        return
    facts = served[0]
    rounds = len(next(iter(facts["models"].values()))["prompt"])
    yield SPEED.format(prompt=facts["prompt"], new=facts["new"], rounds=rounds)
    yield table(
        ["runtime", "form", "model", "MB", "prompt", "times", "generation", "times", "same tokens"],
        [row for result in served for row in _speeds(result, served)],
    )
    runtimes = ", ".join(f"{name} {version}" for result in served for name, version in result["runtime"].items())
    yield f"Versions: {runtimes}.\n"
    yield origin(facts, SERVED, facts["threads"])


def figures() -> Iterator[tuple[str, Any]]:
    """Yield the picture of the longest distillations: divergence from the dense model over tokens read."""
    from matplotlib.figure import Figure

    found = [result for result in load(STUDY) if len(result.get("distilled", {}).get("curve", ())) > FEW]
    if not found:
        return
    drawn = Figure(figsize=(6.0, 3.6), layout="constrained", dpi=100)
    axes = drawn.subplots()
    for made, color in zip(found, COLORS, strict=False):
        told = made["distilled"]
        curve, batch = told["curve"], told["batch"]
        near = [[value for _, value in curve[max(0, i - SMOOTHED) : i + SMOOTHED + 1]] for i in range(len(curve))]
        tokens = [step * batch * made["tokens"] / 1000 for step, _ in curve]
        texts = "500 texts, read twice" if told["file"] else "more texts, each read once"
        texts = "texts of the dense model" if WRITTEN in made["name"] else texts
        what = "whole blocks" if made["method"] == "layers" else "heads and neurons"
        axes.plot(tokens, [value for _, value in curve], color=color, alpha=0.2)
        axes.plot(tokens, [mean(values) for values in near], color=color, linewidth=2, label=f"{what}, {texts}")
    axes.set(xlabel="thousand tokens read", ylabel="divergence from dense, nats a token", title="SmolLM2-135M at 0.8")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    yield "distilled", drawn


def ordinary() -> str:
    """Return the rows of the models that are ordinary Llamas, for docs/how_to/compress_a_decoder.md."""
    found = {result["name"]: result for result in load(STUDY)}
    dense = found["dense"]
    rows = [["dense", *(perplexity(dense["losses"][key]) for key in TEXTS), "0", f"{dense['bytes'] / 1e6:.0f}"]]
    for result in sorted((each for each in found.values() if each["method"] == "even"), key=_place):
        scores = [perplexity(result["losses"][key]) for key in TEXTS]
        seconds = spent(result)
        label = f"density {result['target']}" + _ending(result)
        rows.append([label, *scores, f"{seconds / 60:.0f}", f"{result['bytes'] / 1e6:.0f}"])
    return table(["model", *TEXTS.values(), "minutes", "MB"], rows)


def llama_cpp() -> str:
    """Return the tokens a second in llama.cpp, for docs/how_to/ordinary_models.md."""
    served = sorted(load(SERVED), key=lambda result: RUNTIMES.index(result["name"]))
    rows = [
        [
            form,
            model.replace(NAMES["even"], "heads and neurons").replace(NAMES["layers"], "whole blocks"),
            size,
            speed,
            gain,
        ]
        for _, form, model, size, _, _, speed, gain, _ in _speeds(served[-1], served)
    ]
    return table(["form", "model, density", "MB", "tokens a second", "times"], rows)


def spent(result: dict[str, Any]) -> float:
    """Return the seconds of a row, what was trained afterwards included."""
    return float(sum(result.get(key, 0) for key in ("seconds", "refine_seconds", "distil_seconds")))


def perplexity(losses: Sequence[float]) -> str:
    """Return the perplexity of texts with its standard error.

    >>> perplexity([3.0, 3.2])
    '22.2 ± 2.2'
    """
    value = exp(mean(losses))
    return f"{value:.1f} ± {value * stdev(losses) / len(losses) ** 0.5:.1f}" if value < 1000 else f"{value:,.0f}"


def more(losses: Sequence[float], dense: Sequence[float]) -> str:
    """Return by how many % the perplexity is higher than the dense model's, with the standard error of that.

    >>> more([3.0, 3.2], [2.9, 3.0])
    '16.2 ± 5.8'
    """
    added = [own - other for own, other in zip(losses, dense, strict=True)]
    ratio = exp(mean(added))
    if ratio > 10:
        return "over 900"
    return f"{100 * (ratio - 1):.1f} ± {100 * ratio * stdev(added) / len(added) ** 0.5:.1f}"


def first_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens are equal before the first that is not.

    >>> first_equal([5, 6, 7], [5, 6, 8])
    2
    """
    return next((i for i, (own, other) in enumerate(zip(tokens, others, strict=True)) if own != other), len(tokens))


def _speeds(result: dict[str, Any], served: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    expected = {key.split("/")[0]: made["tokens"] for key, made in served[0]["models"].items()}  # PyTorch's
    counts = {"prompt": result["prompt"], "generation": result["new"]}
    for key, made in sorted(result["models"].items(), key=lambda item: item[0].partition("/")[2]):
        name, _, form = key.partition("/")
        dense = result["models"][f"dense/{form}"]
        cells = []
        for part, tokens in counts.items():
            times = [theirs / own for own, theirs in zip(made[part], dense[part], strict=True)]
            ratio = {"median": median(times), "min": min(times), "max": max(times)}
            cells += [f"{tokens / median(made[part]):.1f}", spread(ratio)]
        kind, _, density = name.partition("-")
        label = f"{NAMES[kind]}, {density}" if density else "dense"
        same = "-"
        if result["commit"] == served[0]["commit"]:  # the models are made anew for a later one
            same = str(first_equal(made["tokens"][: result["new"]], expected[name][: result["new"]]))
        yield [result["name"], form, label, f"{made['bytes'] / 1e6:.0f}", *cells, same]


def _ending(result: dict[str, Any]) -> str:
    """Return the end of a model's name."""
    cell = _texts(result)
    return REFINED_ON[_begins(cell)] + cell.removeprefix(_begins(cell))


def _begins(cell: str) -> str:
    return max((begin for begin in REFINED_ON if cell.startswith(begin)), key=len)


def _place(result: dict[str, Any]) -> tuple[float, int, int, int]:
    cell = _texts(result)
    return -result["target"], list(NAMES).index(result["method"]), list(REFINED_ON).index(_begins(cell)), len(cell)


def _texts(result: dict[str, Any]) -> str:
    """Return on which texts a model was refined."""
    if "refined" not in result:
        return "no"
    on = "both kinds" if result.get("mixed") else "same texts"
    if "distilled" not in result:
        return on
    told = result["distilled"]
    longer = "" if told["steps"] == DISTILLED else f", {told['steps']} steps"
    longer += ", outputs alone" * (told.get("alpha_layers") == 0)
    if told.get("file", "") is None:
        longer += ", texts of the dense model" if WRITTEN in result["name"] else ", more texts"
    return f"{on}, distilled" + " at 1" * (told.get("temperature", 2) == 1) + longer


def _row(result: dict[str, Any], dense: dict[str, Any]) -> list[str]:
    return [
        f"{result['file_density']:.2f}", NAMES[result["method"]], _texts(result), *_scores(result, dense),
        f"{spent(result):,.0f}", f"{result['memory_mib'] / 1024:.1f}", f"{result['bytes'] / 1e6:.0f}",
    ]  # fmt: skip


def _scores(result: dict[str, Any], dense: dict[str, Any]) -> list[str]:
    own, theirs = result["losses"], dense["losses"]
    return [text for key in TEXTS for text in (perplexity(own[key]), more(own[key], theirs[key]))]
