"""A robot's file, robot.toml: which driver, which limits, and what the robot does between episodes."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from serl_chunk_robot.control.motions import SPEED, Step
from serl_chunk_robot.drivers import BUILT_IN, CAMERAS
from serl_chunk_robot.drivers.base import Driver, DriverSpec
from serl_chunk_robot.drivers.camera import Camera, CameraSpec
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.geometry.kinematics import Arms, Chain, Link
from serl_chunk_robot.robot_file.camera_views import View, read_view
from serl_chunk_robot.robot_file.device_file import DeviceFile, read_devices
from serl_chunk_robot.robot_file.loading import Source, make
from serl_chunk_robot.robot_file.poses import check_poses
from serl_chunk_robot.robot_file.profiles import CAUTIOUS, Profile, read_profiles
from serl_chunk_robot.robot_file.ranges import RANGES, check_options, check_relative, ranged, spec_fault
from serl_chunk_robot.robot_file.toml_file import Table, read_toml, unknown
from serl_chunk_robot.wire.protocol import FRAMES_PORT, MAX_SIDE

PORT = 5600  # of commands; state is published at the next one, frames of cameras and readings of devices after it
HAIR = 0.05  # rad: an arm at a limit, as ALOHA's asleep, is measured a little beyond it

_KEYS = ("name", "driver", "host", "port", "rate", "start", "keys", "profile", "kinematics", "reset", "park", "effort",
         "needs_go", "camera", "device")  # fmt: skip
_STEP = ("joints", "add", "lift", "height", "pose", "random", "gripper", "arm", "set", "every", "wait", "speed",
         "relieve", "new_object")  # fmt: skip
_ARM = ("base", "yaw", "joints", "links", "tip")
_METHODS = ("spec", "connect", "read", "command", "hold", "set", "clear_faults", "stop", "close")
_CAMERA_METHODS = ("spec", "open", "read", "close")
_OF_TABLE = ("name", "driver", "latency", *View._fields)  # keys of [[camera]] that are no options of its class
_CAMERA_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


class CameraFile(NamedTuple):
    """A table [[camera]] of a robot's file."""

    name: str
    source: Source  # of the device
    spec: CameraSpec  # of what is published
    port: int  # at which its frames are published
    view: View = View()
    latency: float = 0.0  # s by which the camera's stamps are late
    of: str = ""  # the table whose device it is another view of; empty: it has its own


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

    Args:
        driver: replaces the file's.

    Raises:
        ConfigError: with the file, the key's dotted name, its value and what is valid.
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
    file = RobotFile(
        path, table.text("name"), driver or table.text("driver"), options, table.text("host", "127.0.0.1"),
        table.whole("port", PORT, *RANGES["port"]), ranged(table, "rate", 200.0) if "rate" in table.values else None,
        table.text("start", CAUTIOUS), keys,
    )  # fmt: skip
    spec = _spec(file)
    size = len(spec.low)
    if not table.flag("needs_go", True) and not spec.simulated:
        raise table.wrong(
            "needs_go",
            "true: the robot is not simulated (DriverSpec.simulated), and the person who cleared it may still be near. "
            "It moves once an operator runs `serl-chunk robot go`",
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
        devices=read_devices(table, file.port + FRAMES_PORT + len(cameras), spec),
        needs_go=table.flag("needs_go", True),
    )  # fmt: skip


def checked(file: RobotFile, spec: DriverSpec, q: Optional[np.ndarray] = None) -> None:
    """Compare a file with the connected robot, before anything moves.

    Args:
        q: measured joints, float64[J].

    Raises:
        ConfigError: another number of joints, limits beyond the driver's, a rate that it cannot, an unknown profile to
            start with, a pose outside that profile's limits; or a park pose or a place of a reset that any profile's
            limits do not hold.
    """
    if file.start not in file.profiles:
        what = f"unknown profile ({file.start!r} in {file.path})"
        raise unknown("start", file.start, list(file.profiles), what)
    slowest = max(RANGES["rate"].low, 1 / spec.tick)
    if file.rate is not None and not slowest <= file.rate <= spec.rate:
        raise ConfigError(f"{file.rate:g} Hz in {file.path}, expected {slowest:g} to {spec.rate:g} Hz, "
                          "which the driver can", parameter="rate")  # fmt: skip
    for name, profile in file.profiles.items():
        limits = profile.limits
        if len(limits.low) != len(spec.low):
            raise ConfigError(f"{len(limits.low)} joints in {file.path}, expected the driver's {len(spec.low)}",
                              parameter=f"profile.{name}")  # fmt: skip
        for key, beyond, value, bound in (
            ("low", limits.low < np.array(spec.low), limits.low, spec.low),
            ("high", limits.high > np.array(spec.high), limits.high, spec.high),
            ("velocity", limits.rates.velocity > np.array(spec.velocity), limits.rates.velocity, spec.velocity),
        ):
            if beyond.any():
                j = int(np.argmax(beyond))
                raise ConfigError(f"{value[j]:g} of joint {j} in {file.path} is beyond the driver's {bound[j]:g}",
                                  parameter=f"profile.{name}.{key}")  # fmt: skip
    check_poses(file, spec)
    if q is not None:
        limits = file.profiles[file.start].limits
        outside = np.maximum(limits.low - q, q - limits.high)
        if not outside.max() <= HAIR:
            j = int(np.argmax(np.where(np.isnan(outside), np.inf, outside)))
            raise ConfigError(f"joint {j} is at {q[j]:.3f}, expected {limits.low[j]:g} to {limits.high[j]:g}. Move it "
                              f"there by hand, or widen the limits in {file.path}.",
                              parameter=f"profile.{file.start}")  # fmt: skip


def load_driver(file: RobotFile) -> Driver:
    """Make the driver that a file names; connects to nothing. Raises ConfigError, as `loading.make`."""
    return make(_driver(file), BUILT_IN, _METHODS)  # type: ignore[no-any-return]


def load_camera(source: Source) -> Camera:
    """Make the camera that a file names; opens nothing. Raises ConfigError, as `loading.make`."""
    return make(source, CAMERAS, _CAMERA_METHODS)  # type: ignore[no-any-return]


def _driver(file: RobotFile) -> Source:
    return Source(file.path, file.driver, file.options, "driver", "driver")


def _spec(file: RobotFile) -> DriverSpec:
    try:
        spec = load_driver(file).spec()
        sizes = {len(spec.low), len(spec.high), len(spec.velocity)}
        fault = spec_fault(spec) if len(sizes) == 1 else "spec() needs as many of low, high and velocity"
    except ConfigError:
        raise
    except Exception as e:
        raise _driver(file).failed("spec() failed", e) from e
    if spec.targets == "poses":
        places = [len([i for i in range(*arm) if i not in spec.grippers]) for arm in spec.arms or ((0, len(spec.low)),)]
        if set(places) != {6}:
            raise _driver(file).failed(f"spec() says poses, and arms of {places} numbers and grippers. Each has 6")
    elif spec.targets != "joints":
        raise _driver(file).failed(f"spec() has targets {spec.targets!r}, expected 'joints' or 'poses'")
    if fault or sizes == {0}:
        raise _driver(file).failed(fault or "spec() has no joints")
    if len(spec.effort) not in (0, len(spec.low)) or not all(limit > 0 for limit in spec.effort):
        raise _driver(file).failed("spec() needs no limits of effort, or one above 0 for each joint")
    return spec


def _read_cameras(table: Table, port: int) -> Tuple[CameraFile, ...]:
    """Tables [[camera]]. `port`: of the server."""
    found: Dict[str, CameraFile] = {}
    devices: Dict[str, Tuple[Source, CameraSpec]] = {}
    for k, each in enumerate(table.tables("camera", None)):
        name = each.text("name")
        if not _CAMERA_NAME.fullmatch(name):
            raise each.wrong("name", "a letter, then letters, digits and '_'")
        if name in found:
            raise each.wrong("name", "a name that no camera before has")
        if port + FRAMES_PORT + k > 65535:
            raise table.wrong("port", "one with a free port after it for the state and for each camera, up to 65535")
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
        found[name] = CameraFile(name, source, size, port + FRAMES_PORT + k, view, latency, of)
    return tuple(found.values())


def _read_device(table: Table) -> Tuple[Source, CameraSpec]:
    """The camera of a table [[camera]], which is made for the size of its pictures."""
    source = Source.of(table, _OF_TABLE, CAMERAS, "camera")
    try:
        spec = load_camera(source).spec()
        fits = all(type(n) is int and 0 < n <= MAX_SIDE for n in (spec.height, spec.width))
    except ConfigError:
        raise
    except Exception as e:  # of a lab's code
        raise source.failed("spec() failed", e) from e
    if not fits:
        raise source.failed(f"spec() needs a height and a width from 1 to {MAX_SIDE} pixels")
    return source, spec


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
        links = [_read_link(link) for link in arm.tables("links", ("offset", "axis"))]
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


def _read_link(table: Table) -> Link:
    offset, axis = table.vector("offset", 3, RANGES["links"]), table.vector("axis", 3)
    if abs(np.linalg.norm(axis) - 1) > 1e-6:
        raise table.wrong("axis", "a vector of length 1")
    x, y, z = offset.tolist()
    u, v, w = axis.tolist()
    return Link((x, y, z), (u, v, w))


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
    widths = np.array(spec.high, np.float64) - np.array(spec.low, np.float64)
    check_relative(table, "random", random, spec, {"range": widths})
    waits, stands = _read_wait(table)
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
        raise table.wrong(
            "relieve", "no such key: this robot is commanded by joints, which hang below their set points"
        )
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
        ranged(table, "speed", SPEED), tips, height, pose, least, stands, relieve, new_object,
    )  # fmt: skip


def _read_wait(table: Table) -> Tuple[bool, float]:
    """Whether a step waits for the operator at its end, and the seconds for which it stands there."""
    wait = table.values.get("wait", 0.0)
    if wait == "operator":
        return True, 0.0
    low, high, why = RANGES["wait"]
    if type(wait) not in (int, float) or not low <= wait <= high:
        raise table.wrong("wait", f"'operator', or seconds up to {high:g} ({why})")
    return False, float(wait)


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
