"""Engines of clusters, where their libraries are installed: submitit's local executor, Ray on this machine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from fleet_programs import FOREVER, job
from transport_tools import eventually

from serl_chunk.fleet import ray as ray_engine
from serl_chunk.fleet import slurm
from serl_chunk.fleet.engines import LEARNER
from serl_chunk.fleet.ray import RayEngine
from serl_chunk.fleet.slurm import SlurmEngine
from serl_chunk.types import ConfigError

pytestmark = pytest.mark.system


@pytest.mark.parametrize("library", ["ray", "submitit"])
def test_without_its_library_an_engine_names_what_to_install(tmp_path, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    extra = {"ray": "ray", "submitit": "slurm"}[library]
    with pytest.raises(ConfigError, match=rf"serl-chunk\[{extra}\]"):
        RayEngine("f", open_cluster=True) if library == "ray" else SlurmEngine(tmp_path)


def test_a_ray_cluster_without_tokens_is_accepted_on_request_alone(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match=r"outward address.*RAY_AUTH_MODE=token.*--open_cluster"):
        RayEngine("f")


def test_submitit_runs_and_ends_a_fleet(tmp_path):
    pytest.importorskip("submitit", reason=slurm.HINT)
    engine = SlurmEngine(tmp_path, parameters={"cluster": "local"})
    assert engine.start([job(FOREVER, LEARNER), job(FOREVER, "sim-1"), job("raise SystemExit(2)", "sim-2")]) == 0
    other = SlurmEngine(tmp_path, parameters={"cluster": "local"})  # of another process
    eventually(lambda: [s.state for s in other.status()] == ["running", "failed", "running"], 60)
    other.stop(["sim-1"], drain=True)
    other.stop([LEARNER], drain=False)
    eventually(lambda: all(s.ended for s in other.status()), 60)
    assert (tmp_path / slurm.IDS).read_text().count("sim-") == 2
    assert [(s.name, s.state, s.statuses) for s in other.status()] == [
        ("sim-1", "stopped", (0,)), ("sim-2", "failed", (2,)), (LEARNER, "stopped", (143,)),
    ]  # fmt: skip


def test_a_job_whose_time_is_up_is_ended_and_queued_again(tmp_path):
    pytest.importorskip("submitit", reason=slurm.HINT)
    files = slurm.JobFiles(tmp_path)
    files.begin(["sim-1"])
    called = slurm.SlurmJob(files)
    called._worker = slurm.Worker(job(FOREVER))
    eventually(lambda: called._worker.status().lines == ("ready",))
    again = called.checkpoint(job(FOREVER))
    assert called._worker.status().state == "stopped"
    assert (again.function._files, again.args) == (files, (job(FOREVER),))
    assert [(s.state, s.detail) for s in files.status()] == [("waiting", "queued again: its time was up")]
    files.request(["sim-1"], drain=False)
    assert called.checkpoint(job(FOREVER)) is None
    assert called(job(FOREVER)) == "stopped"  # where it was queued before the request
    assert [(s.state, s.statuses) for s in files.status()] == [("stopped", ())]


def test_a_fleet_whose_actors_are_refused_leaves_no_learner(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit", reason=slurm.HINT)
    accept, cancelled = submitit.AutoExecutor.map_array, []

    def submit(self, function, jobs):
        if jobs[0].name != LEARNER:
            raise RuntimeError("QOSMaxSubmitJobPerUserLimit")
        [accepted] = accept(self, function, jobs)
        cancel = accepted.cancel
        monkeypatch.setattr(accepted, "cancel", lambda: (cancelled.append(1), cancel()), raising=False)
        return [accepted]

    monkeypatch.setattr(submitit.AutoExecutor, "map_array", submit)
    engine = SlurmEngine(tmp_path, parameters={"cluster": "local"})
    with pytest.raises(ConfigError, match="QOSMaxSubmit"):
        engine.start([job(FOREVER, LEARNER), job(FOREVER)])
    assert cancelled == [1]
    assert {s.name for s in engine.status()} == {LEARNER, "sim-1"}
    eventually(lambda: all(s.ended for s in engine.status()))


CLUSTER = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 3, "RAY_USAGE_STATS_ENABLED": "0",
           "RAY_worker_niceness": "0"}  # fmt: skip


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    for name, value in CLUSTER.items():
        monkeypatch.setenv(name, value)  # first: Ray reads them as it is imported
    ray = pytest.importorskip("ray", reason=ray_engine.HINT)
    ray.init(address="local", num_cpus=2, namespace=ray_engine.NAMESPACE, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_ray_starts_a_killed_child_and_a_killed_worker_again_and_names_what_waits(cluster):
    engine = RayEngine("f", learner={"cpu": 0.0}, resources={"cpu": 1.0})
    engine.start([job(FOREVER, LEARNER), *(job(FOREVER, f"sim-{i}") for i in (1, 2, 3))])
    other = RayEngine("f")

    def states() -> dict[str, str]:
        return {s.name: s.state for s in other.status()}

    def child(name: str) -> int:
        [found] = [s.detail.removeprefix("process ") for s in other.status() if s.name == name]
        return int(found) if found.isdigit() else 0

    eventually(lambda: sorted(states().values()) == ["running"] * 3 + ["waiting"], 60)
    [waits] = [s for s in other.status() if s.state == "waiting"]
    assert "cpu=1" in waits.detail
    other.stop([waits.name], drain=False)  # it would take the place of the next one
    eventually(lambda: waits.name not in states(), 30)
    name = next(n for n in states() if n != LEARNER)
    first = child(name)
    os.kill(first, 9)
    eventually(lambda: child(name) not in (0, first), 30)
    second = child(name)
    os.kill(int(Path(f"/proc/{second}/stat").read_text().rsplit(")", 1)[1].split()[1]), 9)
    eventually(lambda: child(name) not in (0, second), 60)
    assert not Path(f"/proc/{second}").exists()  # no orphan
    third = child(name)
    worker = int(Path(f"/proc/{third}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(worker, signal.SIGSTOP)  # a node that is slow, or away for a while
    other.stop([name], drain=True)
    assert states()[name] == "lost"
    assert Path(f"/proc/{third}").exists()  # it was not killed as it moves
    os.kill(worker, signal.SIGCONT)
    eventually(lambda: states()[name] == "stopped", 60)
    os.kill(worker, 9)
    eventually(lambda: states()[name] == "restarting" or not Path(f"/proc/{worker}").exists(), 60)
    eventually(lambda: states()[name] == "stopped", 60)  # it stays so where its worker is started again
    assert [s.statuses for s in other.status() if s.name == name] == [()]
    other.stop(list(states()), drain=True)
    eventually(lambda: set(states().values()) == {"stopped"}, 60)
    other.close()
    assert other.status() == []
    engine.start([job(FOREVER, name)])  # under a name that was stopped before
    eventually(lambda: states() == {name: "running"}, 60)
