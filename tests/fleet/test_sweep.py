"""Sweeps: the commands in a manifest, their order under interruptions, and statistics over seeds."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from fleet_programs import FOREVER, job
from hypothesis import given
from hypothesis import strategies as st
from metric_logs import add_evaluation, open_log
from transport_tools import eventually

from serl_chunk.cli import sweep as command
from serl_chunk.cli.commands import Parser
from serl_chunk.cli.training import training_parser
from serl_chunk.fleet import engines
from serl_chunk.fleet.engines import Job, JobStatus
from serl_chunk.fleet.sweep import LocalJobs, Scheduler
from serl_chunk.main import main
from serl_chunk.runs.metrics import Counters
from serl_chunk.runs.report.sweep import band, spread
from serl_chunk.runs.sweep import SWEEP, Sweep, SweepRun, has_finished, read_sweep

FAKE = ("--exp_name", "fake_aloha", "--debug")


def planned(*words: str, out: str = "swept", own: tuple[str, ...] = ()) -> Sweep:
    parser = Parser()
    command.sweep_flags(parser)
    flags = parser.parse_args(["--seeds", "1-2,7", "--out", out, *own])
    flags.words = [*FAKE, *words]
    return command.plan_of(flags)


def test_the_manifest_has_an_ordinary_command_of_each_run(tmp_path):
    grid = ("--grid", "agent.lr=1e-4,3e-4", "--grid", "agent.flow.hidden=[8,8],[16]")
    sweep = planned("--local", "--utd_ratio", "0.5", own=grid[:2])
    assert list(sweep.runs)[:4] == [*(f"agent.lr=1e-4,seed={seed}" for seed in (1, 2, 7)), "agent.lr=3e-4,seed=1"]
    assert {name: len(runs) for name, runs in sweep.settings.items()} == {"agent.lr=1e-4": 3, "agent.lr=3e-4": 3}
    run = sweep.runs["agent.lr=3e-4,seed=7"]
    assert run.command == (
        "serl-chunk --exp_name fake_aloha --debug --local --utd_ratio 0.5 --config.agent.lr=3e-4 --seed 7 "
        "--checkpoint_path swept/agent.lr=3e-4,seed=7"
    )
    flags, rest = training_parser().parse_known_args(list(run.arguments))
    assert (flags.local, flags.seed, rest) == (True, 7, ["--config.agent.lr=3e-4"])
    both = planned("--learner", "--actor", "--port", "7000")
    words = [shlex.split(run.command) for run in both.runs.values()]
    assert list(both.runs) == ["seed=1", "seed=2", "seed=7"]
    assert [w[w.index("--port", w.index("--seed")) + 1] for w in words] == ["7000", "7001", "7002"]
    assert len({w[-1] for w in words}) == 3  # spools
    sweep.write(tmp_path)
    assert read_sweep(tmp_path) == sweep
    sweep.write(tmp_path)  # again


class World:
    """What outlives a scheduler: progress of jobs in their folders, and on a cluster the jobs themselves."""

    def __init__(self, lengths: list[int], failing: set[str], cluster: bool) -> None:
        self.length = {f"j{i}": n for i, n in enumerate(lengths)}
        self.done, self.failing, self.cluster = dict.fromkeys(self.length, 0), failing, cluster
        self.alive: dict[str, JobStatus] = {}
        self.most = 0

    def start(self, jobs: list[Job]) -> int:
        for each in jobs:
            assert each.name not in self.alive, "it runs twice"
            assert not self.finished(each.name), "it is finished"
            self.alive[each.name] = JobStatus(each.name, "running")
        self.most = max(self.most, sum(not s.ended for s in self.alive.values()))
        return 0

    def tick(self) -> None:
        for name, status in self.alive.items():
            if status.ended:
                continue
            self.done[name] += 1
            if name in self.failing:
                self.alive[name] = status._replace(state="failed", detail="status 1", lines=("why",))
            elif self.finished(name):
                self.alive[name] = status._replace(state="done")

    def finished(self, name: str) -> bool:
        return self.done[name] >= self.length[name] and name not in self.failing

    def status(self) -> list[JobStatus]:
        return list(self.alive.values())

    def stop(self, names: list[str], *, drain: bool) -> None:
        self.alive.update((name, self.alive[name]._replace(state="stopped")) for name in names)

    def close(self) -> None:
        self.alive = {name: status for name, status in self.alive.items() if not status.ended}

    def kill(self) -> None:
        """The scheduler is gone, and here all that it ran."""
        if not self.cluster:
            self.alive = {}


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6), at_once=st.integers(1, 3), cluster=st.booleans(),
    failing=st.sets(st.sampled_from([f"j{i}" for i in range(6)]), max_size=2),
    interruptions=st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 4)), max_size=3),
)  # fmt: skip
def test_interrupted_as_often_as_you_like_each_run_is_made_once(lengths, at_once, cluster, failing, interruptions):
    world, lines = World(lengths, failing, cluster), []
    busy = {"j0"}  # held by another process for a while

    def scheduler() -> Scheduler:
        jobs = [Job(name, ()) for name in world.length]
        return Scheduler(jobs, lambda _: world, at_once=at_once, finished=world.finished,
                         busy=busy.__contains__, show=lines.append)  # fmt: skip

    for steps, killed, between in interruptions:
        first = scheduler()
        for _ in range(steps):
            first.step()
            world.tick()
        if killed:
            world.kill()
        else:
            first.stop()
            while first.step():
                world.tick()
            assert not any(not s.ended for s in world.alive.values())
        for _ in range(between):
            world.tick()
    last = scheduler()
    for _ in range(100):
        if not last.step():
            break
        assert len(last.progress()) >= 1
        world.tick()
        busy.clear()
    assert not last.running
    assert set(last.finished) == world.length.keys() - failing
    assert set(last.failed) == world.length.keys() & failing
    assert world.most <= at_once
    assert all(world.done[name] == n for name, n in world.length.items() if name not in failing)  # nothing twice
    assert all(any(f"{name}: failed (status 1)\n  | why" in line for line in lines) for name in last.failed)


@pytest.mark.system
def test_on_this_machine_a_failure_ends_no_other_job(monkeypatch):
    monkeypatch.setattr(engines, "BACK_OFF", 0.01)
    monkeypatch.setattr(engines, "POLL_S", 0.01)
    local, shown = LocalJobs(), []
    jobs = [job("raise SystemExit(2)", "a"), job("pass", "b"), job(FOREVER, "c"), job("pass", "d")]
    finished = {"b"}
    scheduler = Scheduler(jobs, lambda _: local, at_once=2, finished=lambda name: name in finished,
                          busy=lambda _: False, show=shown.append)  # fmt: skip
    eventually(lambda: scheduler.step() and scheduler.failed == ["a", "d"], 60)  # d ended, and its run is not whole
    assert list(scheduler.running) == ["c"]
    eventually(lambda: scheduler.step() and "ready" in scheduler.progress()[-1], 60)
    scheduler.stop()
    eventually(lambda: not scheduler.step(), 60)
    assert (scheduler.finished, scheduler.waiting) == (["b"], ["c"])
    assert [line for line in shown if "failed" in line] == [
        "a: failed (status 2 after 0 restarts)", "d: failed (it ended before its last update)",
    ]  # fmt: skip


def test_the_spread_is_of_the_middle_of_the_runs():
    values = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [3.0, 1.0], [100.0, 1.0]])
    mean, low, high = spread(values)
    np.testing.assert_allclose(mean, [2.0, 1.0])
    assert low[0] < 2.0 < high[0]
    assert (low[1], high[1]) == (1.0, 1.0)
    assert np.isnan(spread(values[:1]).low).all()
    x, of = band([(np.array([0.0, 10.0]), np.array([0.0, 10.0])), (np.array([2.0, 6.0]), np.array([np.nan, 6.0]))])
    np.testing.assert_allclose((x, of.mean), ([6.0], [6.0]))  # where both reach
    assert [len(part) for part in band([(np.empty(0), np.empty(0))] * 2)[1]] == [0, 0, 0]


@pytest.mark.compiles
def test_a_report_is_of_the_finished_runs_and_names_the_others(tmp_path, capsys):
    names = [f"lr={lr},seed={seed}" for lr in ("1", "2") for seed in (1, 2, 3)]
    runs = {name: SweepRun(name.partition(",")[0], int(name[-1]), f"serl-chunk --seed {name[-1]}") for name in names}
    Sweep([1, 2, 3], {"lr": ["1", "2"]}, [], runs).write(tmp_path)
    assert main(["report", str(tmp_path)]) == 0  # before the first
    for i, name in enumerate(names[:-1]):
        with open_log(tmp_path / name) as log:
            for step in (0, 300):
                add_evaluation(log, Counters(step, 0, 0), success_rate=step / 1000 * (i % 3))
            log.event("phase: done", Counters(300, 0, 0))
        assert not has_finished(tmp_path / name)  # its last checkpoint is not there
        (tmp_path / name / "checkpoints" / "300").mkdir(parents=True)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "report.html")
    known = json.loads((tmp_path / "report.json").read_text())
    assert known["unfinished"] == ["lr=2,seed=3"]
    first = known["settings"]["lr=1"]
    assert first["Evaluations"][0] == pytest.approx(0.3)
    assert first["updates"] == [300, 300, 300]
    page = Path(tmp_path / "report.html").read_text()
    for text in ("1 run not finished", "3 of 3", "2 of 3", "30.0% [", "serl-chunk --seed 3", 'id="Evaluations"'):
        assert text in page, text
    assert (tmp_path / SWEEP).exists()
