"""``export --push_to_hub`` against a mock of the hub's interface: uploaded, or one line and the export stays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lit_compress.export import hub
from lit_compress.utils.errors import UserError


class Api:
    """What is called of HfApi."""

    def __init__(self, calls, error=None):
        self.calls, self.error = calls, error

    def create_repo(self, repo_id, **options):
        self.calls.append(("create_repo", repo_id, options))
        if self.error:
            raise self.error
        return type("Url", (str,), {"repo_id": f"me/{repo_id}"})(f"https://huggingface.co/me/{repo_id}")

    def upload_folder(self, **options):
        self.calls.append(("upload_folder", options))


def test_a_folder_is_uploaded_under_the_name_that_the_hub_gives(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(hub, "HfApi", lambda: Api(calls))
    assert hub.push(tmp_path, "small", private=True) == "https://huggingface.co/me/small"
    assert calls[0] == ("create_repo", "small", {"private": True, "exist_ok": True})
    assert calls[1][1]["repo_id"] == "me/small" and calls[1][1]["folder_path"] == tmp_path


@pytest.mark.parametrize("error", [OSError("no route to host\nand more"), ValueError("Invalid token"), RuntimeError()])
def test_what_the_hub_refuses_is_one_line(tmp_path, monkeypatch, error):
    monkeypatch.setattr(hub, "HfApi", lambda: Api([], error))
    with pytest.raises(
        UserError, match=rf"cannot upload to 'me/small' \({type(error).__name__}.*the export is in"
    ) as e:
        hub.push(tmp_path, "me/small")
    assert "\n" not in str(e.value) and "and more" not in str(e.value)


def test_without_a_network_it_is_one_line(tmp_path):
    """The library itself, offline as all tests are."""
    with pytest.raises(UserError, match="cannot upload to 'me/small'"):
        hub.push(tmp_path, "me/small")


@pytest.mark.parametrize(("name", "near"), [("me/small model", "me/small-model"), ("a/b/c", "b/c"), ("-x", "x")])
def test_a_name_that_cannot_be_is_refused_before_the_work(name, near):
    with pytest.raises(UserError, match=rf"'{name}' is no name of a repository; e.g. {near}$"):
        hub.check_repository(name)


def test_the_command_keeps_the_export(tmp_path, monkeypatch, capsys):
    from mistakes import fails

    from lit_compress.cli import commands

    out, report = tmp_path / "out", {"compressed": {"density": 0.5}, "export_difference": 0.0}
    parts = SimpleNamespace(build=lambda: SimpleNamespace(method=None, data=None))
    monkeypatch.setattr(commands, "Run", lambda folder: SimpleNamespace(config=lambda: {"export": {}}))
    monkeypatch.setattr(commands, "parse_stored", lambda *_: parts)
    monkeypatch.setattr(commands, "export_run", lambda run, out, *_: out.mkdir() or report)
    monkeypatch.setattr(commands, "print_choices", lambda report: None)
    monkeypatch.setattr(hub, "HfApi", lambda: Api([], OSError("no network")))
    line = fails(capsys, "export", "run", out, "--push_to_hub", "me/small")
    assert "push_to_hub: cannot upload to 'me/small' (OSError: no network)" in line and out.is_dir()
    assert "no name of a repository" in fails(capsys, "export", "run", out, "--push_to_hub", "me/ü")
    monkeypatch.setattr(hub, "HfApi", lambda: Api([]))
    commands.export(["run", str(tmp_path / "again"), "--push_to_hub", "small"])
    assert "pushed: https://huggingface.co/me/small" in capsys.readouterr().out
