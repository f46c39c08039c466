"""`serl-chunk doctor`: checks everything between this machine and a learner, one line each, with its remedy."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from serl_chunk.cli.doctor import checks
from serl_chunk.cli.doctor.checks import Check, duration, failed, ok, per_second, warning
from serl_chunk.cli.doctor.operator import check_operator
from serl_chunk.cli.doctor.probe import DiagnosticsClient, KeyRefusedError, RoundTrip, probe_port
from serl_chunk.cli.doctor.served import check_served
from serl_chunk.cli.keys import LearnerAddress, actor_keys, actor_name, add_learner_flags
from serl_chunk.cli.process import add_experiment_flags, load_flags, split_overrides
from serl_chunk.config.compatibility import contract
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.transport import TransportConfig
from serl_chunk.data.prompts import tokens_digest
from serl_chunk.io import format_bytes
from serl_chunk.logs import quiet_libraries
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.transport.security.client import UnencryptedPeerError, enroll
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import LearnerStatus, RefusedError, StatusRequest, UnreachableError, check_port
from serl_chunk.types import ConfigError, RobotSpec, SerlChunkError
from serl_chunk_robot.wire import sockets
from serl_chunk_robot.wire.curve import fingerprint

REACH_S = 3.0  # seconds that each step may take; without a learner there is only the first
NETWORK_S = 10.0  # of all steps over the network together
JOIN_S = 2.0
IDENTIFY_S = 4.0
ANSWER_S = 2.0
TRIPS = 20
THROUGHPUT_S = 2.0
FAR = 0.1  # seconds of a round trip from which lockstep actors are slowed down noticeably
CLOCK_S = 5.0  # seconds of difference worth mentioning
LITTLE_DISK = 1 << 30  # bytes
_SAME_VERSION = "install the same version of serl-chunk on both machines"
_SILENT = (
    "check --port: another program may use it. If the learner hangs or has many doctors to answer, try again, read its "
    "output, and restart it; actors keep their records"
)
_LOSS = "look for loss on the link (ping)"
_FEW_DOCTORS = "a learner answers few doctors at a time: try again in a minute"


def doctor_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.description = (
        "On the robot PC, with the actor's flags: checks port, keys, version, experiment, round trip, throughput, "
        "clock, disks, devices, the operator's too, and whether the link carries what the experiment records, with a "
        "remedy for each fault. Takes seconds, records nothing, and may run while actors of other machines work. Exit "
        "status 1 where something failed."
    )
    p.add_argument("--exp_name", help="the experiment; without it, what depends on one is left out")
    add_learner_flags(p, "the learner's host name or address (default: 127.0.0.1)")
    p.add_argument("--checkpoint_path", metavar="DIR", help="on the learner's machine: its run, whose disk is tried")
    p.add_argument("--json", metavar="FILE", help="also write the checks and their figures there")
    add_experiment_flags(p)


def doctor_command(flags: argparse.Namespace) -> int:
    """Check; return 1 where something failed. Raises ConfigError."""
    where = LearnerAddress.of(flags)
    if split_overrides(flags.rest) and flags.exp_name is None:
        raise ConfigError("--config changes an experiment: give its --exp_name too")
    quiet_libraries()
    config = load_flags(flags) if flags.exp_name is not None else None
    return run_doctor(config, where, flags.spool_path, flags.json, flags.checkpoint_path)


def run_doctor(
    config: ExperimentConfig | None, where: LearnerAddress, spool_path: str | None = None, json_file: str | None = None,
    checkpoint_path: str | None = None,
) -> int:  # fmt: skip
    """Print every check, in about 15 seconds at most; return 1 if one failed. Raises ConfigError: port or file."""
    check_port(where.port)
    if json_file is not None:
        checks.require_free("json", json_file)
    done: list[Check] = []
    for check in run_checks(config, where, spool_path, checkpoint_path):
        print(check, flush=True)
        done.append(check)
    bad, warned, good = (sum(c.status == status for c in done) for status in ("FAIL", "warning", "ok"))
    print(f"doctor: {bad} failed, {warned} warnings, {good} ok", flush=True)
    if json_file is not None:
        report = {
            "experiment": None if config is None else config.name, "ip": where.ip, "port": where.port,
            "ok": not bad, "checks": [c._asdict() for c in done],
        }  # fmt: skip
        Path(json_file).write_text(json.dumps(report, indent=2) + "\n")
    return 1 if bad else 0


def run_checks(
    config: ExperimentConfig | None, where: LearnerAddress, spool_path: str | None = None,
    checkpoint_path: str | None = None,
) -> Iterator[Check]:  # fmt: skip
    """Yield the checks as they are done. Raises ConfigError where `actor_id` is not the name of the key."""
    try:
        keys = actor_keys(where.ip, where.keys, insecure=where.insecure)
    except ConfigError:  # which the check of the key reports
        keys = None
    actor = actor_name(where.actor_id, keys, where.ip)
    spec, trouble = None, None
    if config is not None:
        try:
            spec = spec_of(config)
            for name in config.agent.image_keys:
                spec.camera(name)
        except Exception as e:  # an experiment's own code may raise anything
            spec, trouble = None, _cannot_build(config, e)
    found = probe_port(where.ip, where.port, REACH_S)
    yield checks.check_port(found, where.ip, where.port)
    if trouble is not None:
        yield trouble
    if found.trouble:
        yield Check("learner", "-", "not checked: its port cannot be reached")
    else:
        yield from _check_learner(config, spec, where, actor)
    if checkpoint_path is not None:
        yield checks.check_run_disk(Path(checkpoint_path).expanduser())
    if config is not None and spec is not None:
        yield checks.check_spool(config, spec, actor, spool_path)
        if config.outcome.classifier:
            yield checks.check_classifier(config, spec)
        if config.robot.server:
            yield from check_served(config, spec)
        yield from checks.check_devices(config, spec)
        yield from check_operator(config, spec)


def _cannot_build(config: ExperimentConfig, e: Exception) -> Check:
    what = str(e) if isinstance(e, SerlChunkError) else f"{type(e).__name__}: {e}"
    remedy = "install what it needs here, as the actor will need it too"
    return failed("experiment", f"{config.name} cannot be built on this machine: {what}", remedy)


def _check_learner(
    config: ExperimentConfig | None, spec: RobotSpec | None, where: LearnerAddress, actor: str
) -> Iterator[Check]:
    """Check a learner that can be reached. `spec`: None without an experiment that can be built."""
    transport, until = TransportConfig() if config is None else config.transport, time.monotonic() + NETWORK_S
    left = lambda seconds: max(0.1, min(seconds, until - time.monotonic()))  # noqa: E731
    prober: DiagnosticsClient | None = None
    try:
        keys, joined = actor_keys(where.ip, where.keys, insecure=where.insecure), False
        if keys is not None and keys.ticket is not None:  # join as an actor's first connection would
            try:
                keys, joined = enroll(keys, transport, where.ip, where.port, left(JOIN_S)), True
            except UnencryptedPeerError:
                if not sockets.is_loopback(where.ip):
                    raise
        prober = DiagnosticsClient(transport, where.ip, where.port, keys)
        run = prober.identify(left(IDENTIFY_S))
        shared, trouble = _contract(config, spec)
        # Building the agent imports JAX: seconds that are not the network's.
        until = max(until, time.monotonic() + ANSWER_S + THROUGHPUT_S)
        status = prober.inspect(StatusRequest(actor, shared), left(ANSWER_S))
        yield _learner(run, f"{where.ip}:{where.port}", status)
        yield _actor_id(actor, status)
        yield _disk(status)
        if prober.secured and keys is not None:
            just_now = f"({fingerprint(keys.pair.public)}){', joined just now' if joined else ''}"
            yield ok("key", f"accepted as {status.key!r} {just_now}; the connection is encrypted")
        elif sockets.is_loopback(where.ip):
            yield ok("key", "none needed: only this machine, or a tunnel, reaches this address")
        else:
            said = "none: the learner runs with --insecure, so any machine that reaches its port can feed and read it"
            yield warning("key", said, "start it without --insecure, and join from here with the line that it prints")
        if trouble is not None:
            yield trouble
        elif config is None:
            yield Check("experiment", "-", "not compared: give --exp_name")
        elif status.differs:
            yield failed("experiment", status.differs)
        elif shared:  # else it cannot be built here, which another check reports
            yield ok("experiment", f"{config.name}: all {len(shared)} values that both must share agree")
        trips = prober.round_trips(TRIPS, left(ANSWER_S))
        yield _round_trip(trips)
        rate, nbytes = prober.throughput(left(THROUGHPUT_S))
        if nbytes:
            yield ok("throughput", f"{per_second(rate)} to the learner, {format_bytes(nbytes)} sent", bytes_per_s=rate)
        else:
            remedy = f"{_LOSS} and for other traffic on it; {_FEW_DOCTORS}"
            yield failed("throughput", "not a single kilobyte arrived in time", remedy, bytes_per_s=rate)
        if trips:
            yield _clock(min(trips))
        if config is not None and spec is not None and nbytes:
            yield checks.check_bandwidth(checks.expected(config, spec), rate, config)
            yield checks.check_snapshots(status.version, status.snapshot_bytes, rate, config)
    except UnreachableError as e:
        own = "its own output" in str(e).lower()
        yield failed("learner", str(e), "read that output" if own else _SILENT)
    except (RefusedError, ConfigError) as e:
        of_key = prober is None or isinstance(e, KeyRefusedError | ConfigError)
        yield failed("key", str(e)) if of_key else failed("learner", str(e), _SAME_VERSION)
    finally:
        if prober is not None:
            prober.close()


def _contract(config: ExperimentConfig | None, spec: RobotSpec | None) -> tuple[dict[str, str], Check | None]:
    if config is None or spec is None:
        return {}, None
    try:
        from serl_chunk.agents.registry import make_agent

        agent = make_agent(config, spec)
        digests = {"base": agent.base_digest, "tokens": tokens_digest(config)}
        return contract(config, spec, agent.network_shape(), **digests), None
    except (ImportError, SerlChunkError) as e:
        return {}, _cannot_build(config, e)


def _learner(run: str, where: str, s: LearnerStatus) -> Check:
    version = f"snapshot {s.version}" if s.version >= 0 else "no snapshot yet"
    said = f"run {run} at {where}, protocol {handshake.PROTOCOL}, {version}, {s.actors} actors connected"
    if s.finished is not None:
        remedy = "resume it with a higher learner.max_steps, or start a new run"
        return warning("learner", f"{said}; training is over: {s.finished}", remedy)
    if s.not_ready:
        return warning("learner", f"{said}; not ready: {s.not_ready}", "wait: actors do so by themselves")
    return ok("learner", said)


def _actor_id(actor: str, s: LearnerStatus) -> Check:
    if s.taken_by:
        remedy = "if it is not this robot's own, start this one with another --actor_id"
        return warning("actor id", f"an actor called {actor!r} is connected, from {s.taken_by}", remedy)
    if s.actors >= s.max_actors:
        remedy = "stop one, or start the learner with a higher --config.transport.max_sessions"
        return failed("actor id", f"{s.actors} actors are connected, which is the limit", remedy)
    return ok("actor id", f"{actor!r} is free")


def _disk(s: LearnerStatus) -> Check:
    name, remedy = "learner's disk", "free space there: while it is full, nothing is acknowledged and actors keep steps"
    if s.stalled:
        return failed(name, f"nothing is acknowledged: {s.stalled}", remedy)
    if s.free_bytes < 0:
        return ok(name, "it keeps no journal (transport.journal=False)")
    said, fine = f"{format_bytes(s.free_bytes)} left for its journal", s.free_bytes >= LITTLE_DISK
    return warning(name, said, remedy, fine=fine, learner_free_bytes=s.free_bytes)


def _round_trip(trips: list[RoundTrip]) -> Check:
    name = "round trip"
    if not trips:
        return failed(name, f"none of {TRIPS} pings was answered in {ANSWER_S:g} s", f"{_LOSS}; {_FEW_DOCTORS}")
    median, longest = statistics.median(t.seconds for t in trips), max(t.seconds for t in trips)
    said = f"{duration(median)} (median of {len(trips)}, longest {duration(longest)})"
    remedy = "a lockstep actor waits that long for allowances (a realtime one does not). Find a nearer learner"
    return warning(name, said, remedy, fine=median < FAR, round_trip_s=median, round_trip_max_s=longest)


def _clock(best: RoundTrip) -> Check:
    ahead = "ahead" if best.offset > 0 else "behind"
    said = f"the learner's is {duration(abs(best.offset))} {ahead} (within {duration(best.seconds / 2)})"
    remedy = "synchronise both (NTP): no record depends on the clocks, but times in the logs differ"
    return warning("clock", said, remedy, fine=abs(best.offset) <= CLOCK_S, clock_offset_s=best.offset)
