"""`serl-chunk fleet`: the command lines of its processes, what is refused, what status prints, the order of a stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serl_chunk.cli import fleet
from serl_chunk.fleet.engines import JobStatus
from serl_chunk.fleet.local import LocalEngine
from serl_chunk.main import main

FLAGS = ("--exp_name", "fake_aloha", "--seed", "3")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def jobs(monkeypatch):
    """Jobs that were started, and the names of those that were stopped, with `drain`; all of them end at once."""
    started, states = [], {}

    def start(self, given):
        started.append(given)
        states.update((job.name, JobStatus(job.name, "running")) for job in given)
        return 0

    def stop(self, names, *, drain):
        started.append((list(names), drain))
        states.update((name, JobStatus(name, "stopped")) for name in names)

    monkeypatch.setattr(LocalEngine, "start", start)
    monkeypatch.setattr(LocalEngine, "stop", stop)
    monkeypatch.setattr(LocalEngine, "status", lambda self: list(states.values()))
    started.append(states)
    return started


def run(*words: str, learner: bool = True, name: str | None = None) -> int:
    own = ["--learner"] if learner else []
    named = [] if name is None else ["--name", name]
    return main(["fleet", "--engine", "local", "--actors", "2", *own, *named, "--", *FLAGS, *words])


def test_each_process_gets_the_ordinary_command(jobs, home):
    assert run("--checkpoint_path", "run", "--port", "7000") == 0
    shared = (*FLAGS, "--checkpoint_path", "run", "--port", "7000", "--launched_with_learner")
    acting = (*shared, "--actor", "--address_file", str(home / "run" / "address"))
    learner, *actors = jobs[1]
    assert learner.arguments == (*shared, "--learner")
    assert [(a.name, a.arguments) for a in actors] == [
        (name, (*acting, "--actor_id", name)) for name in ("actor-1", "actor-2")
    ]
    assert {job.folder for job in jobs[1]} == {str(home)}
    assert main(["fleet", "--engine", "local", "--actors", "1", "--n_envs", "4", "--name", "b", "--", *FLAGS,
                 "--actor_id", "left", "--ip", "gpu"]) == 0  # fmt: skip
    [actor] = jobs[2]
    assert actor.arguments == (*FLAGS, "--actor_id", "left", "--ip", "gpu", "--actor", "--n_envs", "4",
                               "--actor_id", "left-1")  # fmt: skip
    assert fleet.read_fleet(home / "runs" / "fleet" / "b").address.ip == "gpu"


def test_a_fleets_key_names_its_actors(jobs, home, capsys):
    assert main(["keys", "init"]) == main(["keys", "add", "--fleet", "sim", "--actors", "s-*-x"]) == 0
    keys = home / "config" / "serl-chunk" / "keys" / "fleets" / "sim"
    assert run("--keys", str(keys), learner=False) == 0
    assert [job.name for job in jobs[1]] == ["s-1-x", "s-2-x"]


@pytest.mark.parametrize(
    ("words", "learner", "named"),
    [
        ((), True, "--checkpoint_path"),
        (("--checkpoint_path", "run", "--ip", "gpu"), True, "--ip"),
        (("--actor",), False, "--actor"),
        (("--actors", "3"), False, "--actors"),
        (("--n_envs", "3"), False, "--n_envs"),
        (("--checkpoint_path", "run"), False, "--checkpoint_path"),  # of a learner alone
        (("--config.actor.clock=realtime",), False, "--actors"),
    ],
)
def test_what_is_refused(jobs, capsys, words, learner, named):
    assert run(*words, learner=learner) == 2
    assert capsys.readouterr().err.startswith(f"serl-chunk: {named}: ")
    assert jobs == [{}]


def test_status_names_what_failed_and_stop_ends_the_actors_first(jobs, home, capsys):
    assert main(["fleet", "status"]) == 2
    run("--checkpoint_path", "run")
    states, lines = jobs[0], tuple(f"line {i}" for i in range(9))
    assert main(["fleet", "status"]) == 0
    assert run("--checkpoint_path", "run") == 2  # it runs
    states["actor-2"] = JobStatus("actor-2", "failed", "status 1", 5, (137, 1), lines)
    del states["actor-1"]
    capsys.readouterr()
    assert main(["fleet", "status"]) == 1
    out = capsys.readouterr().out
    assert "1 running, 1 lost, 1 failed" in out
    assert "actor-2          failed     status 1  5 restarts  exit statuses 137, 1\n    | line 4\n" in out
    assert "local knows no such job" in out
    assert main(["fleet", "stop", "fake_aloha", "--drain"]) == 0
    assert jobs[2:] == [(["actor-1", "actor-2"], True), (["learner"], False)]
    assert "fleet fake_aloha ended: 3 stopped" in capsys.readouterr().out
    run("--checkpoint_path", "run", name="other")
    assert main(["fleet", "stop"]) == 2
    assert "fake_aloha, other" in capsys.readouterr().err
    (home / "runs" / "fleet" / "other" / "fleet.json").write_text(json.dumps({"name": "x"}))
    assert main(["fleet", "status", "other"]) == 2
