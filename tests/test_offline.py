"""Nothing reaches another machine: no test, no process of one, and no command on local data, also where it could."""

import os
import socket
import subprocess
import sys

import datasets
import huggingface_hub.constants
import offline
import pytest

from lit_compress.__main__ import main

_TRY = "import socket; socket.create_connection(('203.0.113.1', 80), 1)"


@pytest.mark.parametrize("host", ["huggingface.co", "203.0.113.1", b"huggingface.co"])
def test_other_machines_are_refused_here(host, monkeypatch):
    monkeypatch.setattr(offline, "ASKED", [])
    with pytest.raises(OSError, match="tests use no network"):
        socket.getaddrinfo(host, 443)
    with socket.socket() as tried, pytest.raises(OSError, match="tests use no network"):
        tried.connect((host, 443))
    assert len(offline.ASKED) == 2


def test_other_machines_are_refused_in_processes():
    done = subprocess.run([sys.executable, "-c", _TRY], capture_output=True, text=True, env=dict(os.environ))
    assert "tests use no network" in done.stderr


@pytest.fixture
def online(monkeypatch):
    """The libraries believe that there is a network; return the machines that they ask for."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(offline, "ASKED", [])
    return offline.ASKED


def test_no_command_on_local_data_asks_for_another_machine(short_run, tmp_path, online, tiny_data):
    run, dense, data = str(tmp_path / "run"), str(tmp_path / "run/dense/net"), ["--data.path", str(tiny_data)]
    for words in (
        ["fit", "--model", "SVD", *short_run, "--model.retrain.epochs", "1", "--run_dir", run],
        ["validate", dense, "--data.task", "sst2", *data],
        ["predict", run],
        ["factorize", dense, str(tmp_path / "one_shot"), "--data.task", "sst2", *data, "--density", "0.5"],
    ):
        try:
            main(words)
        except SystemExit as stop:
            assert not stop.code, words
    assert not online


def test_a_hub_name_does_ask(online, capsys, short_run, monkeypatch):
    """So that the test above would notice."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub waits between five tries
    with pytest.raises(SystemExit):
        main(["fit", "--model", "SVD", *short_run, "--model.backbone", "nobody/nothing"])
    assert "cannot load" in capsys.readouterr().err and online
