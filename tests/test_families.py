"""Families in whole runs of every form of training: the budget is met in the file."""

import json
import re
from functools import cache

import pytest
import torch
from contract_cases import options
from safetensors.torch import load_file
from tiny import write_bert

from lit_compress import methods
from lit_compress.__main__ import main
from lit_compress.models.accounting import counted_weights
from lit_compress.models.storage import load_net

DENSITY = {("SP3", "modernbert"): 0.7, ("SecondOrder", "albert"): 0.7}  # with neurons alone
# families by methods of which no two train alike
PAIRS = [
    *(("modernbert", method) for method in ("CoFi", "LPAF", "SP3")),
    *(("qwen3", method) for method in ("LoSparse", "SP3")),
    ("gpt2", "CoFi"), ("gpt_neox", "CoFiLoSparse"), ("mpnet", "SP3"), ("mpnet", "BlockMovement"),
    *(("t5", method) for method in ("CoFi", "BlockMovement", "FLOP", "SecondOrder")), ("albert", "SecondOrder"),
]  # fmt: skip


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """Return the folder with a tiny net of a family, which is built once, and a tokenizer, whose padding is 0."""

    @cache
    def build(family):
        ends = {"eos_token_id": 3, "decoder_start_token_id": 0} if family == "t5" else {}
        return write_bert(tmp_path_factory.mktemp(family), family=family, pad_token_id=0, **ends)

    return build


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_a_run_meets_its_budget_in_the_file(family, method, backbone, short_run, tmp_path):
    density, run = DENSITY.get((method, family), 0.5), tmp_path / "run"
    words = ["fit", *options(method, short_run, density=density), "--model.backbone", str(backbone(family)),
             "--run_dir", str(run)]  # fmt: skip
    words += ["--model.prune.tokens", "200"] if method == "SP3" else []
    words += ["--model.distil.epochs", "1"] if method.startswith("CoFi") else []
    words += ["--model.distillation.alpha_layers", "0"] if method.startswith("CoFi") and family == "t5" else []
    words += ["--model.retrain.removes", "structures"] if method == "SecondOrder" else []
    words += ["--model.shape", "uniform"] if family == "albert" else []  # one block for all
    main(words)
    report = json.loads((run / "report.json").read_text())
    found, net = report["compressed"], load_net(run / "export")
    assert 0.94 * density < found["stored"] <= density  # LPAF's ranks are one share of each matrix's
    assert found["density"] <= found["stored"]  # a gated neuron that was pruned whole never learns
    zeros = getattr(methods, method)(task="sst2", backbone="unused").stores_zeros
    file = load_file(run / "export" / "model.safetensors")
    sites = [
        v for name, v in file.items() if re.search(r"\.(layers?|h|albert_layers)\.(?!.*relative)", name) and v.ndim > 1
    ]
    counted = sum(int(torch.count_nonzero(v)) if zeros else v.numel() for v in sites)
    assert counted == round(found["density" if zeros else "stored"] * report["dense"]["params"]["sites"])
    assert zeros or counted == sum(weight.numel() for weight in counted_weights(net))
