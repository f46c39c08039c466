"""`serl-chunk fleet`: a learner and many actors, started, watched and stopped together."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serl_chunk.cli.keys import DEFAULT_ACTOR, LearnerAddress, actor_keys, learner_keys
from serl_chunk.cli.process import load_flags
from serl_chunk.cli.training import LOOPBACK, check_flags, training_parser
from serl_chunk.config.fields import require
from serl_chunk.fleet.engines import LEARNER, Engine, Job, JobStatus
from serl_chunk.io import atomic_write, folder_fault, plural
from serl_chunk.transport.wire.handshake import ADDRESS
from serl_chunk.types import ConfigError

ROOT = Path("runs") / "fleet"
FLEET = "fleet.json"
ENGINES = ("local", "ray", "slurm")
SHOWN_LINES = 5  # of a job that failed
LOOK_S = 1.0  # between looks at jobs that are to end


class Fleet(NamedTuple):
    """A fleet that was started: what its folder's fleet.json has."""

    name: str
    engine: str
    jobs: tuple[str, ...]
    options: dict[str, Any]  # of the engine
    learner: dict[str, Any]  # fields of its LearnerAddress
    spool: str  # folder of the actors' spools

    def open(self, folder: Path) -> Engine:
        """Return its engine. Raises ConfigError where that is not installed, or cannot be reached."""
        from serl_chunk.fleet.local import LocalEngine

        return LocalEngine(folder)

    @property
    def address(self) -> LearnerAddress:
        file = self.learner["file"]
        return LearnerAddress(**self.learner | {"file": file and Path(file)})


def add_place(p: argparse.ArgumentParser) -> None:
    """Add where fleets are remembered."""
    p.add_argument("--fleet_path", metavar="DIR", default=str(ROOT), help=f"folder of all fleets (default: {ROOT})")


def add_size(p: argparse.ArgumentParser) -> None:
    """Add what a fleet consists of."""
    p.add_argument("--name", help="of the fleet (default: the experiment's)")
    p.add_argument("--actors", type=int, required=True, metavar="M", help="actor processes")
    p.add_argument("--n_envs", type=int, metavar="N", help="simulators of each (default: 1)")
    p.add_argument("words", nargs="*", metavar="-- FLAGS", help="of the experiment and its learner, as of serl-chunk")


def fleet_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `fleet`."""
    p.usage = (
        "serl-chunk fleet --engine local|ray|slurm --actors M [--n_envs N] [--learner] -- FLAGS\n"
        "       serl-chunk fleet status|stop [NAME]\n"
        "       serl-chunk fleet write --engine kubernetes DIR --actors M -- FLAGS"
    )
    add_place(p)
    p.add_argument("--engine", choices=ENGINES, required=True, help="what starts the processes")
    add_size(p)
    p.add_argument("--learner", action="store_true", help="start the learner too, in --checkpoint_path")


def status_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `fleet status`."""
    add_place(p)
    p.add_argument("name", nargs="?", metavar="NAME", help="of the fleet (default: the only one)")


def stop_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `fleet stop`."""
    status_flags(p)
    p.add_argument("--drain", action="store_true", help="end each actor once the learner has all of its records")


class Plan(NamedTuple):
    """The flags of a fleet, checked."""

    name: str
    jobs: list[Job]
    own: argparse.Namespace  # the experiment's flags
    learner: LearnerAddress


def plan_of(flags: argparse.Namespace, *, learner: bool, remote: bool) -> Plan:
    """Check a fleet's flags. Raises ConfigError. `remote`: its processes may be on several machines."""
    parser, words = training_parser(), list(flags.words)
    own, own.rest = parser.parse_known_args(words)
    taken = [name for name in ("learner", "actor", "local") if getattr(own, name)]
    require(not taken, taken[0] if taken else "", "fleet starts learner and actors. Remove it behind the --.")
    for name in ("actors", "n_envs", "pin_cores", "viewer"):
        given = getattr(own, name) != parser.get_default(name)
        require(not given, name, "is no flag of one process of a fleet. Give --actors and --n_envs before the --.")
    config = load_flags(own)
    name = flags.name or config.name
    where = own.ip is not None or own.address_file is not None
    for wrong, parameter, text in (
        (flags.actors < 1, "actors", f"must be at least 1 process, got {flags.actors}"),
        (flags.n_envs is not None and flags.n_envs < 1, "n_envs", f"must be at least 1, got {flags.n_envs}"),
        (not name.replace("-", "").replace("_", "").replace(".", "").isalnum(), "name",
         f"got {name!r}, expected letters, digits, '_', '-' and '.'"),
        (learner and own.checkpoint_path is None, "checkpoint_path",
         "a learner that is started again goes on there. Give it."),
        (learner and where, "ip", "the fleet has a learner of its own. Remove --ip and --address_file."),
        (not learner and remote and not where, "ip",
         "actors of other machines need the learner's --ip, or --address_file RUN/address."),
    ):  # fmt: skip
        require(not wrong, parameter, text)
    own.learner, own.actor, own.launched_with_learner = learner, True, learner
    check_flags(parser, own, config)
    own.actors, own.launched_with_learner = flags.actors, True  # all flags have an effect, as was checked
    check_flags(parser, own, config)
    address = LearnerAddress.of(own)
    shared, here = tuple(words), str(Path.cwd())
    if learner:
        shared = (*shared, "--launched_with_learner")
        learner_keys(own.bind, own.keys, insecure=own.insecure)  # before an actor looks for the one of its own
        file = Path(own.checkpoint_path).expanduser().absolute() / ADDRESS
        address = LearnerAddress(LOOPBACK, address.port, None, own.keys, own.insecure, file)
    keys = actor_keys(address.ip, own.keys, insecure=own.insecure)
    pattern = f"{own.actor_id or DEFAULT_ACTOR}-*" if own.actor_id or keys is None or not keys.actors else keys.actors
    acting = (*shared, "--actor", *(("--address_file", str(address.file)) if learner else ()))
    acting += ("--n_envs", str(flags.n_envs)) if flags.n_envs is not None else ()
    names = [pattern.replace("*", str(i + 1)) for i in range(flags.actors)]
    jobs = [Job(LEARNER, (*shared, "--learner"), here)] if learner else []
    jobs += [Job(name, (*acting, "--actor_id", name), here) for name in names]
    return Plan(name, jobs, own, address)


def fleet_command(flags: argparse.Namespace) -> int:
    """Start a fleet; `local` stays until it ends. Raises ConfigError."""
    plan = plan_of(flags, learner=flags.learner, remote=flags.engine != "local")
    folder = Path(flags.fleet_path).expanduser() / plan.name
    address = vars(plan.learner) | {"file": plan.learner.file and str(plan.learner.file)}
    spool = str(Path(plan.own.spool_path or "runs/spool").expanduser().absolute())
    fleet = Fleet(plan.name, flags.engine, tuple(job.name for job in plan.jobs), {}, address, spool)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(folder_fault(folder, error), parameter="fleet_path") from error
    if (folder / FLEET).exists():
        busy = [status.name for status in read_fleet(folder).open(folder).status() if not status.ended]
        require(not busy, "name", f"fleet {plan.name!r} runs ({', '.join(busy)}). Stop it, or give another --name.")
    engine = fleet.open(folder)
    atomic_write(folder / FLEET, json.dumps(fleet._asdict(), indent=1))
    status = engine.start(plan.jobs)
    if flags.engine != "local":
        print(f"fleet {plan.name!r}: {plural(len(plan.jobs), 'job')} handed to {flags.engine}. serl-chunk fleet status")
    return status


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
    jobs = [known.get(name, JobStatus(name, "lost", f"{fleet.engine} knows no such job")) for name in fleet.jobs]
    print(f"fleet {fleet.name} ({fleet.engine}, {folder}): {_counted(jobs)}")
    for job in jobs:
        statuses = f"  exit statuses {', '.join(map(str, job.statuses))}" if job.statuses else ""
        restarts = f"  {plural(job.restarts, 'restart')}" if job.restarts else ""
        print(f"  {job.name:16} {job.state:10} {job.detail}{restarts}{statuses}".rstrip())
        for line in job.lines[-SHOWN_LINES:] if job.state in ("failed", "restarting", "lost") else ():
            print(f"    | {line}")
    return int(any(job.state in ("failed", "lost") for job in jobs))


def _counted(jobs: Sequence[JobStatus]) -> str:
    states = [job.state for job in jobs]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def stop_command(flags: argparse.Namespace) -> int:
    """End the actors of a fleet, then its learner, and wait for them; Ctrl-C leaves the requests in place."""
    folder, fleet = _named(flags)
    engine = fleet.open(folder)
    actors = [name for name in fleet.jobs if name != LEARNER]
    for names, drain in ((actors, flags.drain), ([LEARNER] if LEARNER in fleet.jobs else [], False)):
        if names:
            engine.stop(names, drain=drain)
            _await_end(engine, names)
    engine.close()
    states = [status for status in engine.status() if status.name in fleet.jobs]
    print(f"fleet {fleet.name} ended: {_counted(states) or 'nothing of it runs'}")
    return 0


def _await_end(engine: Engine, names: Sequence[str]) -> None:
    shown = ""
    while left := [s for s in engine.status() if s.name in names and not s.ended]:
        line = "waiting for " + ", ".join(f"{s.name} ({s.state}{s.detail and ' '}{s.detail})" for s in left)
        if line != shown:
            print(line, flush=True)
        shown = line
        time.sleep(LOOK_S)
