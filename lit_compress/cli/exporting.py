"""The options that `export` and `factorize` share, and what they print of them."""

from __future__ import annotations

import argparse
from typing import Any

from lit_compress.export.choices import Choices
from lit_compress.export.report import pivot_line


def add_choices(parser: argparse.ArgumentParser, programs: bool = True) -> None:
    """Add the options that :func:`choices_of` reads; ``programs``: also those of nets that are exported from a run."""
    if programs:
        parser.add_argument(
            "--format", choices=("hf", "onnx", "torch", "openvino"), default="hf",
            help="also write model.onnx, model.pt2 or openvino_model.xml, which run without transformers "
            "(default hf: none of them)",
        )  # fmt: skip
        parser.add_argument(
            "--round_to", type=int, metavar="N",
            help="SP3: pad widths with zeros to multiples of N; 8 is faster in PyTorch with many tokens "
            "(default: none)",
        )  # fmt: skip
    parser.add_argument(
        "--pivot", action="store_true",
        help="store low-rank matrices in pivot form: the same outputs, k * k parameters fewer at rank k "
        "(default: factors)",
    )  # fmt: skip
    parser.add_argument(
        "--vocabulary", choices=("all", "data"), default="all",
        help="data: keep the pieces that the training data and unknown words need, and export the small tokenizer "
        "(default all)",
    )  # fmt: skip
    parser.add_argument(
        "--embeddings", metavar="FORM",
        help="rank=64 (any number): store the table of token embeddings as two factors, weighted by how often the "
        "tokens occur; int8: as 8-bit integers with one scale per row (default: as it is)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16", *(["int8"] if programs else [])), default="float32",
        help="of the weights in the file, in which the metric is measured"
        + ("; int8, with --format onnx: of weights and activations of the program" if programs else "")
        + " (default float32)",
    )  # fmt: skip


def choices_of(given: argparse.Namespace) -> Choices:
    """Return what the options say.

    Raises:
        UserError: it cannot be done.
    """
    choices = Choices(
        form=getattr(given, "format", "hf"),
        round_to=getattr(given, "round_to", None),
        vocabulary=given.vocabulary,
        embeddings=given.embeddings,
        dtype=given.dtype,
        pivot=given.pivot,
    )
    choices.check()
    return choices


def print_choices(report: dict[str, Any]) -> None:
    """Print one line for everything that was chosen beside the folder itself."""
    if report["pivot"] is not None:
        print(pivot_line(report))
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
