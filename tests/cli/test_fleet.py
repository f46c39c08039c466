"""`serl-chunk fleet`: the command lines of its processes, what is refused, what status prints, the order of a stop."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ports import free_port
from transport_tools import LIMITS, linked, send_episode, serving

from serl_chunk.cli import fleet
from serl_chunk.cli.training import training_parser
from serl_chunk.fleet.engines import JobStatus
from serl_chunk.fleet.local import LocalEngine
from serl_chunk.main import main
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire.records import Item, encode_record
from serl_chunk.types import Begin, Snapshot

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
        (("--exp_name", "hil_serl_template"), False, "--config.robot.server"),
    ],
)
def test_what_is_refused(jobs, capsys, words, learner, named):
    assert run(*words, learner=learner) == 2
    assert capsys.readouterr().err.startswith(f"serl-chunk: {named}: ")
    assert jobs == [{}]


def test_status_names_what_failed_and_stop_ends_the_actors_first(jobs, home, monkeypatch, capsys):
    monkeypatch.setattr(fleet, "_at_the_learner", lambda *_: True)
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
    monkeypatch.setattr(LocalEngine, "stop", lambda self, names, *, drain: states.update(
        (name, JobStatus(name, "lost", "check gpu-7")) for name in names))  # fmt: skip
    monkeypatch.setattr(fleet, "LOST_S", 0.0)
    monkeypatch.setattr(fleet, "LOOK_S", 0.01)
    assert main(["fleet", "stop", "other"]) == 1
    out = capsys.readouterr().out
    assert "actor-1 (lost check gpu-7)" in out
    assert re.search("fleet other has not ended: actor-., actor-. may run", out)
    assert run("--checkpoint_path", "run", name="other") == 2  # they may run
    assert main(["fleet", "stop"]) == 2
    assert "fake_aloha, other" in capsys.readouterr().err
    (home / "runs" / "fleet" / "other" / "fleet.json").write_text(json.dumps({"name": "x"}))
    assert main(["fleet", "status", "other"]) == 2


def test_status_shows_actors_as_the_learner_knows_them_and_what_is_unsent(jobs, home, capsys):
    """The slow one by name, the one that is gone too; and of an actor that ended what its spool keeps."""
    port = free_port()
    with serving(port) as server:
        run("--ip", "127.0.0.1", "--port", str(port), learner=False)
        server.publish(Snapshot(1, {"w": np.zeros(3, np.float32)}), {})
        with linked(port, actor_id="actor-1") as fast, linked(port, actor_id="actor-2") as slow:
            assert slow.wait_until(lambda: slow.latest() is not None, 10)
            send_episode(slow, "s", 5)
            done = threading.Event()
            thread = threading.Thread(
                target=lambda: [send_episode(fast, f"f{i}", 5) or done.wait(0.05) for i in range(40)]
            )
            thread.start()
            assert slow.flush(10)
            assert main(["fleet", "status", "--seconds", "0.5"]) == 0
            out = capsys.readouterr().out
            done.set()
            thread.join()
        assert re.search(r"actor-2 +connected  5 steps, 0.0/s, snapshot \d+ s old, 0 unacknowledged, 0 restarts", out)
        assert "2 connected, 0 silent" in out
        assert "behind the others: actor-2 (" in out
        jobs[0]["actor-2"] = JobStatus("actor-2", "stopped")
        spool = Spool(home / "runs" / "spool" / "fake_aloha" / "actor-2" / "run", LIMITS)
        spool.append(Item.of(Begin("e"), 0), encode_record(Begin("e"), 0))
        spool.close()
        main(["fleet", "status", "--seconds", "0"])
        assert f"unsent: {spool.folder} keeps" in capsys.readouterr().out
    assert main(["fleet", "status"]) == 1  # without a learner


# Of a manifest: kind -> fields of its spec, and of a pod's spec and container.
SPECS = {
    "Service": {"clusterIP", "publishNotReadyAddresses", "selector", "ports"},
    "StatefulSet": {"serviceName", "replicas", "selector", "template", "volumeClaimTemplates"},
    "Deployment": {"replicas", "selector", "template"},
}
POD = {"terminationGracePeriodSeconds", "initContainers", "containers", "volumes"}
CONTAINER = {"name", "image", "command", "args", "env", "lifecycle", "volumeMounts"}


def written(folder: Path, *words: str, status: int = 0) -> list[dict[str, Any]]:
    assert main(["fleet", "write", "--engine", "kubernetes", str(folder), "--actors", "3", "--n_envs", "4", "--image",
                 "lab/serl:1", "--", *FLAGS, *words]) == status  # fmt: skip
    return [one for file in sorted(folder.glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())]


def test_manifests_have_known_fields_and_no_key(home, capsys):
    assert main(["keys", "init"]) == main(["keys", "add", "--fleet", "fake-aloha"]) == 0
    capsys.readouterr()
    actors, service, learner = written(home / "k8s", "--port", "7000", "--config.chunk.horizon=4")
    out = capsys.readouterr().out
    assert (actors["kind"], service["kind"], learner["kind"]) == ("Deployment", "Service", "StatefulSet")
    for one in (actors, service, learner):
        assert set(one) == {"apiVersion", "kind", "metadata", "spec"}
        assert set(one["spec"]) <= SPECS[one["kind"]]
    assert [port["port"] for port in service["spec"]["ports"]] == [7000]
    for one, own in (
        (actors, ("--ip", "fake-aloha-learner", "--spool_path")),
        (learner, ("--bind", "--checkpoint_path")),
    ):
        labels = one["spec"]["selector"]["matchLabels"]
        assert labels == one["spec"]["template"]["metadata"]["labels"]
        pod = one["spec"]["template"]["spec"]
        assert set(pod) <= POD
        for container in (*pod["initContainers"], *pod["containers"]):
            assert set(container) <= CONTAINER
            volumes = {v["name"] for v in (*pod["volumes"], *({"name": "data"},) * (one is learner))}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        [container] = pod["containers"]
        assert container["image"] == "lab/serl:1"
        assert {*own, "--config.chunk.horizon=4"} <= set(container["args"])
        parsed, rest = training_parser().parse_known_args(container["args"])
        assert (parsed.port, rest) == (7000, ["--config.chunk.horizon=4"])
    assert service["spec"]["selector"] == learner["spec"]["selector"]["matchLabels"]
    assert actors["spec"]["replicas"] == 3
    assert "kubectl create secret generic fake-aloha-learner-keys" in out
    assert "lost with it" in out
    text = "".join(file.read_text() for file in (home / "k8s").iterdir())
    keys = home / "config" / "serl-chunk" / "keys"
    secrets = [
        json.loads(f.read_text())["secret"] for f in (*keys.glob("*.json"), *keys.glob("fleets/*/learners/*.json"))
    ]
    assert len(secrets) == 2
    assert not any(secret in text for secret in secrets)
    written(home / "k8s", status=2)  # they may have been edited
    written(home / "other", "--bind", "0.0.0.0", status=2)
    assert main(["fleet", "write", "--engine", "kubernetes", str(home / "other"), "--actors", "1", "--name", "7sim",
                 "--", *FLAGS]) == 2  # fmt: skip
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate (22 MB)").validate
    for one in (actors, service, learner):
        validate(one, "1.30", strict=True)


@pytest.mark.parametrize("who", ["learner", "actors"])
def test_a_pods_keys_are_copied_for_their_owner_alone_and_a_revoked_one_stays_so(home, who):
    one = written(home / "k8s")[0 if who == "actors" else 2]
    secret, keys = home / "secret", home / ("keys" if who == "actors" else "data")
    secret.mkdir()
    for name in ("server.json", "a.json") if who == "learner" else ("a.json",):
        (secret / name).write_text("new")
    [copy] = [c["command"][2] for c in one["spec"]["template"]["spec"]["initContainers"]]
    copy = copy.replace("/secret", str(secret)).replace("/keys" if who == "actors" else "/data", str(keys))
    subprocess.run(["sh", "-c", copy], check=True)
    place = keys / ("learners" if who == "actors" else "keys/allowed")
    assert ((place / "a.json").read_text(), (place / "a.json").stat().st_mode & 0o777) == ("new", 0o600)
    assert (place.parent / "server.json").exists() == (who == "learner")
    (place / "a.json").write_text("revoked")
    subprocess.run(["sh", "-c", copy], check=True)
    assert (place / "a.json").read_text() == "revoked"
    assert list(place.glob("*.part")) == []


@pytest.mark.parametrize(
    ("engine", "options", "words", "named"),
    [
        ("local", ["--resource", "robot=1"], [], "--resource"),
        ("ray", ["--slurm", "cluster=local"], ["--ip", "gpu"], "--slurm"),
        ("ray", ["--resource", "robot"], ["--ip", "gpu"], "--resource"),
        ("ray", ["--resource", "robot=x"], ["--ip", "gpu"], "--resource"),
        ("ray", [], [], "--ip"),
        ("ray", [], ["--ip", "gpu"], "--engine"),  # without tokens
        ("slurm", ["--learner"], ["--checkpoint_path", "run"], "--bind"),
    ],
)
def test_flags_of_engines_that_are_refused(jobs, monkeypatch, capsys, engine, options, words, named):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert main(["fleet", "--engine", engine, "--actors", "2", *options, "--", *FLAGS, *words]) == 2
    assert capsys.readouterr().err.startswith(f"serl-chunk: {named}: ")
