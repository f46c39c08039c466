"""`serl-chunk doctor` against live learners: what is right, what is not, and that each failure has its remedy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flaky_proxy import flaky
from ports import free_port
from transport_tools import serving

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.doctor import doctor
from serl_chunk.cli.doctor.checks import Check
from serl_chunk.cli.doctor.doctor import run_checks
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
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.types import ConfigError, Snapshot
from serl_chunk_robot.wire.codec import Limits

HERE, ADD = "127.0.0.1", "`serl-chunk keys add NAME`"
EVERYTHING = [
    "port", "learner", "actor id", "learner's disk", "key", "experiment",
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


def learner(port: int, shared: dict[str, str], **changes: Any) -> contextlib.AbstractContextManager[LearnerServer]:
    return serving(port, contract=shared, run_id="r1", **changes)


def where(port: int, **changes: Any) -> LearnerAddress:
    return dataclasses.replace(LearnerAddress(HERE, port), **changes)


def checks_of(config: ExperimentConfig | None, at: LearnerAddress) -> dict[str, Check]:
    """The checks by name (the port without its number); each that is not ok has a remedy."""
    found = list(run_checks(config, at))
    for c in found:
        assert c.status in ("ok", "-") or c.remedy, c
        assert c.status != "ok" or not c.remedy, c
    named = {re.sub(r"^port .*", "port", c.name): c for c in found}
    assert len(named) == len(found)
    return named


def failures(checks: dict[str, Check]) -> list[str]:
    return [c.name for c in checks.values() if c.status == "FAIL"]


def expect(check: Check, status: str, *parts: str) -> None:
    """A check's status, and what it says and advises."""
    assert (check.status, [part for part in parts if part not in check.said + check.remedy]) == (status, [])


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
    assert out.splitlines()[-1] == "doctor: 0 failed, 0 warnings, 13 ok"
    report = json.loads(Path("out.json").read_text())
    assert (report["ok"], report["experiment"], report["port"]) == (True, "fake_aloha", port)
    checks = report["checks"]
    assert [re.sub(r" \d+", "", c["name"]) for c in checks] == EVERYTHING
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


def test_an_absent_host_is_not_waited_for(config, monkeypatch):
    for name in ("no-such-host.invalid", "a..b"):
        checks = checks_of(config, where(5588, ip=name))
        assert "--ip" in checks["port"].remedy
        assert failures(checks) == ["port 5588"]

    def hang(*args: Any, **kwargs: Any) -> socket.socket:
        time.sleep(5)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", hang)
    start = time.monotonic()
    check = checks_of(config, where(5588, ip="192.0.2.1"))["port"]
    assert time.monotonic() - start < 4
    expect(check, "FAIL", "no answer in 1 s", "firewall lets TCP 5588 in", "192.0.2.1")


def test_a_tunnel_to_nowhere(config):
    """Its near end accepts whatever comes."""
    port = free_port()
    with flaky(port, free_port()):
        checks = checks_of(config, where(port))
    assert failures(checks) == [f"port {port}"]
    assert "a tunnel leads to a port where nothing listens" in checks["port"].remedy


def test_another_experiment_and_one_that_cannot_be_built_here(config, shared):
    other = apply_overrides(config, [("chunk.horizon", "7"), ("normaliser.actions", "absolute_range")])
    checks = asked(shared, other)
    assert failures(checks) == ["experiment"]
    differs = ("horizon is '5' at the learner and '7' at the actor", "actions is 'relative' at the learner", "the same")
    expect(checks["experiment"], "FAIL", *differs)
    assert not any(same in checks["experiment"].said for same in ("network is", "state_dim"))

    def make(fake_env: bool) -> None:
        raise OSError("no driver on this machine")

    checks = asked(shared, dataclasses.replace(config, robot=GymConfig(make=make)))
    assert failures(checks) == ["experiment"]
    expect(checks["experiment"], "FAIL", "OSError: no driver on this machine")


def test_a_learner_that_is_not_ready_or_has_finished(config, shared):
    def welcome() -> Any:
        raise ConfigError("it reads its journal")

    port = free_port()
    with learner(port, shared, welcome=welcome) as server:
        for said in ("not ready: it reads its journal", "training is over: 20000 updates done"):
            expect(checks_of(config, where(port))["learner"], "warning", said)
            server.finish("20000 updates done")


def test_a_live_actor_of_that_name_is_told_of_and_left_alone(config, shared):
    port = free_port()
    small = dataclasses.replace(config.transport, max_sessions=1)
    with learner(port, shared, config=small):
        link = LearnerLink(config.transport, host=HERE, port=port, actor_id="actor", contract=shared)
        try:
            link.connect(10)
            expect(checks_of(config, where(port))["actor id"], "warning", "'actor' is connected, from 127.0.0.1")
            expect(checks_of(config, where(port, actor_id="other"))["actor id"], "FAIL", "max_sessions")
            assert (link.stats()["connections"], link.stats()["connected"]) == (1, 1)
        finally:
            link.close()


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
        expect(checks["key"], "ok", "accepted as 'left'", "joined just now")  # as an actor's first connection would
        assert "joined just now" not in checks_of(config, at)["key"].said
        keys.revoke("left")
        checks = checks_of(config, at)
        assert (failures(checks), "learner" in checks) == (["key"], False)
        expect(checks["key"], "FAIL", "refuses this machine's key 'left'", "it was revoked", ADD)


def of_another_learner(keys: ServerKeys, folder: Path) -> None:
    own = invited(ServerKeys.ensure(folder.parent / "other-keys")[0], folder)
    dataclasses.replace(own, ticket=None).save()


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
    expect(checks["key"], "FAIL", *said)


def test_a_learner_without_keys(config, shared, keys, tmp_path, monkeypatch):
    port, folder = free_port(), tmp_path / "serl-chunk" / "keys"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # in whose folder keys lie that no flag asks for
    dataclasses.replace(invited(keys, folder), ticket=None).save()
    with learner(port, shared):
        expect(checks_of(config, where(port))["key"], "ok", "none needed")
        assert failures(checks_of(config, where(port, keys=str(folder)))) == ["key"]
        for module in ("serl_chunk_robot.wire.sockets", "serl_chunk.transport.security.client"):
            monkeypatch.setattr(f"{module}.is_loopback", lambda host: False)
        expect(checks_of(config, where(port, keys=str(folder)))["key"], "FAIL", "runs without keys", "insecure")
        expect(checks_of(config, where(port, insecure=True))["key"], "warning", "any machine that reaches its port")


def test_exit_status_and_a_file_that_cannot_be_written(capsys, tmp_path):
    port = str(free_port())
    assert main(["doctor", "--port", port, "--json", str(tmp_path / "none" / "f")]) == 2
    capsys.readouterr()
    assert main(["doctor", "--port", port]) == 1
    out = capsys.readouterr().out
    assert out.count("Connection refused") == 1
    assert "doctor: 1 failed, " in out
