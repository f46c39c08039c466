"""`serl-chunk doctor` against live learners: what is right, what is not, and that each failure has its remedy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import free_port
from transport_tools import handler_of

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.doctor import doctor
from serl_chunk.cli.doctor.checks import Check
from serl_chunk.cli.doctor.doctor import run_checks
from serl_chunk.cli.doctor.probe import RoundTrip
from serl_chunk.cli.keys import LearnerAddress
from serl_chunk.config.compatibility import contract
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.config.robots import GymConfig
from serl_chunk.config.transport import TransportConfig
from serl_chunk.main import main
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk.transport.security.server import ServerKeys
from serl_chunk.transport.server.server import LearnerServer
from serl_chunk.transport.storage import journal
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.types import ConfigError, Snapshot
from serl_chunk_robot.wire.codec import Limits

HERE = "127.0.0.1"
EVERYTHING = [
    "port (data)", "port (snapshots)", "port (control)", "learner", "actor id", "learner's disk", "key", "experiment",
    "round trip", "throughput", "clock", "bandwidth", "snapshots", "spool", "devices",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "REACH_S", 1.0)
    monkeypatch.setattr(doctor, "IDENTIFY_S", 1.5)
    monkeypatch.setattr(doctor, "THROUGHPUT_S", 0.5)


@pytest.fixture(scope="module")
def config() -> ExperimentConfig:
    quick = TransportConfig(timeout_s=0.6)
    return dataclasses.replace(load_experiment("fake_aloha"), transport=quick)


@pytest.fixture(scope="module")
def shared(config: ExperimentConfig) -> dict[str, str]:
    spec = spec_of(config)
    return contract(config, spec, make_agent(config, spec).network_shape())


@contextlib.contextmanager
def learner(port: int, shared: dict[str, str], **changes: Any) -> Iterator[LearnerServer]:
    values: dict[str, Any] = {"bind": HERE, "port": port, "contract": shared, "run_id": "r1", **changes}
    server = LearnerServer(values.pop("config", TransportConfig(timeout_s=0.6)), handler_of(values), **values)
    server.start()
    try:
        yield server
        server.check()
    finally:
        server.close()


def where(port: int, **changes: Any) -> LearnerAddress:
    return dataclasses.replace(LearnerAddress(HERE, port), **changes)


def checks_of(config: ExperimentConfig | None, at: LearnerAddress) -> dict[str, Check]:
    """The checks by name (ports without their number); each that is not ok has a remedy."""
    found = list(run_checks(config, at))
    for c in found:
        assert c.status in ("ok", "-") or c.remedy, c
        assert c.status != "ok" or not c.remedy, c
    named = {c.name if "port" not in c.name else "port " + c.name.split()[-1]: c for c in found}
    assert len(named) == len(found)
    return named


def failures(checks: dict[str, Check]) -> list[str]:
    return [c.name for c in checks.values() if c.status == "FAIL"]


def asked(shared: dict[str, str], config: ExperimentConfig | None, at: dict[str, Any] | None = None, **of_learner: Any):
    port = free_port()
    with learner(port, shared, **of_learner):
        return checks_of(config, where(port, **at or {}))


def test_all_is_well(config, shared, tmp_path, capsys):
    port = free_port()
    store = RecordStore(tmp_path / "journal", Limits(1 << 26, 64), min_steps=100)
    records = []
    with learner(port, shared, store=store, on_record=lambda i, r: records.append(r)) as server:
        server.publish(Snapshot(3, {"w": np.zeros(1000, np.float32)}), {})
        while server.stats()["snapshot_version"] != 3:
            time.sleep(0.01)
        assert doctor.run_doctor(config, where(port), None, "out.json") == 0
        assert records == []
        assert server.sessions() == []
    store.close()
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "doctor: 0 failed, 0 warnings, 15 ok"
    report = json.loads(Path("out.json").read_text())
    assert (report["ok"], report["experiment"], report["port"]) == (True, "fake_aloha", port)
    checks = report["checks"]
    assert [c["name"].replace(f" {port}", "").replace(f" {port + 1}", "").replace(f" {port + 2}", "") for c in checks] \
        == EVERYTHING  # fmt: skip
    assert {c["status"] for c in checks} == {"ok"}
    figures = {k: v for c in checks for k, v in c["figures"].items()}
    assert 0 < figures["round_trip_s"] < 0.1
    assert figures["bytes_per_s"] > 1e7
    assert figures["learner_free_bytes"] > doctor.LITTLE_DISK
    assert abs(figures["clock_offset_s"]) < 0.1
    assert figures["snapshot_bytes"] == 4000
    assert "run r1" in out
    assert "none needed" in out
    assert not list(tmp_path.glob("runs/**"))  # it looks and leaves nothing


# Ports.


def test_an_absent_host_is_not_waited_for(config, monkeypatch):
    for name in ("no-such-host.invalid", "a..b"):
        checks = checks_of(config, where(5588, ip=name))
        assert "--ip" in checks["port (data)"].remedy
        assert len(failures(checks)) == 3

    def hang(*args: Any, **kwargs: Any) -> socket.socket:
        time.sleep(5)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", hang)
    start = time.monotonic()
    check = checks_of(config, where(5588, ip="192.0.2.1"))["port (data)"]
    assert time.monotonic() - start < 4
    assert "firewall lets TCP 5588 to 5590 in" in check.remedy
    assert "192.0.2.1" in check.remedy.splitlines()[-1]
    assert "no answer in 1 s" in check.said


def test_a_tunnel_to_nowhere(config):
    """Its near end accepts whatever comes."""
    port = free_port()
    listeners = [socket.create_server((HERE, port + i)) for i in range(3)]

    def hang_up(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    for s in listeners:
        threading.Thread(target=hang_up, args=(s,), daemon=True).start()
    try:
        checks = checks_of(config, where(port))
    finally:
        for s in listeners:
            s.shutdown(socket.SHUT_RDWR)
            s.close()
    assert failures(checks) == [f"port {port} (data)", f"port {port + 1} (snapshots)", "learner"]
    assert "a tunnel leads to a port where nothing listens" in checks["port (data)"].remedy


def test_something_else_answers(config, shared):
    port = free_port()
    with learner(port, shared):  # one port too low: its snapshots' port is taken for the control port
        checks = checks_of(config, where(port - 1))
    assert failures(checks) == [f"port {port - 1} (data)", "learner"]
    assert "does not answer as a learner" in checks["learner"].said
    assert "--port" in checks["learner"].remedy


# What the learner says.


def test_another_experiment(config, shared):
    other = apply_overrides(config, [("chunk.horizon", "7"), ("normaliser.actions", "absolute_range")])
    checks = asked(shared, other)
    assert failures(checks) == ["experiment"]
    said = checks["experiment"].said
    assert "chunk.horizon is '5' at the learner and '7' at the actor" in said
    assert "normaliser.actions is 'relative' at the learner and 'absolute_range' at the actor" in said
    assert not any(same in said for same in ("network is", "state_dim"))
    assert "the same experiment" in checks["experiment"].remedy


def test_an_experiment_that_cannot_be_built_here(config, shared):
    def make(fake_env: bool) -> None:
        raise OSError("no driver on this machine")

    checks = asked(shared, dataclasses.replace(config, robot=GymConfig(make=make)))
    assert failures(checks) == ["experiment"]
    assert "OSError: no driver on this machine" in checks["experiment"].said
    assert checks["round trip"].status == "ok"


def test_a_learner_that_is_not_ready_or_has_finished(config, shared):
    def welcome() -> Any:
        raise ConfigError("it reads its journal")

    port = free_port()
    with learner(port, shared, welcome=welcome) as server:
        for said in ("not ready: it reads its journal", "training is over: 20000 updates done"):
            check = checks_of(config, where(port))["learner"]
            assert (check.status, said in check.said) == ("warning", True)
            server.finish("20000 updates done")


def test_a_live_actor_of_that_name_is_told_of_and_left_alone(config, shared):
    port = free_port()
    small = dataclasses.replace(config.transport, max_sessions=1)
    with learner(port, shared, config=small):
        link = LearnerLink(config.transport, host=HERE, port=port, actor_id="actor", contract=shared)
        try:
            link.connect(10)
            check = checks_of(config, where(port))["actor id"]
            assert (check.status, "'actor' is connected, from 127.0.0.1" in check.said) == ("warning", True)
            check = checks_of(config, where(port, actor_id="other"))["actor id"]
            assert (check.status, "max_sessions" in check.remedy) == ("FAIL", True)
            assert link.stats()["connections"] == 1
            assert link.stats()["connected"] == 1
        finally:
            link.close()


def test_a_full_disk_of_the_learner(config, shared, tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "free_bytes", lambda folder: 500 << 20)
    store = RecordStore(tmp_path / "journal", Limits(1 << 26, 64), min_steps=100)
    port = free_port()
    with learner(port, shared, store=store) as server:
        check = checks_of(config, where(port))["learner's disk"]
        assert (check.status, check.said) == ("warning", "500 MiB left for its journal")
        server._receiver.stalled = "the learner's disk takes no more: full"
        server._receiver._retry_at = float("inf")
        checks = checks_of(config, where(port))
        assert failures(checks) == ["learner's disk"]
        assert "nothing is acknowledged: the learner's disk takes no more" in checks["learner's disk"].said
    store.close()


# Keys.


@pytest.fixture
def keys(tmp_path: Path) -> ServerKeys:
    return ServerKeys.ensure(tmp_path / "learner-keys")[0]


def invited(keys: ServerKeys, folder: Path, name: str = "left") -> ClientKeys:
    own = ClientKeys.accept(folder, keys.invite(name, [HERE], 5588))
    own.save()
    return own


def test_a_key_that_is_accepted_and_then_revoked(config, shared, keys, tmp_path):
    port, folder = free_port(), tmp_path / "robot"
    invited(keys, folder)
    at = where(port, keys=str(folder))
    with learner(port, shared, keys=keys):
        checks = checks_of(config, at)
        assert failures(checks) == []
        assert "accepted as 'left'" in checks["key"].said
        assert "joined just now" in checks["key"].said  # as an actor's first connection would
        assert "joined just now" not in checks_of(config, at)["key"].said
        keys.revoke("left")
        checks = checks_of(config, at)
        assert failures(checks) == ["key"]
        assert "refuses this machine's key 'left'" in checks["key"].said
        assert "it was revoked" in checks["key"].said
        assert "`serl-chunk keys add NAME`" in checks["key"].remedy
        assert "learner" not in checks


def of_another_learner(keys: ServerKeys, folder: Path) -> None:
    own = invited(ServerKeys.ensure(folder.parent / "other-keys")[0], folder)
    dataclasses.replace(own, ticket=None).save()


ADD = "`serl-chunk keys add NAME`"


@pytest.mark.parametrize(
    ("prepare", "at", "said"),
    [
        (None, {}, ("requires a key, and this machine has none", ADD)),
        (of_another_learner, None, ("is not the learner that this machine joined", ADD)),
        (None, None, ("has no key for a learner",)),
    ],
)
def test_a_key_that_does_not_let_this_machine_in(config, shared, keys, tmp_path, prepare, at, said):
    if prepare is not None:
        prepare(keys, tmp_path / "robot")
    checks = asked(shared, config, {"keys": str(tmp_path / "robot")} if at is None else at, keys=keys)
    assert failures(checks) == ["key"]
    assert all(part in checks["key"].said + checks["key"].remedy for part in said)


def test_a_learner_without_keys(config, shared, keys, tmp_path, monkeypatch):
    port, folder = free_port(), tmp_path / "serl-chunk" / "keys"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # in whose folder keys lie that no flag asks for
    dataclasses.replace(invited(keys, folder), ticket=None).save()
    with learner(port, shared):
        assert checks_of(config, where(port))["key"].said.startswith("none needed")
        assert failures(checks_of(config, where(port, keys=str(folder)))) == ["key"]
        monkeypatch.setattr("serl_chunk_robot.wire.sockets.is_loopback", lambda host: False)
        monkeypatch.setattr("serl_chunk.transport.security.client.is_loopback", lambda host: False)
        checks = checks_of(config, where(port, keys=str(folder)))
        assert failures(checks) == ["key"]
        assert "runs without keys" in checks["key"].said
        assert "insecure" in checks["key"].remedy
        check = checks_of(config, where(port, insecure=True))["key"]
        assert check.status == "warning"
        assert "any machine that reaches its ports can feed and read it" in check.said


# Times and bytes.


def test_a_far_learner_and_a_wrong_clock():
    assert doctor._round_trip([RoundTrip(0.3, 0.0)] * 5).status == "warning"
    check = doctor._round_trip([RoundTrip(s / 1000, 0.0) for s in (1, 2, 3, 4, 90)])
    assert (check.status, check.figures["round_trip_s"]) == ("ok", 0.003)
    assert doctor._round_trip([]).status == "FAIL"
    assert doctor._clock(RoundTrip(0.001, -3.0)).status == "ok"
    check = doctor._clock(RoundTrip(0.001, -30.0))
    assert check.status == "warning"
    assert "30.0 s behind" in check.said
    assert "NTP" in check.remedy


# The command.


def test_exit_status_and_a_file_that_cannot_be_written(capsys, tmp_path):
    port = str(free_port())
    assert main(["doctor", "--port", port, "--json", str(tmp_path / "none" / "f")]) == 2
    capsys.readouterr()
    assert main(["doctor", "--port", port]) == 1
    out = capsys.readouterr().out
    assert out.count("Connection refused") == 3
    assert "doctor: 3 failed, " in out
