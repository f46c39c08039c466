"""A robot's file, robot.toml: which driver, which limits, and what the robot does between episodes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Container, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from serl_chunk_robot.control.motions import SPEED, Step
from serl_chunk_robot.devices import HOSTED
from serl_chunk_robot.drivers import BUILT_IN, CAMERAS
from serl_chunk_robot.drivers.base import Driver, DriverSpec
from serl_chunk_robot.drivers.camera import Camera, CameraSpec
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.geometry.kinematics import Arms, Chain, Link
from serl_chunk_robot.robot_file.camera_views import View, read_view
from serl_chunk_robot.robot_file.loading import Source, make, maker
from serl_chunk_robot.robot_file.profiles import CAUTIOUS, Profile, read_profiles
from serl_chunk_robot.robot_file.ranges import RANGES, check_options, check_relative, ranged, spec_fault
from serl_chunk_robot.robot_file.toml_file import Table, read_toml, unknown
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.wire.protocol import DEFAULT_PORT, FRAMES_PORT, MAX_SIDE

HAIR = 0.05  # rad: an arm at a limit, as ALOHA's asleep, is measured a little beyond it

_KEYS = ("name", "driver", "host", "port", "rate", "start", "keys", "profile", "kinematics", "reset", "park", "effort",
         "needs_go", "camera", "device")  # fmt: skip
_STEP = ("joints", "add", "lift", "height", "pose", "random", "gripper", "arm", "set", "every", "wait", "speed",
         "relieve", "new_object")  # fmt: skip
_ARM = ("base", "yaw", "joints", "links", "tip")
_METHODS = ("spec", "connect", "read", "command", "hold", "set", "clear_faults", "stop", "close")
_CAMERA_METHODS = ("spec", "open", "read", "close")
_OF_TABLE = ("name", "driver", "latency", *View._fields)  # keys of [[camera]] that are no options of its class
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


class CameraFile(NamedTuple):
    """A table [[camera]] of a robot's file."""

    name: str
    source: Source  # of the device
    spec: CameraSpec  # of what is published
    port: int  # at which its frames are published
    view: View = View()
    latency: float = 0.0  # s by which the camera's stamps are late
    of: str = ""  # the table whose device it is another view of; empty: it has its own
    part: Tuple[int, int, int, int] = (0, 0, 0, 0)  # that it shows of the device's pictures, as `View.crop`


class DeviceFile(NamedTuple):
    """A table [[device]] of a robot's file."""

    name: str
    source: Source
    port: int  # at which its readings are published
    arm: int  # the first arm that it moves, 0: the left one; -1: the one after those of the device before


class RobotFile(NamedTuple):
    """What a robot's file sets. Arrays are float64[J], in the order of the driver's joints."""

    path: Path
    name: str
    driver: str  # a built-in name, or FILE.py:Class, relative to the file's folder
    options: Dict[str, Any]  # arguments of the driver: [driver] without its name
    host: str
    port: int
    rate: Optional[float]  # Hz; None: the driver's
    start: str  # the profile after a start
    keys: Optional[Path]  # folder of the keys that are let in
    profiles: Mapping[str, Profile] = MappingProxyType({})
    arms: Optional[Arms] = None
    reset: Tuple[Step, ...] = ()
    park: Optional[np.ndarray] = None
    effort: Optional[np.ndarray] = None  # above which the server's own motions yield; None: no limit is known
    cameras: Tuple[CameraFile, ...] = ()
    devices: Tuple[DeviceFile, ...] = ()
    needs_go: bool = True  # whether a controller moves the robot only once an operator said so after each stop or hold


def load(path: Union[str, Path], *, driver: str = "") -> RobotFile:
    """Read a robot's file. Makes the driver and the cameras for their specs, and opens nothing.

    `driver`: replaces the file's. Raises ConfigError: with the file, the key's dotted name, its value and what is
    valid.
    """
    path = Path(path)
    table = read_toml(path, _KEYS)
    options = {}
    if isinstance(table.values.get("driver"), dict):
        of_driver = table.table("driver")
        options = {key: value for key, value in of_driver.values.items() if key != "name"}
        driver = driver or of_driver.text("name")
        if driver in BUILT_IN:
            check_options(of_driver, "driver")
    keys = path.parent / table.text("keys") if "keys" in table.values else None
    if keys is not None and not keys.is_dir():
        raise table.wrong("keys", "a folder")
    port, rate = table.whole("port", DEFAULT_PORT, *RANGES["port"]), table.values.get("rate")
    file = RobotFile(
        path, table.text("name"), driver or table.text("driver"), options, table.text("host", "127.0.0.1"),
        port, None if rate is None else ranged(table, "rate", 200.0), table.text("start", CAUTIOUS), keys,
    )  # fmt: skip
    spec: DriverSpec = _spec(_driver(file), lambda: load_driver(file), spec_fault)
    size = len(spec.low)
    needs_go = table.flag("needs_go", True)
    if not needs_go and not spec.simulated:
        raise table.wrong(
            "needs_go",
            "true: the robot is not simulated (DriverSpec.simulated), and the person who "
            "cleared it may still be near. It moves once an operator runs `serl-chunk robot go`",
        )
    if spec.targets == "poses" and "kinematics" in table.values:
        raise table.wrong("kinematics", "no such key: the driver is commanded by poses of the tips")
    arms, chains = _read_arms(table, size)
    joints = ~np.isin(np.arange(size), spec.grippers)
    effort = table.numbers("effort", size, sign=1, within=RANGES["effort"])
    if effort is None and spec.effort:
        effort = np.array(spec.effort, np.float64)
    elif effort is not None and not isinstance(table.values["effort"], list):
        effort = np.where(joints, effort, np.inf)  # one number is not for grippers, which are to press
    steps = table.table("reset", ("step",)).tables("step", _STEP)
    cameras = _read_cameras(table, file.port)
    return file._replace(
        profiles=read_profiles(table.table("profile"), spec, chains, file.rate), arms=arms, effort=effort,
        reset=tuple(_read_step(step, spec, joints, arms) for step in steps),
        park=table.numbers("park", size, one=False), cameras=cameras,
        devices=read_devices(table, file.port + FRAMES_PORT + len(cameras), spec), needs_go=needs_go,
    )  # fmt: skip


def checked(file: RobotFile, spec: DriverSpec, q: Optional[np.ndarray] = None) -> None:
    """Compare a file with the connected robot, before anything moves.

    `q`: measured joints, float64[J]. Raises ConfigError: another number of joints, limits beyond the driver's, a rate
    that it cannot, an unknown profile to start with, a pose outside that profile's limits; or a park pose or a place of
    a reset that any profile's limits do not hold.
    """
    if file.start not in file.profiles:
        what = f"unknown profile ({file.start!r} in {file.path})"
        raise unknown("start", file.start, list(file.profiles), what)
    slowest = max(RANGES["rate"].low, 1 / spec.tick)
    if file.rate is not None and not slowest <= file.rate <= spec.rate:
        what = f"{file.rate:g} Hz in {file.path}, expected {slowest:g} to {spec.rate:g} Hz, which the driver can"
        raise ConfigError(what, parameter="rate")
    for name, profile in file.profiles.items():
        limits = profile.limits
        if len(limits.low) != len(spec.low):
            what = f"{len(limits.low)} joints in {file.path}, expected the driver's {len(spec.low)}"
            raise ConfigError(what, parameter=f"profile.{name}")
        for key, beyond, value, bound in (
            ("low", limits.low < np.array(spec.low), limits.low, spec.low),
            ("high", limits.high > np.array(spec.high), limits.high, spec.high),
            ("velocity", limits.rates.velocity > np.array(spec.velocity), limits.rates.velocity, spec.velocity),
        ):
            if beyond.any():
                j = int(np.argmax(beyond))
                what = f"{value[j]:g} of joint {j} in {file.path} is beyond the driver's {bound[j]:g}"
                raise ConfigError(what, parameter=f"profile.{name}.{key}")
    check_poses(file, spec)
    if q is not None:
        limits = file.profiles[file.start].limits
        outside = np.maximum(limits.low - q, q - limits.high)
        if not outside.max() <= HAIR:
            j = int(np.argmax(np.where(np.isnan(outside), np.inf, outside)))
            raise ConfigError(
                f"joint {j} is at {q[j]:.3f}, expected {limits.low[j]:g} to {limits.high[j]:g}. Move it "
                f"there by hand, or widen the limits in {file.path}.",
                parameter=f"profile.{file.start}",
            )


def load_driver(file: RobotFile) -> Driver:
    """Make the driver that a file names; connects to nothing. Raises ConfigError, as `loading.make`."""
    return make(_driver(file), BUILT_IN, _METHODS)  # type: ignore[no-any-return]


def load_camera(source: Source) -> Camera:
    """Make the camera that a file names; opens nothing. Raises ConfigError, as `loading.make`."""
    return make(source, CAMERAS, _CAMERA_METHODS)  # type: ignore[no-any-return]


def _driver(file: RobotFile) -> Source:
    return Source(file.path, file.driver, file.options, "driver", "driver")


def _spec(source: Source, make: Callable[[], Any], fault: Callable[[Any], str]) -> Any:
    """The spec of a driver or camera, in which there is no `fault`."""
    try:
        spec = make().spec()
        what = fault(spec)
    except ConfigError:
        raise
    except Exception as e:  # of a lab's code
        raise source.failed("spec() failed", e) from e
    if what:
        raise source.failed(what)
    return spec


def _read_cameras(table: Table, port: int) -> Tuple[CameraFile, ...]:
    """Tables [[camera]]. `port`: of the server."""
    found: Dict[str, CameraFile] = {}
    devices: Dict[str, Tuple[Source, CameraSpec]] = {}
    for k, each in enumerate(table.tables("camera", None)):
        name = _read_name(each, found, table, port + FRAMES_PORT + k)
        of = each.text("of") if "of" in each.values else ""
        if of:
            Table(each.file, each.name, each.values, ("name", "of", *View._fields))
            if of not in devices:
                raise each.wrong("of", "the name of a camera before it that has a driver")
        else:
            devices[name] = _read_device(each)
        source, spec = devices[of or name]
        view = read_view(each, spec)
        size = view.size(spec)
        if not max(size.height, size.width) <= MAX_SIDE:
            raise each.wrong("resize", f"a height and a width up to {MAX_SIDE} pixels")
        latency = ranged(each, "latency", 0.0, "camera.latency")
        part = view.crop or (0, 0, spec.width, spec.height)
        found[name] = CameraFile(name, source, size, port + FRAMES_PORT + k, view, latency, of, part)
    return tuple(found.values())


def _read_name(table: Table, taken: Container[str], file: Table, port: int) -> str:
    """The name of a camera or device that publishes at a port."""
    name = table.text("name")
    if not _NAME.fullmatch(name) or name in taken:
        raise table.wrong("name", "a letter, then letters, digits and '_', that none before it has")
    if port > 65535:
        raise file.wrong(
            "port", "one with a free port after it for the state and for each camera and device, up to 65535"
        )
    return name


def _read_device(table: Table) -> Tuple[Source, CameraSpec]:
    """The camera of a table [[camera]], which is made for the size of its pictures."""
    source = Source.of(table, _OF_TABLE, CAMERAS, "camera")

    def fault(spec: CameraSpec) -> str:
        fits = all(type(n) is int and 0 < n <= MAX_SIDE for n in (spec.height, spec.width))
        return "" if fits else f"spec() needs a height and a width from 1 to {MAX_SIDE} pixels"

    return source, _spec(source, lambda: load_camera(source), fault)


def _read_arms(table: Table, size: int) -> Tuple[Optional[Arms], Optional[List[Any]]]:
    """Arms of [[kinematics.arm]], and their plain numbers. Keys of [kinematics] are those of all arms."""
    shared = table.table("kinematics", (*_ARM, "arm"))
    tables = shared.tables("arm", _ARM)
    if not shared.values:
        return None, None
    if not tables:
        raise shared.wrong("arm", "tables [[kinematics.arm]]")
    common = {key: value for key, value in shared.values.items() if key != "arm"}
    chains, joints, plain = [], [], []
    for each in tables:
        arm = Table(each.file, each.name, {**common, **each.values}, _ARM)
        links = []
        for link in arm.tables("links", ("offset", "axis")):
            offset, axis = link.vector("offset", 3, RANGES["links"]), link.vector("axis", 3)
            if abs(np.linalg.norm(axis) - 1) > 1e-6:
                raise link.wrong("axis", "a vector of length 1")
            links.append(Link(tuple(offset.tolist()), tuple(axis.tolist())))
        indices = arm.values.get("joints")
        if not isinstance(indices, list) or not all(type(j) is int and 0 <= j < size for j in indices):
            raise arm.wrong("joints", f"a list of joints, from 0 to {size - 1}")
        if not links or len(links) != len(indices):
            raise arm.wrong("links", f"a link for each of the {len(indices)} joints")
        base, yaw = arm.vector("base", 3, RANGES["kinematics"]), ranged(arm, "yaw", 0.0)
        tip = arm.vector("tip", 3, RANGES["links"])
        chains.append(Chain(base.tolist(), yaw, links, tip.tolist()))
        joints.append(indices)
        plain.append([base, yaw, links, tip, indices])
    if len({len(indices) for indices in joints}) > 1:
        raise shared.wrong("arm", "arms of as many joints each")
    return Arms(chains, joints, size), plain


def _read_step(table: Table, spec: DriverSpec, joints: np.ndarray, chains: Optional[Arms]) -> Step:
    """A step of a reset. `joints`: bool[J], those that are no gripper."""
    size = len(spec.low)
    if not table.values:
        raise ConfigError(f"empty in {table.file}, expected one of {', '.join(_STEP)}", parameter=table.name)
    own, arms = range(size), spec.arms or ((0, size),)
    if "arm" in table.values:
        own = range(*arms[table.whole("arm", 0, 0, len(arms) - 1)])
    grippers = tuple(j for j in spec.grippers if j in own)

    def spread(key: str, other: float, one: bool) -> np.ndarray:
        values = table.numbers(key, len(own), one=one)
        out = np.full(size, other)
        if values is not None:
            out[list(own)] = values
        return out

    random = spread("random", 0.0, one=True)
    if (random < 0).any():
        raise table.wrong("random", "numbers that are not negative")
    if not isinstance(table.values.get("random"), list):
        random[~joints] = 0.0  # one number is not for grippers
    check_relative(table, "random", random, spec, {"range": np.subtract(spec.high, spec.low, dtype=np.float64)})
    waits = table.values.get("wait") == "operator"
    low, high, why = RANGES["wait"]
    stands = 0.0 if waits else table.values.get("wait", 0.0)
    if type(stands) not in (int, float) or not low <= stands <= high:
        raise table.wrong("wait", f"'operator', or seconds up to {high:g} ({why})")
    new_object = table.flag("new_object", False)
    every = 0 if new_object and "every" not in table.values else table.whole("every", 1, *RANGES["every"])
    add, tips, relieve = spread("add", 0.0, one=False), (), False  # type: Tuple[np.ndarray, Tuple[int, ...], bool]
    height, pose = _read_tip(table)
    least = None
    if spec.targets == "poses":
        if pose is not None:
            raise table.wrong("pose", "no such key: this robot is commanded by poses. Write `joints`")
        of_tips = [first + 2 for first, end in arms if {*range(first, end)} <= {*own}]
        add[of_tips] += height
        height = 0.0
        relieve = table.values.get("relieve", False)
        also = sorted({*table.values} & {"joints", "add", "lift", "height", "random", "gripper", "set"})
        if relieve is not False and (relieve is not True or also):
            raise table.wrong("relieve", f"true, in a step without {', '.join(also) or 'another motion'}")
        if "height" in table.values:
            least = np.full(size, -np.inf)
            least[of_tips] = ranged(table, "height", 0.0)
    elif "relieve" in table.values:
        what = "no such key: this robot is commanded by joints, which hang below their set points"
        raise table.wrong("relieve", what)
    elif "height" in table.values:
        raise table.wrong("height", "no such key: this robot is commanded by joints. Write `lift`")
    elif height or pose is not None:
        inside = [] if chains is None else [k for k, its in enumerate(chains.joints) if {*its.tolist()} <= {*own}]
        tips, key = tuple(inside), "lift" if pose is None else "pose"
        if not tips:
            raise table.wrong(key, "the arm in [kinematics], which this needs")
        if pose is not None and len(tips) > 1:
            raise table.wrong("arm", "which arm the pose is for")
    return Step(
        spread("joints", np.nan, one=False), add, random, _read_gripper(table, grippers), grippers,
        table.table("set").values, every, waits,
        ranged(table, "speed", SPEED), tips, height, pose, least, float(stands), relieve, new_object,
    )  # fmt: skip


def _read_tip(table: Table) -> Tuple[float, Optional[np.ndarray]]:
    """How high a step lifts the tips, m, and the pose that it brings one to, float64[6]."""
    key = next((key for key in ("lift", "pose") if key in table.values), "")
    others = [each for each in ("pose", "joints", "add", "random") if each in table.values and each != key]
    if key and others:
        raise table.wrong(key, f"no {others[0]} in the same step. Make two steps of it")
    if isinstance(table.values.get("lift"), list):
        raise table.wrong("lift", "one number, m; numbers of joints are `add`")
    return ranged(table, "lift", 0.0), table.numbers("pose", 6, one=False, within=RANGES["pose"])


def _read_gripper(table: Table, grippers: Sequence[int]) -> Union[str, float]:
    if "gripper" not in table.values:
        return ""
    if not grippers:
        raise table.wrong("gripper", "no such key: the driver has no gripper there")
    value = table.values["gripper"]
    if not isinstance(value, str):
        return table.number("gripper", 0.0)
    if value not in ("open", "close", "keep"):
        raise table.wrong("gripper", "open, close, keep or a number")
    return value


def read_devices(table: Table, port: int, spec: DriverSpec) -> Tuple[DeviceFile, ...]:
    """Read tables [[device]]; opens nothing.

    `port`: of the first one's readings; `spec`: of the robot. Raises ConfigError: with the key and what is valid.
    """
    found: List[DeviceFile] = []
    taken: Dict[str, str] = {}  # serial port -> key that names it
    _take_ports(taken, "driver", table.values.get("driver"))
    for k, each in enumerate(table.tables("device", None)):
        name = _read_name(each, [device.name for device in found], table, port + k)
        source = Source.of(each, ("name", "driver", "arm"), HOSTED, "device")
        maker(source, HOSTED)
        _take_ports(taken, each.name, source.options)
        found.append(DeviceFile(name, source, port + k, each.whole("arm", -1, 0, len(spec.arms or (0,)) - 1)
                                if "arm" in each.values else -1))  # fmt: skip
    return tuple(found)


def _take_ports(taken: Dict[str, str], name: str, values: Any) -> None:
    """Note the serial ports in a table, also in those within it.

    Raises ConfigError: a port that another table has. One leader would move two arms, or disturb the robot's own bus.
    """
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if key != "port" or not isinstance(value, str):
            _take_ports(taken, f"{name}.{key}", value)
            continue
        other = taken.setdefault(os.path.realpath(value), f"{name}.{key}")
        if other != f"{name}.{key}":
            what = f"{value!r} is the port of {other} too, expected one of its own. Run: ls -l /dev/serial/by-id"
            raise ConfigError(what, parameter=f"{name}.{key}")


def check_poses(file: RobotFile, spec: DriverSpec) -> None:
    """Compare the park pose and the places of resets, with all that may be drawn, with each profile's limits.

    A place that depends on where a reset begins is compared as far as it is known. Raises ConfigError with the profile,
    the joint and its values.
    """
    park = () if file.park is None else (("park", Step.to(file.park)),)
    steps = file.reset or ((Step.to(spec.home),) if spec.home else ())
    for profile in file.profiles.values():
        way = _Way(file, profile, file.arms, len(spec.low))
        for due in (park, *_resets(steps)):
            way.lead(due)


def _resets(steps: Sequence[Step]) -> List[Tuple[Tuple[str, Step], ...]]:
    """The different resets that steps make, by the number of the episode and for a new object."""
    every = {1, *(step.every for step in steps if step.every)}
    episodes = {0, *(a * b for a in every for b in every)}
    due = (tuple(k for k, step in enumerate(steps) if step.due(episode, new)) for episode in sorted(episodes)
           for new in (False, True))  # fmt: skip
    return [tuple((f"reset.step[{k}]", steps[k]) for k in each) for each in dict.fromkeys(due)]


class _Way:
    """Follows steps under a profile from a place that is not known."""

    def __init__(self, file: RobotFile, profile: Profile, arms: Optional[Arms], size: int) -> None:
        self._file, self._profile, self._limits, self._arms = file, profile, profile.limits, arms
        self._size = size
        self._gate = None if self._limits.workspace is None else Gate(self._limits, 1.0, arms)

    def lead(self, steps: Sequence[Tuple[str, Step]]) -> None:
        low = high = np.full(self._size, np.nan)  # where each joint may be; nan: not known
        for name, step in steps:
            tips = {tip: self._led(name, step, tip, (low + high) / 2) for tip in step.tips}
            least = np.full(self._size, np.nan)
            if step.least is not None:
                least[np.isfinite(step.least)] = step.least[np.isfinite(step.least)]
            low, high = (step.goal(low, self._limits) - step.random, step.goal(high, self._limits) + step.random)
            for tip, there in tips.items():
                assert self._arms is not None
                joints = self._arms.joints[tip]
                low[joints] = high[joints] = there
            self._check(name, np.fmax(least, low), np.fmax(least, high))
            if step.relieve:
                joints = ~np.isin(np.arange(self._size), step.grippers)
                low[joints] = high[joints] = np.nan

    def _led(self, name: str, step: Step, tip: int, place: np.ndarray) -> np.ndarray:
        """Where a step leads the joints of an arm by its tip, from `place`, float64[J]; nan where that is not known."""
        assert self._arms is not None
        joints = self._arms.joints[tip]
        if np.isnan(place[joints]).any():
            return np.full(len(joints), np.nan)
        start = np.where(np.isnan(place), (self._limits.low + self._limits.high) / 2, place)
        try:
            return step._replace(tips=(tip,)).way(name, start, self._limits, self._arms)[-1, joints]  # type: ignore[no-any-return]
        except ConfigError as e:
            raise self._wrong(name, e.message) from e

    def _check(self, name: str, low: np.ndarray, high: np.ndarray) -> None:
        limits = self._limits
        outside = (low < limits.low) | (high > limits.high)  # not where it is not known
        if outside.any():
            j = int(np.argmax(outside))
            there = f"{low[j]:.4g}" if low[j] == high[j] else f"{low[j]:.4g} to {high[j]:.4g}"
            raise self._wrong(name, f"joint {j} would go to {there}, expected a place within this profile's "
                              f"{limits.low[j]:.4g} to {limits.high[j]:.4g}")  # fmt: skip
        if self._gate is not None and self._gate.outside((low + high)[None] / 2)[0] > 0:
            raise self._wrong(name, "the arms would leave this profile's workspace")

    def _wrong(self, name: str, what: str) -> ConfigError:
        ends = ": `end` could not park under it" if name == "park" else ""
        said = f"{name}: {what}{ends}. Widen the profile's limits in {self._file.path}, or change {name}"
        return ConfigError(said, parameter=f"profile.{self._profile.name}")
