"""Checks of `serl-chunk doctor`: port, devices, the link's bandwidth, the actor's spool, a run's disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from serl_chunk.cli.doctor.probe import PortProbe
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import user_error
from serl_chunk.config.robots import GymConfig
from serl_chunk.io import atomic_write, format_bytes
from serl_chunk.outcomes.classifier import Classifier
from serl_chunk.transport.storage import journal
from serl_chunk.transport.storage.spool import SpoolFolders, largest_episode_bytes
from serl_chunk.transport.wire import records
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, RobotSpec, Source, Step, StepBlock
from serl_chunk_robot.wire import codec, sockets


class Check(NamedTuple):
    """One line. Every warning and failure has a remedy."""

    name: str
    status: Literal["ok", "warning", "FAIL", "-"]  # "-": could not be tried
    said: str
    remedy: str = ""
    figures: Mapping[str, float] = {}  # bytes, seconds, bytes per second; for `--json`

    def __str__(self) -> str:
        line = f"{self.status:8}{self.name:23}{self.said}"
        indent = "\n" + " " * 31
        return line + indent + "-> " + self.remedy.replace("\n", indent) if self.remedy else line


def ok(name: str, said: str, **figures: float) -> Check:
    """Return a check without a remedy."""
    return Check(name, "ok", said, "", figures)


def warning(name: str, said: str, remedy: str, *, fine: bool = False, **figures: float) -> Check:
    """Return an ok where it is `fine`, else a warning."""
    return ok(name, said, **figures) if fine else Check(name, "warning", said, remedy, figures)


def failed(name: str, said: str, remedy: str = "", **figures: float) -> Check:
    """Return a failure. Without a `remedy` the last sentence of `said` is one."""
    if not remedy:
        first, _, last = said.rpartition(". ")
        said, remedy = (first, last) if first else (said, "correct what this line names")
    return Check(name, "FAIL", said, remedy, figures)


def per_second(nbytes: float) -> str:
    """Return a rate in the units of network links (10^6)."""
    return f"{nbytes / 1e6:.1f} MB/s" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB/s"


def duration(seconds: float) -> str:
    """Return seconds with a unit that leaves few digits."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.2g} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"


def require_free(name: str, path: str) -> None:
    """Raise ConfigError where `path` of the flag `name` cannot be written."""
    try:
        open(path, "a").close()
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}", parameter=name) from e


def tunnel(ip: str, port: int) -> str:
    """Return the command that forwards a learner's port to this machine."""
    return f"ssh -L {port}:127.0.0.1:{port} {'GPU_BOX' if sockets.is_loopback(ip) else ip}"


_PORT_ADVICE = {
    "no host": "give the learner's name or IP address with --ip",
    "refused": "start the learner (with --bind 0.0.0.0, if it is on another machine), or give its --port{through}",
    "timeout": "check --ip, that the machine is on, and that its firewall lets TCP {port} in{through}",
    "no greeting": "start the learner, or give its --port: another program has this one, or a tunnel leads to a port "
    "where nothing listens{through}",
    "unreachable": "check the network between the two machines, and --ip{through}",
}


def check_port(found: PortProbe, ip: str, port: int) -> Check:
    """Return the result for the learner's port."""
    name, through = f"port {port}", f"\nor through SSH, and then with --ip 127.0.0.1:\n  {tunnel(ip, port)}"
    if not found.trouble:
        return ok(name, f"reached in {duration(found.seconds)}", connect_s=found.seconds)
    return failed(name, f"{ip}:{port}: {found.detail}", _PORT_ADVICE[found.trouble].format(port=port, through=through))


CHECK_S = 3.0  # seconds that a robot's own check may take


def check_devices(config: ExperimentConfig, spec: RobotSpec, root: Path = Path("/")) -> Iterator[Check]:
    """Run the robot's own check, and look for cameras. `root`: of the file system, for tests."""
    cameras = ", ".join(config.agent.image_keys)
    own = config.robot.check_devices if isinstance(config.robot, GymConfig) else None
    if config.robot.server:
        pass  # its server has the devices: see `served.check_served`
    elif not config.robot.real:
        too = f", its cameras {cameras} too" if cameras else ""
        yield ok("devices", f"none needed: robot {spec.name!r} is simulated{too}")
    elif own is not None:
        yield _robot(own)
    else:
        yield ok("devices", "none needed: the experiment has no check (GymConfig(check_devices=...))")
        if cameras:
            here = ", ".join(sorted(str(p.relative_to(root)) for p in (root / "dev").glob("video*")))
            found = f"found {here}" if here else "this machine has no video device"
            remedy = "plug them in (ls /dev/video*); network cameras are not listed here, and are fine"
            yield warning("cameras", f"the experiment uses {cameras}; {found}", remedy, fine=bool(here))


def _robot(own: Callable[[], Sequence[str]]) -> Check:
    found: list[str] = []

    def run() -> None:
        try:
            found.append("; ".join(str(problem) for problem in own()))
        except Exception as e:  # a driver may raise anything
            found.append(f"the robot's own check raised an error: {user_error(e)}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(CHECK_S)
    problem = found[0] if found else f"the robot's own check did not end in {CHECK_S:g} s"
    if problem:
        return failed("devices", problem, "see robot.check_devices of the experiment, which reports this")
    return ok("devices", "the robot's own check finds everything")


JPEG_SHARE = 0.1  # of an image's bytes that its JPEG takes, roughly: it depends on the picture
HOPELESS = 0.25  # share of its bytes below which a robot would mostly stand and wait
SLOW_SNAPSHOT = 5.0  # seconds


class Bandwidth(NamedTuple):
    """Bytes from one actor to the learner at the experiment's control rate, every step in a message of its own."""

    mean: float  # per second, the policy acting: frames as often as `actor.frames` records them
    human: float  # per second, a human acting: frames on every tick. Not below `mean`
    images: float  # share of `mean` that is frames, 0..1
    episode_seconds: float  # the longest


def expected(config: ExperimentConfig, spec: RobotSpec) -> Bandwidth:
    """Measure messages of this experiment's shapes. A camera slower than the control rate sends less than that."""
    observation, action = {STATE: np.zeros(spec.state_dim, np.float32)}, np.zeros(spec.action_dim, np.float32)
    decision = {"chunk": np.tile(action, (config.chunk.horizon, 1)), "q": np.zeros((), np.float32)}
    decision |= {"q_std": np.zeros((), np.float32), "values": np.zeros(getattr(config.agent, "candidates", 1))}
    step = Step(0, observation, action, 0.0, Source.POLICY, 0, 0, 0.0)
    plain, decided = _message(step), _message(step._replace(decision=decision))
    frames = 0.0
    for camera in map(spec.camera, config.agent.image_keys):
        frame = {IMAGE_PREFIX + camera.name: np.zeros((camera.height, camera.width, 3), np.uint8)}
        nbytes = _message(step._replace(observation={**observation, **frame})) - plain
        frames += nbytes * (JPEG_SHARE if config.transport.jpeg_quality else 1.0)
    shown = config.frames_per_tick * frames
    mean = plain + (decided - plain) / (config.chunk.executed - config.actor.delay_ticks) + shown
    human, hz = max(mean, plain + frames), spec.control_hz
    return Bandwidth(mean * hz, human * hz, shown / mean, spec.max_episode_steps / hz)


def _message(step: Step) -> int:
    block = StepBlock.from_steps("an-actor-0123abcd-000123", [step])
    return codec.size_of(records.encode_record(block, 10**6))


def check_bandwidth(need: Bandwidth, measured: float, config: ExperimentConfig) -> Check:
    """Check whether a link of `measured` bytes per second carries what one actor of the experiment records."""
    name, needs = "bandwidth", f"the experiment records {per_second(need.mean)}"
    if need.images and config.frames_every_tick:
        needs += ", frames on every tick (actor.frames)"
    elif need.images:
        needs += f" ({per_second(need.human)} while a human acts)"
    said, relief = f"{needs}; measured {per_second(measured)}", _relief(need, config)
    figures = {"expected_bytes_per_s": need.mean, "expected_bytes_per_s_human": need.human}
    if measured < HOPELESS * need.mean:
        return failed(name, f"{said}: the robot would mostly wait for room in its spool", relief, **figures)
    if measured < need.mean:
        late = duration(need.episode_seconds * (need.mean / measured - 1))
        said += f": an episode of {duration(need.episode_seconds)} needs {late} more to arrive"
    elif measured < need.human:
        said += ": what human ticks add is sent between episodes"
    return warning(name, said, relief, fine=measured >= need.human, **figures)


def _relief(need: Bandwidth, config: ExperimentConfig) -> str:
    late = "Nothing is lost, but steps arrive late"
    if need.images < 0.5:
        return f"use a cable instead of radio, or a machine nearer to the learner. {late}"
    ways = []
    if not config.transport.jpeg_quality:
        ways.append("--config.transport.jpeg_quality=90 on the actor sends about a tenth, slightly changed")
    if config.frames_every_tick:
        ways.append("--config.actor.frames=decisions on the actor (fewer windows to learn from)")
    return "; or ".join([*ways, f"fewer or smaller cameras (agent.image_keys), or a faster link. {late}"])


def check_snapshots(version: int, nbytes: int, measured: float, config: ExperimentConfig) -> Check:
    """Check how long the policy takes to arrive, if the way back is as fast as the way there."""
    name, every = "snapshots", config.learner.steps_per_update
    if version < 0:
        return ok(name, f"none published yet; one comes every {every} updates, the newest alone is sent")
    seconds = nbytes / measured if measured else float("inf")
    said = f"version {version} has {format_bytes(nbytes)}, {duration(seconds)} if the way back is as fast"
    fine = seconds <= SLOW_SNAPSHOT
    remedy = "a smaller network or a faster link; a slow actor always gets the newest, never a queue of old ones"
    said += "" if fine else ": the actor acts with an old policy"
    return warning(name, said, remedy, fine=fine, snapshot_bytes=nbytes, snapshot_s=seconds)


def check_spool(config: ExperimentConfig, spec: RobotSpec, actor_id: str, root: str | None) -> Check:
    """Check whether an actor could keep its records here; `root` is its `--spool_path`."""
    name = "spool"
    try:
        spools = SpoolFolders(config, actor_id, None if root is None else Path(root).expanduser())
    except ConfigError as e:
        return failed(name, str(e), "choose another --actor_id")
    folder, size, episode = spools.folder, config.transport.spool_bytes, largest_episode_bytes(spec, config)
    disk = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))
    free = journal.free_bytes(disk)
    figures = {"spool_free_bytes": free, "largest_episode_bytes": episode, "spool_bytes": size}
    kept = f"an episode may take {format_bytes(episode)}, all that is kept {format_bytes(size)}"
    said, room = f"{folder}: {format_bytes(free)} free; {kept}", "make room, or give a --spool_path on another disk"
    if episode > size:
        remedy = f"--config.transport.spool_bytes={2 * episode} on the actor, or shorter episodes, or smaller cameras"
        return failed(name, said, remedy, **figures)
    if not os.access(disk, os.W_OK | os.X_OK):
        remedy = "start the actor where this user may write, or give another --spool_path"
        return failed(name, f"{folder}: {disk} cannot be written", remedy, **figures)
    if free < 2 * episode:  # as Outbox.no_room has it
        return failed(name, said, f"{room}: no episode would begin", **figures)
    return warning(name, said, f"{room}: a long absence of the learner would fill it", fine=free >= size, **figures)


SLOW_FSYNC = 0.05  # seconds: a journal syncs once a second


def check_run_disk(folder: Path) -> Check:
    """Check what a learner's run needs of a disk: locks, exclusive files, renaming, and fsync."""
    name = "run disk"
    disk = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    locks = "a second learner could use the run at once; a term ends the older one. Choose a disk whose locks hold"
    try:
        with tempfile.TemporaryDirectory(dir=disk) as made, contextlib.ExitStack() as stack:
            path = Path(made) / "file"
            first, second = (stack.enter_context(path.open("a")) for _ in range(2))
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return failed(name, f"{folder}: locks do not hold here", locks)
            except BlockingIOError:
                pass
            with contextlib.suppress(FileExistsError):
                path.open("x").close()
                return failed(name, f"{folder}: a file that exists can be created", "choose another disk")
            seconds = []
            for _ in range(5):
                began = time.perf_counter()
                atomic_write(path, "x" * 4096, durable=True)
                seconds.append(time.perf_counter() - began)
    except OSError as e:
        return failed(name, f"{folder}: {e.strerror}", "choose a disk that this user may write, with locks and room")
    slowest = max(seconds)
    said = f"{folder}: locks hold, a file is replaced and on the disk in {duration(statistics.median(seconds))}"
    remedy = "transport.durability=power would wait for it; choose a faster disk, or leave that out"
    return warning(name, said, remedy, fine=slowest < SLOW_FSYNC, run_disk_fsync_s=slowest)


LOOK_SHARE = 0.25  # of a tick that a look of the classifier may take


def check_classifier(config: ExperimentConfig, spec: RobotSpec) -> Check:
    """Check that the actor can read `outcome.classifier`, for this robot's cameras, and that it is fast enough."""
    name, folder = "classifier", config.outcome.classifier
    try:
        classifier = Classifier(folder)
        classifier.check(spec)
    except ConfigError as e:
        return failed(name, str(e))
    look = classifier.seconds()
    found = f"{folder}: a look takes {duration(look)} of a tick's {duration(spec.dt)}"
    remedy = "train the small network (without --weights), with fewer or smaller cameras, or give the actor a GPU"
    return warning(name, found, remedy, fine=look <= LOOK_SHARE * spec.dt, look_s=look)
