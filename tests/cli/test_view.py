"""`serl-chunk view`: the address it prints, how it ends, the files it writes, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import viewed
from errors import naming
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
