"""The options that `export` and `factorize` share, and what they print of them."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from lit_compress.export.choices import Choices
from lit_compress.export.report import pivot_line


def add_choices(parser: argparse.ArgumentParser, programs: bool = True) -> None:
    """Add the options that :func:`typed_choices` reads; ``programs``: also those of nets that a run exports."""
    kept = "; default: as the run was made" if programs else ""
    if programs:
        parser.add_argument(
            "--format", choices=("hf", "onnx", "torch", "openvino"),
            help="also write model.onnx, model.pt2 or openvino_model.xml, which run without transformers (hf: none)",
        )  # fmt: skip
        parser.add_argument(
            "--round_to", type=int, metavar="N",
            help="SP3, SliceGPT: pad widths with zeros to multiples of N; 8 is faster in PyTorch with many tokens",
        )  # fmt: skip
    parser.add_argument(
        "--pivot", action=argparse.BooleanOptionalAction,
        help=f"store low-rank matrices in pivot form: the same outputs, k * k parameters fewer at rank k{kept}",
    )  # fmt: skip
    parser.add_argument(
        "--merge", choices=("large", "slower", "never"),
        help="slower: store a matrix dense where its factors are slower on this machine (measured once, one thread, "
        "one text of the task's length); never: keep all factors and rows; large: a matrix with rows of which "
        f"more than 70 %% is left is stored dense{kept}",
    )  # fmt: skip
    parser.add_argument(
        "--vocabulary", choices=("all", "data"),
        help="data: keep the pieces that the training data and unknown words need, and export the small tokenizer"
        + kept,
    )  # fmt: skip
    parser.add_argument(
        "--embeddings", metavar="FORM",
        help="rank=64 (any number): store the table of token embeddings as two factors, weighted by how often the "
        f"tokens occur; int8: as 8-bit integers with one scale per row; none: as it is{kept}",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16", *(["int8"] if programs else [])),
        help="of the weights in the file, in which the metric is measured"
        + ("; int8, with --format onnx: of weights and activations of the program" if programs else "")
        + kept,
    )  # fmt: skip


def typed_choices(given: argparse.Namespace) -> dict[str, Any]:
    """Return the choices among the options that were typed."""
    values = {field.name: getattr(given, field.name, None) for field in fields(Choices)}
    return {name: value for name, value in values.items() if value is not None}


def print_choices(report: dict[str, Any]) -> None:
    """Print one line for everything that was chosen beside the folder itself."""
    if report["pivot"] is not None:
        print(pivot_line(report))
    if (found := report["merged"])["by"] == "slower":
        print(
            f"merge: {len(found['matrices'])} of {found['sites']} matrices are stored dense, as factors and rows they "
            "are slower on this machine"
        )
    if words := report["vocabulary"]:
        print(
            f"vocabulary: {words['rows']:,} of {words['of']:,} pieces are left; {words['changed']:,} of "
            f"{words['inputs']:,} training inputs have other pieces now"
        )
    if table := report["embeddings"]:
        print(
            f"embeddings: {table['form']}, {table['bytes']:,} of {table['of']:,} bytes; off by {table['error']:.1%} of "
            "the norm"
        )
    if made := report.get("program"):
        if "dtype" in made:
            name = report["metric"]["name"]
            print(f"{made['file']}: int8, {made['bytes']:,} bytes, dev {name} {made['metric']:.4f}")
        else:
            print(f"{made['file']}: its logits differ by {made['difference']:.1e}")
        if wrote := made.get("writing"):
            print(f"write.py: with the cache of {wrote['files'][2]}, {wrote['tokens']} tokens as the net writes them")
    for item in report["certificate"]:
        found, shapes = item["difference"], " and ".join(f"{texts} x {tokens}" for texts, tokens in item["shapes"])
        off = "cannot be compared" if found is None else f"differs by {found:.1e}, {item['verdict']}"
        print(f"on {shapes} tokens of the data, {item['file']} {off}")
