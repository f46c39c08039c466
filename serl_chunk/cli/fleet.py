"""`serl-chunk fleet`: a learner and many actors, started, watched and stopped together."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serl_chunk.cli.doctor.probe import DiagnosticsClient
from serl_chunk.cli.keys import DEFAULT_ACTOR, LearnerAddress, actor_keys, key_folder, learner_keys
from serl_chunk.cli.process import load_flags
from serl_chunk.cli.training import LOOPBACK, check_flags, training_parser
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.config.transport import TransportConfig
from serl_chunk.fleet.engines import LEARNER, Engine, Job, JobStatus
from serl_chunk.fleet.kubernetes import PLACES, manifests, secrets
from serl_chunk.io import atomic_write, folder_fault, format_bytes, plural
from serl_chunk.transport.storage.spool import DEFAULT_ROOT, unsent_of
from serl_chunk.transport.wire.handshake import ADDRESS, RefusedError, UnreachableError, read_address
from serl_chunk.types import ConfigError

ROOT = Path("runs") / "fleet"
FLEET = "fleet.json"
ENGINES = ("local", "ray", "slurm")
SHOWN_LINES = 5  # of a job that failed
ANSWER_S = 3.0  # seconds that a learner has for an answer
LAGS = 0.5  # of the median of steps/s, below which an actor is behind
LOOK_S = 1.0  # between looks at jobs that are to end
LOST_S = 30.0  # that a stop waits while none of them gives a sign of life


class Fleet(NamedTuple):
    """A fleet that was started: what its folder's fleet.json has."""

    name: str
    engine: str
    jobs: tuple[str, ...]
    options: dict[str, Any]  # of the engine
    learner: dict[str, Any]  # fields of its LearnerAddress
    spool: str  # folder of the actors' spools
    ended: bool = False  # it was stopped

    def open(self, folder: Path) -> Engine:
        """Return its engine, as `open_engine`."""
        return open_engine(self.engine, self.name, folder, self.options)

    @property
    def address(self) -> LearnerAddress:
        file = self.learner["file"]
        return LearnerAddress(**self.learner | {"file": file and Path(file)})


def open_engine(engine: str, name: str, folder: Path, options: dict[str, Any]) -> Engine:
    """Return an engine. Raises ConfigError where it is not installed, or cannot be reached.

    Args:
        name: under which a cluster knows its jobs.
        folder: of their states.
        options: those of `engine_options`.
    """
    if engine == "ray":
        from serl_chunk.fleet.ray import RayEngine

        return RayEngine(name, **options)
    if engine == "slurm":
        from serl_chunk.fleet.slurm import SlurmEngine

        return SlurmEngine(folder, **options)
    from serl_chunk.fleet.local import LocalEngine

    return LocalEngine(folder)


def add_place(p: argparse.ArgumentParser) -> None:
    """Add where fleets are remembered."""
    p.add_argument("--fleet_path", metavar="DIR", default=str(ROOT), help=f"folder of all fleets (default: {ROOT})")


def add_size(p: argparse.ArgumentParser) -> None:
    """Add what a fleet consists of."""
    p.add_argument("--name", help="of the fleet (default: the experiment's)")
    p.add_argument("--actors", type=int, required=True, metavar="M", help="actor processes")
    p.add_argument("--n_envs", type=int, metavar="N", help="simulators of each (default: 1)")


def add_engine(p: argparse.ArgumentParser, **options: Any) -> None:
    """Add the engine, and what it needs to know. `options`: of `--engine`."""
    p.add_argument("--engine", choices=ENGINES, help="what starts the processes", **options)
    p.add_argument("--resource", action="append", default=[], metavar="NAME=N",
                   help="ray: that a process needs, cpu, gpu or a node's own (robot=1); repeatable")  # fmt: skip
    p.add_argument("--ray_address", metavar="ADDRESS", help="ray: of the cluster (default: this machine's)")
    p.add_argument("--slurm", action="append", default=[], metavar="NAME=VALUE",
                   help="slurm: parameter of submitit (slurm_partition=gpu); repeatable")  # fmt: skip
    p.add_argument("--open_cluster", action="store_true", help="ray: accept a cluster without tokens")


def fleet_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `fleet`."""
    p.usage = (
        "serl-chunk fleet --engine local|ray|slurm --actors M [--n_envs N] [--learner] -- FLAGS\n"
        "       serl-chunk fleet status|stop [NAME]\n"
        "       serl-chunk fleet write --engine kubernetes DIR --actors M -- FLAGS"
    )
    add_place(p)
    add_engine(p, required=True)
    add_size(p)
    p.add_argument("--learner", action="store_true", help="start the learner too, in --checkpoint_path")
    p.add_argument(
        "--learner_resource", action="append", default=[], metavar="NAME=N", help="ray: that the learner does"
    )
    p.add_argument("--learner_slurm", action="append", default=[], metavar="NAME=VALUE",
                   help="slurm: parameter of submitit of the learner alone; repeatable")  # fmt: skip


def status_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `fleet status`."""
    add_place(p)
    p.add_argument("name", nargs="?", metavar="NAME", help="of the fleet (default: the only one)")
    p.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="over which steps/s are counted (default: 2)"
    )


def stop_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `fleet stop`."""
    add_place(p)
    p.add_argument("name", nargs="?", metavar="NAME", help="of the fleet (default: the only one)")
    p.add_argument("--drain", action="store_true", help="end each actor once the learner has all of its records")


class Plan(NamedTuple):
    """The processes of a fleet, from flags that were checked."""

    name: str
    jobs: list[Job]
    learner: LearnerAddress
    spool: Path


def check(flags: argparse.Namespace, *, learner: bool) -> tuple[argparse.Namespace, ExperimentConfig]:
    """Return the flags behind the `--`, and their experiment. Raises ConfigError where these or `flags` cannot be."""
    parser = training_parser()
    own, own.rest = parser.parse_known_args(list(flags.words))
    taken = [name for name in ("learner", "actor", "local") if getattr(own, name)]
    require(not taken, taken[0] if taken else "", "a fleet starts learner and actors. Remove it behind the --.")
    for name in ("actors", "n_envs", "pin_cores", "viewer"):
        given = getattr(own, name) != parser.get_default(name)
        require(not given, name, "is no flag of one process of a fleet. Give --actors and --n_envs before the --.")
    config = load_flags(own)
    require(flags.actors >= 1, "actors", f"must be at least 1 process, got {flags.actors}")
    require(flags.n_envs is None or flags.n_envs >= 1, "n_envs", f"must be at least 1, got {flags.n_envs}")
    name = flags.name or config.name
    valid = "letters, digits, '_', '-' and '.', a letter or digit first"
    require(re.fullmatch(r"[a-zA-Z0-9][\w.-]*", name) is not None, "name", f"got {name!r}, expected {valid}")
    flags.name = name
    own.learner, own.actor, own.launched_with_learner = learner, True, learner
    check_flags(parser, own, config)
    served = "a fleet restarts actors, and this robot is real. Give its robot server: it is HELD there after a restart."
    require(not config.robot.real or bool(config.robot.server), "robot.server", served)
    own.actors, own.launched_with_learner = flags.actors, True  # all flags have an effect, as was checked
    check_flags(parser, own, config)
    return own, config


def plan_of(flags: argparse.Namespace) -> Plan:
    """Return the processes of `fleet`. Raises ConfigError."""
    learner, remote = flags.learner, flags.engine != "local"
    own, config = check(flags, learner=learner)
    where = own.ip is not None or own.address_file is not None
    alone = (
        learner and remote and flags.engine == "slurm" and own.bind == LOOPBACK and "cluster=local" not in flags.slurm
    )
    for wrong, parameter, text in (
        (learner and own.checkpoint_path is None, "checkpoint_path",
         "a learner that is started again goes on there. Give it."),
        (learner and where, "ip", "the fleet has a learner of its own. Remove --ip and --address_file."),
        (not learner and remote and not where, "ip",
         "actors of other machines need the learner's --ip, or --address_file RUN/address."),
        (alone, "bind", "actors of other nodes reach no learner on 127.0.0.1. Give --bind 0.0.0.0."),
    ):  # fmt: skip
        require(not wrong, parameter, text)
    address = LearnerAddress.of(own)
    shared, here = tuple(flags.words), str(Path.cwd())
    if learner:
        shared = (*shared, "--launched_with_learner")
        learner_keys(own.bind, own.keys, insecure=own.insecure)  # before an actor looks for the one of its own
        file = Path(own.checkpoint_path).expanduser().absolute() / ADDRESS
        address = LearnerAddress(LOOPBACK, address.port, None, own.keys, own.insecure, file)
    keys = actor_keys(address.ip, own.keys, insecure=own.insecure)
    pattern = f"{own.actor_id or DEFAULT_ACTOR}-*" if own.actor_id or keys is None or not keys.actors else keys.actors
    acting = (*shared, "--actor", *(("--address_file", str(address.file)) if learner else ()), *_n_envs(flags))
    names = [pattern.replace("*", str(i + 1)) for i in range(flags.actors)]
    jobs = [Job(LEARNER, (*shared, "--learner"), here)] if learner else []
    jobs += [Job(name, (*acting, "--actor_id", name), here) for name in names]
    spool = Path(own.spool_path or DEFAULT_ROOT).expanduser().absolute() / config.name
    return Plan(flags.name, jobs, address, spool)


def _n_envs(flags: argparse.Namespace) -> tuple[str, ...]:
    return () if flags.n_envs is None else ("--n_envs", str(flags.n_envs))


def write_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `fleet write`."""
    p.add_argument("folder", metavar="DIR", help="where the manifests are written")
    p.add_argument("--engine", choices=("kubernetes",), required=True, help="what they are for")
    p.add_argument(
        "--image", default="serl-chunk:latest", help="container with serl-chunk (default: serl-chunk:latest)"
    )
    add_size(p)


def write_command(flags: argparse.Namespace) -> int:
    """Write manifests to edit, and print the commands that make their Secrets. Raises ConfigError, OSError."""
    own, _ = check(flags, learner=True)
    for name in sorted(PLACES):
        given = getattr(own, name) != training_parser().get_default(name)
        require(not given, name, "is in the manifests already. Remove it behind the --.")
    name = flags.name.lower().replace("_", "-").replace(".", "-").rstrip("-")
    label = "the cluster's names need an ASCII letter first, and at most 40 letters, digits and '-'"
    require(re.fullmatch(r"[a-z][a-z0-9-]{0,39}", name) is not None, "name", f"got {flags.name!r}: {label}.")
    port, folder = LearnerAddress.of(own).port, Path(flags.folder).expanduser()
    files = manifests(
        name, flags.words, image=flags.image, actors=flags.actors, acting=_n_envs(flags), port=port
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        require(not (folder / file).exists(), "folder", f"{folder / file} is there and may be edited. Move it away.")
        (folder / file).write_text(text)
    print(
        f"{folder}: {', '.join(files)}. Edit them (image, storage, data, GPU), make the Secrets, then kubectl apply -f "
        f"{folder}\n\n{secrets(name, str(key_folder(None)))}\n\nA deleted actor pod drains for up to 120 s; what its "
        "spool then still has is lost with it."
    )
    return 0


def fleet_command(flags: argparse.Namespace) -> int:
    """Start a fleet; `local` stays until it ends. Raises ConfigError."""
    plan = plan_of(flags)
    folder = Path(flags.fleet_path).expanduser() / plan.name
    address = vars(plan.learner) | {"file": plan.learner.file and str(plan.learner.file)}
    options = engine_options(flags)
    fleet = Fleet(plan.name, flags.engine, tuple(job.name for job in plan.jobs), options, address, str(plan.spool))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(folder_fault(folder, error), parameter="fleet_path") from error
    if (folder / FLEET).exists():
        earlier = read_fleet(folder).open(folder)
        busy = [f"{s.name} {s.state} {s.detail}".rstrip() for s in earlier.status() if not s.ended]
        require(not busy, "name", f"fleet {plan.name!r} runs ({', '.join(busy)}). Stop it, or give another --name.")
        earlier.close()
    engine = fleet.open(folder)
    atomic_write(folder / FLEET, json.dumps(fleet._asdict(), indent=1))
    status = engine.start(plan.jobs)
    if flags.engine != "local":
        print(f"fleet {plan.name!r}: {plural(len(plan.jobs), 'job')} handed to {flags.engine}. serl-chunk fleet status")
    return status


OF_ENGINES = {"resource": "ray", "learner_resource": "ray", "ray_address": "ray", "open_cluster": "ray",
              "slurm": "slurm", "learner_slurm": "slurm"}  # fmt: skip


def engine_options(flags: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags of `add_engine` give an engine. Raises ConfigError for those of another one."""
    for name, engine in OF_ENGINES.items():
        own = not getattr(flags, name, None) or engine == flags.engine
        require(own, name, f"has no effect with --engine {flags.engine}. Remove it.")
    if flags.engine == "ray":
        resources, learner = _pairs(flags, "resource", float), _pairs(flags, "learner_resource", float)
        address = flags.ray_address or "auto"
        return {"resources": resources, "learner": learner, "address": address, "open_cluster": flags.open_cluster}
    if flags.engine == "slurm":
        return {"parameters": _pairs(flags, "slurm", _value), "learner": _pairs(flags, "learner_slurm", _value)}
    return {}


def _value(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _pairs(flags: argparse.Namespace, name: str, read: Callable[[str], Any]) -> dict[str, Any]:
    found = {}
    for text in getattr(flags, name, ()):  # a sweep has none of a learner
        key, _, value = text.partition("=")
        try:
            found[key] = read(value)
        except ValueError:
            value = ""
        require(bool(key and value), name, f"got {text!r}, expected NAME=VALUE, with a number for resources")
    return found


def read_fleet(folder: Path) -> Fleet:
    """Raises ConfigError for a folder without a fleet."""
    try:
        return Fleet(**json.loads((folder / FLEET).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder}: holds no fleet ({error}). Start one with serl-chunk fleet.") from error


def _named(flags: argparse.Namespace) -> tuple[Path, Fleet]:
    root = Path(flags.fleet_path).expanduser()
    names = sorted(file.parent.name for file in root.glob(f"*/{FLEET}"))
    if flags.name is None:
        require(len(names) == 1, "name", f"{root} has fleets: {', '.join(names) or 'none'}. Give the name of one.")
    folder = root / (flags.name or names[0])
    return folder, read_fleet(folder)


def status_command(flags: argparse.Namespace) -> int:
    """Print the state of a fleet; returns 1 where something is wrong with it."""
    folder, fleet = _named(flags)
    known = {status.name: status for status in fleet.open(folder).status()}
    state = "stopped" if fleet.ended else "lost"
    unknown = "" if fleet.ended else f"{fleet.engine} knows no such job"
    jobs = [known.get(name, JobStatus(name, state, unknown)) for name in fleet.jobs]
    print(f"fleet {fleet.name} ({fleet.engine}, {folder}): {_counted(jobs)}")
    for job in jobs:
        statuses = f"  exit statuses {', '.join(map(str, job.statuses))}" if job.statuses else ""
        restarts = f"  {plural(job.restarts, 'restart')}" if job.restarts else ""
        print(f"  {job.name:16} {job.state:10} {job.detail}{restarts}{statuses}".rstrip())
        for line in job.lines[-SHOWN_LINES:] if job.state in ("failed", "restarting", "lost") else ():
            print(f"    | {line}")
    found = fleet.ended or _at_the_learner(fleet, flags.seconds)
    for job in (job for job in jobs if job.ended or job.state == "lost"):
        for spool, nbytes, version in unsent_of(Path(fleet.spool) / job.name):
            print(f"unsent: {spool} keeps {format_bytes(nbytes)} of {job.name}, written by serl_chunk {version}")
    return int(not found or any(job.state in ("failed", "lost") for job in jobs))


def _at_the_learner(fleet: Fleet, seconds: float) -> bool:
    """Print what the learner knows of its actors; returns whether it answers."""
    address = fleet.address
    if address.file is not None:
        where = read_address(address.file)
        if where is None:
            print(f"learner: {address.file} names none yet")
            return False
        address = dataclasses.replace(address, ip=where[0], port=where[1])
    try:
        keys = actor_keys(address.ip, address.keys, insecure=address.insecure)
        with contextlib.closing(DiagnosticsClient(TransportConfig(), address.ip, address.port, keys)) as client:
            run = client.identify(ANSWER_S)
            before, start = {actor.actor_id: actor.steps for actor in client.actors(ANSWER_S)}, time.monotonic()
            time.sleep(seconds)
            actors, took = client.actors(ANSWER_S), time.monotonic() - start
    except (RefusedError, UnreachableError) as error:
        print(f"learner: {error}")
        return False
    rates = {a.actor_id: (a.steps - before.get(a.actor_id, 0)) / took for a in actors}
    live = [a for a in actors if a.connected]
    print(f"learner at {address.ip}:{address.port}, run {run}: {len(live)} connected, {len(actors) - len(live)} silent")
    for a in actors:
        state = "connected" if a.connected else f"silent for {a.silent_s:.0f} s"
        age = "no snapshot" if a.snapshot_age_s < 0 else f"snapshot {a.snapshot_age_s:.0f} s old"
        print(
            f"  {a.actor_id:16} {state:10} {a.steps} steps, {rates[a.actor_id]:.1f}/s, {age}, "
            f"{a.unacknowledged} unacknowledged, {plural(a.restarts, 'restart')}"
        )
    usual = statistics.median(rates[a.actor_id] for a in live) if live else 0.0
    late = [a.actor_id for a in actors if not a.connected or rates[a.actor_id] < LAGS * usual]
    if late:
        print(f"behind the others: {', '.join(late)} (silent, or below half of the median of {usual:.1f} steps/s)")
    return True


def _counted(jobs: Sequence[JobStatus]) -> str:
    states = [job.state for job in jobs]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def stop_command(flags: argparse.Namespace) -> int:
    """End the actors of a fleet, then its learner, and wait for them; Ctrl-C leaves the requests in place.

    Returns 1 where jobs give no sign of life: the requests stay, and the operator sees whether they run.
    """
    folder, fleet = _named(flags)
    engine = fleet.open(folder)
    actors = [name for name in fleet.jobs if name != LEARNER]
    for names, drain in ((actors, flags.drain), ([LEARNER] if LEARNER in fleet.jobs else [], False)):
        if names:
            engine.stop(names, drain=drain)
            if lost := _await_end(engine, names):
                print(f"fleet {fleet.name} has not ended: {', '.join(lost)} may run. Then stop it again")
                return 1
    ended = [status for status in engine.status() if status.name in fleet.jobs]
    engine.close()
    atomic_write(folder / FLEET, json.dumps(fleet._replace(ended=True)._asdict(), indent=1))
    print(f"fleet {fleet.name} ended: {_counted(ended) or 'nothing of it ran'}")
    return 0


def _await_end(engine: Engine, names: Sequence[str]) -> list[str]:
    """Wait for the end of jobs; returns those that are left where none of them gave a sign of life for LOST_S."""
    shown, seen_at = "", time.monotonic()
    while left := [s for s in engine.status() if s.name in names and not s.ended]:
        line = "waiting for " + ", ".join(f"{s.name} ({s.state}{s.detail and ' '}{s.detail})" for s in left)
        if line != shown:
            print(line, flush=True)
        shown = line
        if any(s.state != "lost" for s in left):
            seen_at = time.monotonic()
        elif time.monotonic() - seen_at > LOST_S:
            return [s.name for s in left]
        time.sleep(LOOK_S)
    return []
