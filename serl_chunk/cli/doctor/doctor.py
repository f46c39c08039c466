"""`serl-chunk doctor`: what stands between this machine and a learner, one line for each thing, with its remedy."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from serl_chunk.cli.doctor.checks import (
    Check,
    check_bandwidth,
    check_devices,
    check_ports,
    check_snapshots,
    check_spool,
    duration,
    expected,
    failed,
    per_second,
    require_free,
)
from serl_chunk.cli.doctor.probe import DiagnosticsClient, KeyRefusedError, RoundTrip, probe_ports
from serl_chunk.cli.keys import actor_keys
from serl_chunk.cli.process import Say, say, spec_of
from serl_chunk.config.compatibility import contract
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport import sockets
from serl_chunk.transport.security.client import UnencryptedPeerError, enroll
from serl_chunk.transport.security.keys import ClientKeys, fingerprint
from serl_chunk.transport.sockets import in_words
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import RefusedError, UnreachableError
from serl_chunk.transport.wire.probe import LearnerStatus, StatusRequest
from serl_chunk.types import ConfigError, RobotSpec, SerlChunkError

REACH_S = 3.0  # seconds each step may take at most; with an absent learner the first is all there is ...
NETWORK_S = 10.0  # ... and all that goes over the network together
JOIN_S = 2.0
IDENTIFY_S = 4.0
ANSWER_S = 2.0
TRIPS = 20
THROUGHPUT_S = 2.0
FAR = 0.1  # seconds of a round trip from which lockstep actors are slowed down noticeably
CLOCK_S = 5.0  # seconds of difference worth mentioning
LITTLE_DISK = 1 << 30  # bytes


class LearnerAddress(NamedTuple):
    """The learner to look at, as an actor's flags name it."""

    ip: str
    port: int
    keys: str | None  # folder
    insecure: bool
    actor_id: str
    spool_path: str | None


def run_doctor(
    config: ExperimentConfig | None, where: LearnerAddress, json_file: str | None = None, tell: Say = say
) -> int:
    """Print every check; returns 1 where one of them failed, else 0. Takes at most about 15 seconds.

    Without an experiment, what depends on it is left out. Raises ConfigError for a port or a file that cannot be.
    """
    sockets.check_port(where.port)
    if json_file is not None:
        require_free("json", json_file)
    checks = []
    for check in run_checks(config, where):
        tell(str(check))
        checks.append(check)
    bad = sum(c.status == "FAIL" for c in checks)
    warned = sum(c.status == "warning" for c in checks)
    tell(f"doctor: {bad} failed, {warned} warnings, {sum(c.status == 'ok' for c in checks)} ok")
    if json_file is not None:
        report = {
            "experiment": None if config is None else config.name, "ip": where.ip, "port": where.port,
            "ok": not bad, "checks": [c.to_json() for c in checks],
        }  # fmt: skip
        Path(json_file).write_text(json.dumps(report, indent=2) + "\n")
    return 1 if bad else 0


def run_checks(config: ExperimentConfig | None, where: LearnerAddress) -> Iterator[Check]:
    """The checks, one after another, as they are done."""
    spec: RobotSpec | None = None
    trouble: Check | None = None
    if config is not None:
        try:
            spec = spec_of(config)
            for name in config.agent.image_keys:
                spec.camera(name)
        except Exception as e:  # an experiment's own code may raise anything
            spec, trouble = None, _cannot_build(config, e)
    found = probe_ports(where.ip, where.port, REACH_S)
    yield from check_ports(found, where.ip, where.port)
    if trouble is not None:
        yield trouble
    if found[-1].trouble:
        yield Check("learner", "-", "not asked: its control port cannot be reached")
    else:
        yield from _LearnerChecks(config, spec, where).checks()
    if config is not None and spec is not None:
        yield check_spool(config, spec, where.actor_id, where.spool_path)
        yield from check_devices(config, spec)


def _cannot_build(config: ExperimentConfig, e: Exception) -> Check:
    what = str(e) if isinstance(e, SerlChunkError) else f"{type(e).__name__}: {e}"
    return Check(
        "experiment", "FAIL", f"{config.name} cannot be built on this machine: {what}",
        "install what it needs here, as the actor will need it too",
    )  # fmt: skip


class _LearnerChecks:
    """What a learner that can be reached says and does. `spec`: None where there is no experiment."""

    def __init__(self, config: ExperimentConfig | None, spec: RobotSpec | None, where: LearnerAddress) -> None:
        self._config, self._spec, self._where = config, spec, where
        self._transport = TransportConfig() if config is None else config.transport
        self._until = time.monotonic() + NETWORK_S
        self._keys: ClientKeys | None = None

    def _left(self, seconds: float) -> float:
        return max(0.1, min(seconds, self._until - time.monotonic()))

    def checks(self) -> Iterator[Check]:
        """All of them, up to the first without which the others mean nothing."""
        w = self._where
        try:
            self._keys = actor_keys(w.ip, w.keys, insecure=w.insecure)
            joined = self._join()
        except UnreachableError as e:
            yield self._silent(str(e))
            return
        except (ConfigError, RefusedError) as e:
            yield failed("key", str(e))
            return
        prober = DiagnosticsClient(self._transport, w.ip, w.port, self._keys)
        try:
            run = prober.identify(self._left(IDENTIFY_S))
            # Building the agent imports JAX: seconds that are not the network's.
            shared, trouble = self._contract()
            self._until = max(self._until, time.monotonic() + ANSWER_S + THROUGHPUT_S)
            findings = prober.inspect(StatusRequest(w.actor_id, shared), self._left(ANSWER_S))
            yield from self._learner(run, findings)
            yield self._key(prober.secured, findings.key, joined)
            yield from self._experiment(shared, trouble, findings)
            yield from self._measure(prober, findings)
        except KeyRefusedError as e:
            yield failed("key", str(e))
        except UnreachableError as e:
            yield self._silent(str(e))
        except RefusedError as e:  # another protocol
            yield failed("learner", str(e), "install the same version of serl-chunk on both machines")
        finally:
            prober.close()

    def _silent(self, sentence: str) -> Check:
        remedy = (
            "check --port: another program may have it. A learner that answers nothing hangs, or has many doctors to "
            "answer: try again, see its own output, and start it again; what actors keep is not lost"
        )
        if "its own output" in sentence:
            remedy = "see that output"
        return Check("learner", "FAIL", sentence, remedy)

    def _join(self) -> bool:
        """Join as an actor's first connection would; whether that was just now."""
        keys = self._keys
        if keys is None or keys.ticket is None:
            return False
        try:
            self._keys = enroll(keys, self._transport, self._where.ip, self._where.port, self._left(JOIN_S))
        except UnencryptedPeerError:
            if not sockets.is_loopback(self._where.ip):
                raise
            return False
        return True

    def _contract(self) -> tuple[dict[str, str], Check | None]:
        """What an actor of the experiment would bring, or why that cannot be told."""
        if self._config is None or self._spec is None:
            return {}, None
        try:
            from serl_chunk.agents.registry import make_agent

            return contract(self._config, self._spec, make_agent(self._config, self._spec).network_shape()), None
        except (ImportError, SerlChunkError) as e:
            return {}, _cannot_build(self._config, e)

    # What it says.

    def _learner(self, run: str, f: LearnerStatus) -> Iterator[Check]:
        where = f"{self._where.ip}:{self._where.port}"
        version = f"snapshot {f.version}" if f.version >= 0 else "no snapshot yet"
        said = f"run {run} at {where}, protocol {handshake.PROTOCOL}, {version}, {f.actors} actors connected"
        if f.finished is not None:
            said += f"; training is over: {f.finished}"
            yield Check("learner", "warning", said, "resume it with a higher learner.max_steps, or start a new run")
        elif f.not_ready:
            yield Check("learner", "warning", f"{said}; not ready: {f.not_ready}", "wait: actors do, by themselves")
        else:
            yield Check("learner", "ok", said)
        if f.taken_by:
            yield Check(
                "actor id", "warning", f"an actor called {self._where.actor_id!r} is connected, from {f.taken_by}",
                "if it is not this robot's own, start this one with another --actor_id",
            )  # fmt: skip
        elif f.actors >= f.max_actors:
            yield Check(
                "actor id", "FAIL", f"{f.actors} actors are connected, which is the limit",
                "stop one, or start the learner with a higher --config.transport.max_sessions",
            )  # fmt: skip
        else:
            yield Check("actor id", "ok", f"{self._where.actor_id!r} is free")
        yield self._disk(f)

    def _disk(self, f: LearnerStatus) -> Check:
        name = "learner's disk"
        if f.stalled:
            return Check(
                name, "FAIL", f"nothing is acknowledged: {f.stalled}", "make room there: it goes on by itself, and "
                "actors keep their steps until then"
            )  # fmt: skip
        if f.free_bytes < 0:
            return Check(name, "ok", "it keeps no journal (transport.journal=False)")
        figures = {"learner_free_bytes": f.free_bytes}
        if f.free_bytes < LITTLE_DISK:
            remedy = "make room there: where it is full nothing is acknowledged, and actors keep their steps"
            return Check(name, "warning", f"{in_words(f.free_bytes)} left for its journal", remedy, figures)
        return Check(name, "ok", f"{in_words(f.free_bytes)} left for its journal", figures=figures)

    def _key(self, secured: bool, called: str, joined: bool) -> Check:
        if secured and self._keys is not None:
            just_now = ", joined just now" if joined else ""
            print_of = fingerprint(self._keys.pair.public)
            return Check("key", "ok", f"accepted as {called!r} ({print_of}){just_now}; all is encrypted")
        if sockets.is_loopback(self._where.ip):
            return Check("key", "ok", "none asked for: this address is reached from this machine only, or by a tunnel")
        return Check(
            "key", "warning",
            "none: the learner runs with --insecure, any machine that reaches its ports can feed and read it",
            "start it without --insecure, and join from here with the line that it prints",
        )  # fmt: skip

    def _experiment(self, shared: dict[str, str], trouble: Check | None, f: LearnerStatus) -> Iterator[Check]:
        if trouble is not None:
            yield trouble
        elif self._config is None:
            yield Check("experiment", "-", "not compared: give --exp_name")
        elif f.differs:
            yield failed("experiment", f.differs)
        elif shared:  # else it cannot be built here, which was said
            yield Check("experiment", "ok", f"{self._config.name}: all {len(shared)} values that both must share agree")

    # What it does.

    def _measure(self, prober: DiagnosticsClient, f: LearnerStatus) -> Iterator[Check]:
        trips = prober.round_trips(TRIPS, self._left(ANSWER_S))
        yield _round_trip(trips)
        t = prober.throughput(self._left(THROUGHPUT_S))
        figures = {"bytes_per_s": t.bytes_per_s}
        if not t.nbytes:
            yield Check(
                "throughput", "FAIL", "not a single kilobyte arrived in time", "look for loss on the link (ping), and "
                "whether something else fills it; a learner answers few doctors at a time: try again in a minute",
                figures,
            )  # fmt: skip
        else:
            yield Check("throughput", "ok", f"{per_second(t.bytes_per_s)} to the learner, {in_words(t.nbytes)} sent",
                        figures=figures)  # fmt: skip
        if trips:
            yield _clock(min(trips))
        if self._config is not None and self._spec is not None and t.nbytes:
            yield check_bandwidth(expected(self._config, self._spec), t.bytes_per_s, self._config)
            yield check_snapshots(f.version, f.snapshot_bytes, t.bytes_per_s, self._config)


def _round_trip(trips: list[RoundTrip]) -> Check:
    if not trips:
        return Check(
            "round trip", "FAIL", f"none of {TRIPS} pings was answered in {ANSWER_S:g} s", "look for loss on the link "
            "(ping); a learner answers few doctors at a time: try again in a minute"
        )  # fmt: skip
    times = [t.seconds for t in trips]
    median = statistics.median(times)
    said = f"{duration(median)} (median of {len(times)}, longest {duration(max(times))})"
    figures = {"round_trip_s": median, "round_trip_max_s": max(times)}
    if median < FAR:
        return Check("round trip", "ok", said, figures=figures)
    remedy = "a realtime actor does not mind; one in lockstep waits that long for allowances. Find a nearer learner"
    return Check("round trip", "warning", said, remedy, figures)


def _clock(best: RoundTrip) -> Check:
    ahead = "ahead" if best.offset > 0 else "behind"
    said = f"the learner's is {duration(abs(best.offset))} {ahead} (within {duration(best.seconds / 2)})"
    figures = {"clock_offset_s": best.offset}
    if abs(best.offset) <= CLOCK_S:
        return Check("clock", "ok", f"{said}; no record depends on it", figures=figures)
    remedy = "synchronise both (NTP): no record depends on it, but times in logs will not fit together"
    return Check("clock", "warning", said, remedy, figures)
