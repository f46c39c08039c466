"""A fleet of one command whose actors are killed again and again: nothing that they recorded is lost."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from processes import PATIENCE, settings
from system_accounts import LIMITS, journal_rows

from serl_chunk.fleet import ray as ray_engine
from serl_chunk.fleet.engines import LEARNER
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.types import StepBlock

pytestmark = [pytest.mark.timeout(6 * PATIENCE), pytest.mark.slow]
# More updates than the run has, and none while actors are killed: this is about records.
ENDLESS = {"learner__max_steps": 1_000_000, "learner__warmup_episodes": 100_000, "learner__pretrain_steps": 0}
TOKENS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 3, "RAY_worker_niceness": "0",
          "RAY_USAGE_STATS_ENABLED": "0"}  # fmt: skip


@pytest.fixture(params=["local", "ray"])
def engine(request, monkeypatch):
    if request.param == "local":
        yield request.param
        return
    for name, value in TOKENS.items():
        monkeypatch.setenv(name, value)  # first: Ray reads them as it is imported
    ray = pytest.importorskip("ray", reason=ray_engine.HINT)
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield request.param
    ray.shutdown()


def child_of(run: Path, name: str) -> int:
    """The process of a job, 0 for none: by its run and its last argument."""
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            words = (proc / "cmdline").read_bytes().decode().split("\0")[:-1]
            state = (proc / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            continue
        last = "--learner" if name == LEARNER else name
        if "serl_chunk" in words and "fleet" not in words and str(run) in words and words[-1] == last and state != "Z":
            return int(proc.name)
    return 0


def test_nothing_is_lost_of_actors_that_are_killed(processes, environment, tmp_path, engine):
    run, spool, fleets = tmp_path / "run", tmp_path / "spool", tmp_path / "fleets"
    processes._environment = environment | (TOKENS if engine == "ray" else {})
    place = ("--fleet_path", str(fleets))
    started = processes.start(
        "fleet", "--engine", engine, "--actors", "2", "--learner", *place, "--", *processes.flags(**ENDLESS), "--debug",
        "--checkpoint_path", str(run), "--spool_path", str(spool),
    )  # fmt: skip

    def until(condition, otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            failed = time.monotonic() > deadline or (engine == "local" and not started.running)
            assert not failed, f"{otherwise}\n{started.output[-3000:]}"
            time.sleep(0.05)

    def episodes(name: str) -> int:
        rows = read_metrics(run)["episode"] if (run / "metrics.jsonl").exists() else []
        return sum(row["actor_id"] == name for row in rows)

    names, recorded = ("actor-1", "actor-2"), Counter[str]()
    until(lambda: all(episodes(name) for name in names), "no episodes of both actors")
    for _ in range(3):
        learner = child_of(run, LEARNER)
        os.kill(learner, signal.SIGSTOP)  # what is recorded meanwhile lies in the spools alone
        time.sleep(1.0)
        killed = {name: child_of(run, name) for name in names}
        for pid in killed.values():
            os.kill(pid, signal.SIGKILL)
        for name in names:
            [folder] = (spool / "fake_aloha" / name).glob("*/")
            copy = Spool(shutil.copytree(folder, tmp_path / f"copy_{name}_{killed[name]}"), LIMITS)
            recorded[copy.session] = copy.steps
            copy.close()
        os.kill(learner, signal.SIGCONT)
        until(lambda old=killed: all(child_of(run, n) not in (0, old[n]) for n in names), "no new children")
        before = {name: episodes(name) for name in names}
        until(lambda old=before: all(episodes(n) > old[n] + 1 for n in names), "no episodes of the new children")
    stopped = processes.start("fleet", "stop", *place, "--drain")
    assert "stopped" in stopped.ends()
    assert [child_of(run, name) for name in (*names, LEARNER)] == [0, 0, 0]
    delivered = Counter[str]()
    for row in journal_rows(run):
        delivered[row.session] += row.record.n if isinstance(row.record, StepBlock) else 0
    assert len(recorded) == 2
    lost = {session: (steps, delivered[session]) for session, steps in recorded.items() if delivered[session] < steps}
    assert lost == {}
    assert [folder for name in names for folder in (spool / "fake_aloha" / name).glob("*/")] == []
    assert "never arrived" not in (run / "learner.log").read_text()


def test_a_sweep_that_is_interrupted_twice_equals_one_that_is_not(processes, tmp_path):
    """Killed, then by Ctrl-C; the other one by submitit, where that is installed."""
    small = settings(learner__pretrain_steps=0, learner__checkpoint_period=50)
    words = (
        *("--exp_name", "fake_aloha", "--local", "--debug", "--demo_path", str(processes.demos), *small),
        *("--offline_steps", "300", "--online_steps", "0", "--eval_interval", "150", "--eval_episodes", "2"),
    )

    def sweep(folder: str, *engine: str):
        (tmp_path / folder).mkdir(exist_ok=True)
        own = ("sweep", "--seeds", "1-5", "--jobs", "2", "--out", "swept", *engine)
        return processes.start(*own, "--", *words, cwd=tmp_path / folder)

    def table(folder: str) -> tuple[str, object]:
        out = tmp_path / folder / "swept"
        processes.start("report", str(out)).ends()
        known = json.loads((out / "report.json").read_text())
        assert known["unfinished"] == []
        for figures in (*known["settings"].values(), *known["runs"].values()):
            del figures["wall time (s)"]
        return (out / "sweep.json").read_text(), known

    local = ("--engine", "slurm", "--slurm", "cluster=local") if importlib.util.find_spec("submitit") else ()
    out, at_work = tmp_path / "twice" / "swept", "of 5"
    for seed, number, status in ((2, signal.SIGKILL, -signal.SIGKILL), (4, signal.SIGINT, 130)):
        process = sweep("twice")
        begun = (out / f"seed={seed}" / "checkpoints" / "50").exists
        process.until(begun, f"seed {seed} was not begun", at_work=at_work)
        process.signal(number)
        process.ends(status)
    for process in (sweep("twice"), sweep("whole", *local)):
        process.until(lambda p=process: "5 finished of 5" in p.output, "it did not finish", at_work=at_work)
        process.ends()
    assert table("twice") == table("whole")
    for seed in range(1, 6):  # rates of so few episodes may be equal by chance
        one, other = (
            CheckpointStore(tmp_path / folder / "swept" / f"seed={seed}").restore_policy(300).params
            for folder in ("twice", "whole")
        )
        jax.tree.map(np.testing.assert_array_equal, one, other)
    resumed = [
        any("resumed" in str(row["text"]) for row in read_metrics(out / f"seed={s}")["event"]) for s in range(1, 6)
    ]
    assert any(resumed)
    assert not all(resumed)  # nothing runs twice
