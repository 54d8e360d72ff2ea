"""What all methods share."""

import shutil

import torch
from safetensors.torch import load_file, save_file

from lit_compress.methods import SVD
from lit_compress.stages.base import Training
from lit_compress.stages.distillation import Distillation


def test_a_new_head_depends_on_the_seed_alone(tiny_backbone, tmp_path):
    """Other processes have drawn other random numbers before."""
    backbone = shutil.copytree(tiny_backbone, tmp_path / "backbone")
    file = backbone / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if "classifier" not in n}, file, {"format": "pt"})
    heads = []
    for drawn, seed in ((0, 7), (3, 7), (0, 8)):
        torch.rand(drawn)
        method = SVD(backbone=str(backbone))
        method.prepare(method.stages()[0], seed, None, None)
        method.configure_model()
        heads.append(method.net.classifier.weight)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_a_run_may_log_no_step(fit, dense):
    method = SVD(backbone="unused", density=0.5, retrain=Training(epochs=1), distillation=Distillation(alpha=0.0))
    assert fit(method, "retrain", dense, log_every_n_steps=0, max_steps=2).trainer.global_step == 2
