"""`record --ip` with a real learner: each demonstration once in its partition `demo`, also after a kill of either."""

from __future__ import annotations

import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from processes import Cluster, Process, learner_totals

from serl_chunk.cli.process import load
from serl_chunk.data.demos import load_demos, short_digest
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.episodes import RunSource
from serl_chunk.runs.metrics import read_metrics

LEARNER = {"learner__max_steps": 100_000, "learner__warmup_episodes": 1}


def recording(c: Cluster, out: Path, n: int, cwd: Path) -> Process:
    """`record --policy scripted`, streaming to the learner of `c`."""
    return c.start(
        "record", *c.flags(**LEARNER), "--policy", "scripted", "--n_demos", str(n), "--out", str(out),
        "--ip", "127.0.0.1", cwd=cwd,
    )  # fmt: skip


def received(learner: Process) -> list[str]:
    return re.findall(r"demonstration received: (\S+),", learner.output)


def streamed(run: Path) -> Counter[str]:
    source = RunSource(run)
    entries = [source.about(key) for key in source.keys()]
    return Counter(e.end.episode_id for e in entries if e.demonstration)


@pytest.mark.slow
def test_each_demonstration_arrives_once_whoever_is_killed(processes, tmp_path):
    c, run, out, cwd = processes, tmp_path / "run", tmp_path / "streamed", tmp_path / "robot"
    spec = robot_spec(load("fake_aloha", []).robot)
    cwd.mkdir()
    # No learner yet: the files are written, and the command says what is missing.
    alone = recording(c, out, 2, cwd)
    text = alone.ends(1)
    assert "no learner answers" in text
    assert "the learner lacks 2 of those on disk" in text
    assert len(list(out.glob("*.hdf5"))) == 2

    learner = c.learner(run, **LEARNER)
    learner.says("listening on")
    recorder = recording(c, out, 40, cwd)
    learner.until(lambda: len(received(learner)) >= 4, "four demonstrations never came")
    recorder.kill()
    learner.kill()
    assert 4 <= len(list(out.glob("*.hdf5"))) < 40

    learner = c.learner(run, **LEARNER)
    learner.says("listening on")
    assert "streamed demonstrations put back" in learner.output
    n = len(list(out.glob("*.hdf5"))) + 2
    assert f"the learner has all {n}" in recording(c, out, n, cwd).ends()
    again = recording(c, out, n, cwd).ends()
    assert f"0 demonstrations streamed; the learner has all {n}" in again
    assert streamed(run) == Counter({name: 1 for name in streamed(run)})
    known = {short_digest(e) for e in load_demos([c.demos], spec).episodes}  # by --demo_path: these are not sent
    digests = [short_digest(e) for e in load_demos([out], spec).episodes]
    new = [d for d in digests if d not in known]
    assert 4 <= len(new) == len(streamed(run))

    actor = c.start(*c.flags(**LEARNER), "--actor", cwd=cwd)
    learner.until(lambda: len(read_metrics(run)["train"]) >= 3, "it never trained")
    row = read_metrics(run)["train"][-1]
    assert row["replay/demo_episodes"] == len(new) + len(known)
    actor.kill()
    learner.signal(signal.SIGINT)
    _, steps = learner_totals(learner.ends())
    source = RunSource(run)
    online = [e for e in map(source.about, source.keys()) if not e.demonstration]
    rows, events = read_metrics(run)["episode"], [row["text"] for row in read_metrics(run)["event"]]
    assert sum("demonstration received" in text for text in events) == len(new)
    assert 0 < len(rows) <= len(online)  # the one that was open at the kill is in neither
    assert 0 <= steps - sum(e.length for e in online) < 40  # of that one
    assert not any("demonstrations" in row["actor_id"] for row in rows)
