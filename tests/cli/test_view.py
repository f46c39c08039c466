"""`serl-chunk view`: the address it prints, how it ends, the files it writes, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest
import viewed
from errors import naming
from journal_runs import Run
from processes import Process
from viewed import Browser

from serl_chunk.main import main
from serl_chunk.runs.episodes import RunSource


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Path:
    return viewed.hdf5_folder(tmp_path_factory.mktemp("view") / "demos")


def refused(arguments: list, capsys, *named: object) -> None:
    assert main(["view", *map(str, arguments)]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.match(naming(*named), captured.err), captured.err
    assert "Traceback" not in captured.err


@pytest.mark.system
def test_it_serves_until_ctrl_c(tmp_path):
    folder = viewed.run_folder(tmp_path / "run")
    process = Process(["view", str(folder)], tmp_path / "log", os.environ)
    try:
        process.says("Ctrl-C")
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", process.output)
        browser = Browser(url)
        assert len(browser.rows()) == 4
        assert browser.label(0, "failure").status == 200
        process.signal(signal.SIGINT)
        process.ends(0)
        assert "Traceback" not in process.output
    finally:
        process.close()
    assert RunSource(folder).about("a/e0").outcome == "failure"


def test_the_page_and_the_figures_of_chosen_episodes(demos, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["view", str(demos), "--out", str(out), "--episodes", "1-2", "--size_mb", "2"]) == 0
    assert str(out) in capsys.readouterr().out
    assert 10_000 < out.stat().st_size < 2e6
    refused([demos, "--out", out], capsys, "--out", out)


def test_an_episode_for_foxglove(demos, tmp_path, capsys):
    pytest.importorskip("mcap")
    out = tmp_path / "e.mcap"
    assert main(["view", str(demos), "--mcap", str(out), "--episodes", "3"]) == 0
    assert out.read_bytes().startswith(b"\x89MCAP")
    assert str(out) in capsys.readouterr().out
    refused([demos, "--mcap", tmp_path / "f.mcap"], capsys, "--episodes", 4)
    refused([demos, "--mcap", tmp_path / "f.mcap", "--episodes", "0,1"], capsys, "--episodes", 2)


def test_a_port_in_use_is_named(demos, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused([demos, "--port", port], capsys, "--port", port)
    refused([demos, "--port", 70000], capsys, "--port", 70000)


def test_paths_without_episodes_are_named(demos, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("no data")
    refused([tmp_path / "absent"], capsys, tmp_path / "absent")
    refused([tmp_path / "empty"], capsys, tmp_path / "empty")
    refused([tmp_path / "file.txt"], capsys, tmp_path / "file.txt")
    Run(tmp_path / "run")
    (tmp_path / "run" / "run.lock").touch()
    refused([tmp_path / "run"], capsys, tmp_path / "run", "journal")
    with Run(tmp_path / "fresh").opened():
        pass
    refused([tmp_path / "fresh"], capsys, tmp_path / "fresh")


def test_damaged_labels_are_named_before_anything_is_served(tmp_path, capsys):
    folder = viewed.hdf5_folder(tmp_path / "demos")
    (folder / "labels.json").write_text("{")
    refused([folder], capsys, folder / "labels.json")


def test_flags_that_do_not_go_together(demos, tmp_path, capsys):
    refused([demos, "--out", tmp_path / "a", "--mcap", tmp_path / "b"], capsys, "--out", "--mcap")
    refused([demos, "--size_mb", "3"], capsys, "--size_mb")
    refused([demos, "--episodes", "3"], capsys, "--episodes")
    refused([demos, "--out", tmp_path / "a", "--size_mb", "0"], capsys, "--size_mb", 0)
    refused([demos, "--out", tmp_path / "a", "--size_mb", "0.01"], capsys, "--size_mb", 0.01)
    refused([demos, "--out", tmp_path / "a", "--episodes", "7"], capsys, "--episodes", 7)
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit):
        main(["view", "--help"])
    out = capsys.readouterr().out
    assert all(flag in out for flag in ("--port", "--out", "--size_mb", "--mcap", "--episodes", "--cameras"))
