"""Checks of `serl-chunk doctor`: ports, this machine's devices, the link's bandwidth, and the actor's spool."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from serl_chunk.cli.doctor.probe import PortProbe
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.runs.spool_folders import SpoolFolders, largest_episode_bytes
from serl_chunk.transport import sockets
from serl_chunk.transport.sockets import CHANNELS, in_words
from serl_chunk.transport.storage import files
from serl_chunk.transport.wire import codec, records
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, RobotSpec, Source, Step, StepBlock

Status = Literal["ok", "warning", "FAIL", "-"]  # "-": could not be tried


class Check(NamedTuple):
    """One line. Whatever is not ok has a remedy."""

    name: str
    status: Status
    said: str
    remedy: str = ""
    figures: Mapping[str, float] = {}  # bytes, seconds, bytes per second; for `--json`

    def __str__(self) -> str:
        line = f"{self.status:8}{self.name:23}{self.said}"
        indent = "\n" + " " * 31
        return line + indent + "-> " + self.remedy.replace("\n", indent) if self.remedy else line

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**self._asdict(), "figures": dict(self.figures)}


def failed(name: str, sentence: str, remedy: str = "") -> Check:
    """A failure out of one of our own sentences, whose last part is what to do where no `remedy` is given."""
    said, _, last = sentence.rpartition(". ")
    if remedy or not said:
        return Check(name, "FAIL", sentence, remedy or "the sentence says what to change")
    return Check(name, "FAIL", said, last)


def per_second(nbytes: float) -> str:
    """A rate, in the units that links are sold in (10^6)."""
    return f"{nbytes / 1e6:.1f} MB/s" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB/s"


def duration(seconds: float) -> str:
    """Seconds with a unit that leaves few digits."""
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s"


def require_free(name: str, path: str) -> None:
    """Raise ConfigError where `path` of the flag `name` cannot be a file to write."""
    try:
        with open(path, "a"):
            pass
    except OSError as e:
        raise ConfigError(f"--{name}={path} cannot be written: {e.strerror}") from e


def tunnel(ip: str, port: int) -> str:
    """The command that makes a learner's ports those of this machine."""
    there = "GPU_BOX" if sockets.is_loopback(ip) else ip
    return "ssh " + " ".join(f"-L {p}:127.0.0.1:{p}" for p in range(port, port + len(CHANNELS))) + f" {there}"


def check_ports(found: list[PortProbe], ip: str, port: int) -> Iterator[Check]:
    """One check for each port, and what to do where it cannot be reached."""
    last = port + len(CHANNELS) - 1
    through = f"\nor through SSH, and then with --ip 127.0.0.1:\n  {tunnel(ip, port)}"
    advice = {
        "no host": "give the learner's name or IP address with --ip",
        "refused": "start the learner (with --bind 0.0.0.0, where it is on another machine), or give its --port"
        + through,
        "silent": f"check --ip, that the machine is on, and that its firewall lets TCP {port} to {last} in" + through,
        "mute": "another program has this port, or a tunnel leads to a port where nothing listens: start the learner, "
        f"or give its --port{through}",
        "unreachable": f"check the network between the two machines, and --ip{through}",
    }
    explained: dict[str, int] = {}
    for r in found:
        name = f"port {r.port} ({r.channel})"
        if not r.trouble:
            yield Check(name, "ok", f"reached in {duration(r.seconds)}", figures={"connect_s": r.seconds})
            continue
        same = explained.setdefault(r.trouble, r.port)
        remedy = advice[r.trouble] if same == r.port else f"as for port {same}"
        yield Check(name, "FAIL", f"{ip}:{r.port}: {r.detail}", remedy)


CHECK_S = 3.0  # seconds that a robot's own check may take
_MAKERS = ("046D:C6", "256F:")  # of 3Dconnexion devices, in HID_ID's vendor and product
_SPACEMOUSE = "SpaceMouse"


def check_devices(config: ExperimentConfig, spec: RobotSpec, root: Path = Path("/")) -> Iterator[Check]:
    """The robot's own check, cameras and a SpaceMouse. `root`: of the file system; for tests."""
    if config.robot.real:
        own = config.robot.check_devices if isinstance(config.robot, GymConfig) else None
        yield _robot(own)
        if config.agent.image_keys and own is None:
            yield _cameras(config, root)
    else:
        cameras = f", its cameras {', '.join(config.agent.image_keys)} too" if config.agent.image_keys else ""
        yield Check("devices", "ok", f"none needed: robot {spec.name!r} is simulated{cameras}")
    mouse = _spacemouse(root)
    if mouse is not None:
        yield mouse


def _robot(own: Callable[[], Sequence[str]] | None) -> Check:
    if own is None:
        return Check(
            "devices", "ok", "none needed: the experiment brings no check (GymConfig(check_devices=...)), and a robot "
            "is not moved to find out"
        )  # fmt: skip
    found: list[Sequence[str] | Exception] = []

    def ask() -> None:
        try:
            found.append([str(problem) for problem in own()])
        except Exception as e:  # whatever a driver raises is what there is to say
            found.append(e)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(CHECK_S)
    remedy = "robot.check_devices of the experiment says so: see there"
    if not found:
        return Check("devices", "FAIL", f"the robot's own check did not end in {CHECK_S:g} s", remedy)
    if isinstance(found[0], Exception):
        return Check("devices", "FAIL", f"the robot's own check raised {type(found[0]).__name__}: {found[0]}", remedy)
    if found[0]:
        return Check("devices", "FAIL", "; ".join(found[0]), remedy)
    return Check("devices", "ok", "the robot's own check finds everything")


def _cameras(config: ExperimentConfig, root: Path) -> Check:
    names = ", ".join(config.agent.image_keys)
    here = sorted(str(p.relative_to(root)) for p in (root / "dev").glob("video*"))
    if here:
        return Check("cameras", "ok", f"the experiment uses {names}; here are {', '.join(here)}")
    return Check(
        "cameras", "warning", f"the experiment uses {names}; this machine shows no video device",
        "plug them in (ls /dev/video*); cameras on a network do not show here, and are fine",
    )  # fmt: skip


def _spacemouse(root: Path) -> Check | None:
    """A SpaceMouse that is plugged in; None where there is none."""
    nodes = []
    for folder in sorted((root / "sys/class/hidraw").glob("hidraw*")):
        try:
            fields = dict(
                line.split("=", 1) for line in (folder / "device/uevent").read_text().splitlines() if "=" in line
            )
        except (OSError, UnicodeDecodeError):
            continue
        _, vendor, product = [*fields.get("HID_ID", "").split(":"), "", "", ""][:3]
        if f"{vendor[-4:]}:{product[-4:]}".startswith(_MAKERS):
            nodes.append((root / "dev" / folder.name, fields.get("HID_NAME", "3Dconnexion device")))
    if not nodes:
        return None
    node, name = nodes[0]
    if not os.access(node, os.R_OK | os.W_OK):
        return Check(
            _SPACEMOUSE, "warning", f"{name} is plugged in, and this user may not open {node}",
            "a udev rule for vendor 256f (3Dconnexion) with MODE=\"0666\" or a group of yours, then plug it in again",
        )  # fmt: skip
    try:
        import pyspacemouse

        known = pyspacemouse.get_connected_devices()
    except Exception as e:  # no HID library, or none that it can load
        return Check(
            _SPACEMOUSE, "warning", f"{name} is plugged in; pyspacemouse cannot list it: {e}",
            "install the HID library (libhidapi-hidraw0 on Debian and Ubuntu)",
        )  # fmt: skip
    if known:
        return Check(_SPACEMOUSE, "ok", f"{', '.join(known)} at {node}")
    return Check(
        _SPACEMOUSE, "warning", f"{name} is plugged in and pyspacemouse does not know it",
        "a newer pyspacemouse may; or add it to its devices.toml",
    )  # fmt: skip


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
    """Measured on messages of this experiment's shapes, without TCP's own few per cent.

    A camera slower than the control rate sends less: the frames that it repeats are not sent again.
    """
    horizon, a = config.chunk.horizon, spec.action_dim
    candidates = getattr(config.agent, "candidates", 1)
    observation = {STATE: np.zeros(spec.state_dim, np.float32)}
    decision = {
        "chunk": np.zeros((horizon, a), np.float32),
        "q": np.zeros((), np.float32),
        "values": np.zeros(candidates),
    }
    step = Step(0, observation, np.zeros(a, np.float32), 0.0, Source.POLICY, 0, 0, 0.0)
    plain = _message(step)
    decided = _message(step._replace(decision=decision))
    frames = 0.0
    for camera in map(spec.camera, config.agent.image_keys):
        frame = {IMAGE_PREFIX + camera.name: np.zeros((camera.height, camera.width, 3), np.uint8)}
        nbytes = _message(step._replace(observation={**observation, **frame})) - plain
        frames += nbytes * (JPEG_SHARE if config.transport.jpeg_quality else 1.0)
    shown = config.frames_per_tick * frames
    mean = plain + (decided - plain) / (config.chunk.executed - config.actor.delay_ticks) + shown
    return Bandwidth(
        mean * spec.control_hz,
        max(mean, plain + frames) * spec.control_hz,
        shown / mean,
        spec.max_episode_steps / spec.control_hz,
    )


def _message(step: Step) -> int:
    block = StepBlock.from_steps("an-actor-0123abcd-000123", [step])
    return codec.size_of(records.encode_record(block, 10**6))


def check_bandwidth(need: Bandwidth, measured: float, config: ExperimentConfig) -> Check:
    """Whether a link of `measured` bytes per second carries what one actor of the experiment records."""
    needs = f"the experiment records {per_second(need.mean)}"
    if need.images and config.frames_every_tick:
        needs += ", frames on every tick (actor.frames)"
    elif need.images:
        needs += f" ({per_second(need.human)} while a human acts)"
    said = f"{needs}; measured {per_second(measured)}"
    figures = {"expected_bytes_per_s": need.mean, "expected_bytes_per_s_human": need.human}
    if measured >= need.human:
        return Check("bandwidth", "ok", said, figures=figures)
    if measured >= need.mean:
        said += ": what human ticks add is sent between episodes"
        return Check("bandwidth", "warning", said, _relief(need, config), figures)
    if measured < HOPELESS * need.mean:
        said += ": the robot would mostly wait for room in its spool"
        return Check("bandwidth", "FAIL", said, _relief(need, config), figures)
    late = need.episode_seconds * (need.mean / measured - 1)
    said += f": an episode of {duration(need.episode_seconds)} needs {duration(late)} more to arrive"
    return Check("bandwidth", "warning", said, _relief(need, config), figures)


def _relief(need: Bandwidth, config: ExperimentConfig) -> str:
    if need.images < 0.5:
        return "use a wire instead of radio, or a machine nearer to the learner; nothing is lost, but steps arrive late"
    fewer = "fewer or smaller cameras (agent.image_keys), or a faster link"
    if config.frames_every_tick:
        fewer = f"--config.actor.frames=decisions on the actor (fewer windows to learn from); or {fewer}"
    if not config.transport.jpeg_quality:
        fewer = f"--config.transport.jpeg_quality=90 on the actor sends about a tenth, slightly changed; or {fewer}"
    return f"{fewer}. Nothing is lost, but steps arrive late"


def check_snapshots(version: int, nbytes: int, measured: float, config: ExperimentConfig) -> Check:
    """How long the policy takes to arrive, if the way back is as fast as the way there."""
    every = config.learner.steps_per_update
    if version < 0:
        return Check(
            "snapshots", "ok", f"none published yet; one comes every {every} updates, the newest alone is sent"
        )
    seconds = nbytes / measured if measured else float("inf")
    said = f"version {version} has {in_words(nbytes)}, {duration(seconds)} if the way back is as fast"
    figures = {"snapshot_bytes": nbytes, "snapshot_s": seconds}
    if seconds <= SLOW_SNAPSHOT:
        return Check("snapshots", "ok", said, figures=figures)
    return Check(
        "snapshots", "warning", f"{said}: the actor acts with an old policy",
        "a smaller network or a faster link; a slow actor always gets the newest, never a queue of old ones", figures,
    )  # fmt: skip


def check_spool(config: ExperimentConfig, spec: RobotSpec, actor_id: str, root: str | None) -> Check:
    """Whether an actor could keep its records here; `root` is its `--spool_path`."""
    try:
        spools = SpoolFolders(config, actor_id, None if root is None else Path(root).expanduser())
    except ConfigError as e:
        return Check("spool", "FAIL", str(e), "choose another --actor_id")
    folder, size, episode = spools.folder, config.transport.spool_bytes, largest_episode_bytes(spec, config)
    disk = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))
    free = files.free_bytes(disk)
    figures = {"spool_free_bytes": free, "largest_episode_bytes": episode, "spool_bytes": size}
    said = (
        f"{folder}: {in_words(free)} free; an episode may take {in_words(episode)}, all that is kept {in_words(size)}"
    )
    if episode > size:
        remedy = f"--config.transport.spool_bytes={2 * episode} on the actor, or shorter episodes, or smaller cameras"
        return Check("spool", "FAIL", said, remedy, figures)
    if not os.access(disk, os.W_OK | os.X_OK):
        remedy = "start the actor where this user may write, or give another --spool_path"
        return Check("spool", "FAIL", f"{folder}: {disk} cannot be written", remedy, figures)
    if free < 2 * episode:  # as Outbox.no_room has it
        remedy = "make room, or give a --spool_path on another disk: no episode would begin"
        return Check("spool", "FAIL", said, remedy, figures)
    if free < size:
        remedy = "make room, or give a --spool_path on another disk: a long absence of the learner would fill it"
        return Check("spool", "warning", said, remedy, figures)
    return Check("spool", "ok", said, figures=figures)
