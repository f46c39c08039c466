"""Which arrays of a foreign data set are the state, the action and the cameras, and in which order.

A table names them, `state=joint_pos+gripper_pos,action=actions,camera.wrist=wrist_cam`; several conventions need none.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serl_chunk.data.source import Tables, natural_sort_key
from serl_chunk.io import os_faults
from serl_chunk.types import STATE, ConfigError, DataError, Episode, RobotSpec

_ENTRY = "::"  # between the path that a table belongs to, and the table
_KEYS = "state, action, camera.NAME, reward, success, actions_are"
_EXAMPLE = "state=joint_pos+gripper_pos,action=actions,camera.wrist=wrist_cam"
_GRIPPER = re.compile(r"grip|finger|effector|jaw|claw", re.IGNORECASE)
_JOINT = re.compile(r"joint|qpos|arm", re.IGNORECASE)
_NO_STATE = re.compile(
    r"action|reward|done|terminat|truncat|success|time|stamp|index|mask|discount|vel|effort|torque|force|wrench|stat(e)?s$"
    r"|^next|[/.]next|image|depth|camera|intrinsic|extrinsic|init|goal",
    re.IGNORECASE,
)
_OUTSIDE = 0.05  # share of the steps on which a number may leave the robot's range
_MARGIN = 0.1  # of the range, by which it may
_FAR = 0.05  # of the range: nearer than this a state follows its command
_TRIED = 10  # arrays of which all combinations are tried for a state of the robot's size
_PARTS = ("eef_pos", "eef_quat", "gripper_qpos")

# Names of one episode's arrays that make the state, in this order: those that must be there, and those that may.
CONVENTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "LeRobot": (("observation.state",), ()),
    "openpi": (("state",), ()),
    "robomimic": ((), (*(f"obs/robot{i}_{part}" for i in (0, 1) for part in _PARTS), "obs/object")),
    "Isaac Lab": (("obs/eef_pos", "obs/eef_quat", "obs/gripper_pos"), ("obs/object",)),
    "Minari": (("observations",), ()),
    "ManiSkill": (("obs",), ()),
    "plain": (("obs/state",), ()),
    "plain observations": (("observations/state",), ()),
}
_ACTIONS = ("action", "actions")
_REWARDS = ("next.reward", "reward", "rewards")
_SUCCESSES = ("success", "next.success", *(f"infos/{n}" for n in ("success", "is_success", "succeed", "goal_achieved")))
_CAMERA_PARTS = ("rgb", "color", "colour", "image", "images", "data")


class ArrayInfo(NamedTuple):
    """An array of one episode."""

    dtype: str
    shape: tuple[int, ...]  # rows first
    image: bool = False  # frames, raw uint8[T, H, W, 3] or encoded
    names: tuple[str, ...] = ()  # of its columns, where they are recorded

    @property
    def text(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class Part(NamedTuple):
    """Columns `first <= c < last` of array `name`; all of them with None."""

    name: str
    first: int | None = None
    last: int | None = None

    @property
    def text(self) -> str:
        return self.name if self.first is None else f"{self.name}[{self.first}:{self.last}]"


@dataclasses.dataclass(frozen=True)
class Fields:
    """Names of arrays; "" and () where none is named, `cameras` None for those that are found."""

    state: tuple[Part, ...]
    action: tuple[Part, ...]
    cameras: tuple[tuple[str, str], ...] | None = None  # camera, array
    reward: str = ""
    success: str = ""
    difference: bool | None = None  # actions are differences from the state (all but grippers'), None: not said
    convention: str = ""  # that they follow; "" for a table

    @property
    def text(self) -> str:
        """The table."""
        cameras = [f"camera.{camera}={name}" for camera, name in self.cameras or ()]
        more = {"reward": self.reward, "success": self.success}
        if self.difference is not None:
            more["actions_are"] = "difference" if self.difference else "absolute"
        parts = [f"state={_sum(self.state)}", f"action={_sum(self.action)}", *cameras]
        return ",".join([*parts, *(f"{key}={value}" for key, value in more.items() if value)])

    def names(self) -> tuple[str, ...]:
        """Return the arrays of numbers that are read."""
        names = [*(part.name for part in (*self.state, *self.action)), self.reward, self.success]
        return tuple(dict.fromkeys(filter(None, names)))


def _sum(parts: Iterable[Part]) -> str:
    return "+".join(part.text for part in parts)


def parse_fields(text: str, parameter: str = "fields") -> Fields:
    """Parse a table, such as the module's. Raises ConfigError."""

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"{what}. Write KEY=ARRAY with {_KEYS}, such as {_EXAMPLE}", parameter=parameter)

    given: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        key, equals, value = map(str.strip, entry.partition("="))
        if not equals or not value:
            raise wrong(f"{entry!r} names no array")
        if key in given:
            raise wrong(f"{key} is given twice")
        given[key] = value
    cameras = {key.removeprefix("camera."): given.pop(key) for key in list(given) if key.startswith("camera.")}
    if missing := [key for key in ("state", "action") if key not in given]:
        raise wrong(f"{text!r} does not name the {' and the '.join(missing)}")
    kind = given.pop("actions_are", "")
    if kind not in ("", "absolute", "difference"):
        raise wrong(f"actions_are={kind!r} is neither absolute nor difference")
    state, action = (_parts(given.pop(key), wrong) for key in ("state", "action"))
    reward, success = (given.pop(key, "") for key in ("reward", "success"))
    if given:
        raise wrong(f"{', '.join(given)}: no such key")
    difference = None if not kind else kind == "difference"
    return Fields(state, action, tuple(cameras.items()) or None, reward, success, difference)


def _parts(text: str, wrong: Callable[[str], ConfigError]) -> tuple[Part, ...]:
    out = []
    for part in map(str.strip, text.split("+")):
        match = re.fullmatch(r"([^\[\]]+)(?:\[(\d+)(?::(\d+))?\])?", part)
        if match is None or (match[3] and int(match[3]) <= int(match[2])):
            raise wrong(f"{part!r} is no array, and no columns of one (joint_pos[0:6], joint_pos[6])")
        first = int(match[2]) if match[2] else None
        last = None if first is None else int(match[3]) if match[3] else first + 1
        out.append(Part(match[1], first, last))
    return tuple(out)


def parse_tables(texts: Sequence[str], parameter: str = "fields") -> Tables:
    """Parse `TABLE` or `PATH::TABLE`, or files that hold one of these a line. Raises ConfigError."""
    out: list[tuple[str, str]] = []
    for text in texts:
        lines = [text]
        if "=" not in text:
            path = Path(text).expanduser()
            with os_faults(ConfigError, f"--{parameter} {text}: neither a table nor a file that can be read"):
                lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines:
            if line.strip() and not line.lstrip().startswith("#"):
                path_text, found, table = line.rpartition(_ENTRY)
                parse_fields(table, parameter)
                of = str(Path(path_text.strip()).expanduser().resolve()) if found else ""
                out.append((of, table.strip()))
    return tuple(out)


def table_of(tables: Tables, path: Path) -> Fields | None:
    """Return the table for what lies at `path`: of that path, a folder above or a pattern, else the one for all."""
    path = path.expanduser().resolve()
    for of, table in sorted(tables, key=lambda entry: -len(entry[0])):
        if not of or path == Path(of) or Path(of) in path.parents or path.match(of):
            return parse_fields(table)
    return None


def resolve(
    where: object, table: Fields | None, arrays: Mapping[str, ArrayInfo], flag: str, spec: RobotSpec | None
) -> Fields:
    """Return `table` with the full names of `arrays`, or the fields that a convention finds among them.

    `flag` and the robot `spec` are for the table that an error proposes. Raises DataError, which lists the arrays and
    ends in a table to begin with: none fits, or a name is not there.
    """
    if table is None:
        found = _conventional(arrays)
        if found is None:
            raise unnamed(where, "its arrays follow no known convention", arrays, flag, spec)
        return found

    def full(name: str, image: bool) -> str:
        wanted = [
            n for n, about in arrays.items() if about.image == image and re.search(rf"(^|[/.]){re.escape(name)}$", n)
        ]
        chosen = [n for n in wanted if n == name] or [n for n in wanted if not n.startswith("next_")] or wanted
        if len(chosen) == 1:
            return chosen[0]
        what = "camera" if image else "array of numbers"
        which = f"{name!r} may be {', '.join(chosen)}" if chosen else f"no {what} is called {name!r}"
        raise unnamed(where, which, arrays, flag, spec)

    def parts(of: tuple[Part, ...]) -> tuple[Part, ...]:
        out = tuple(part._replace(name=full(part.name, False)) for part in of)
        for part in out:
            width = int(np.prod(arrays[part.name].shape[1:]))
            if (part.last or 0) > width:
                raise unnamed(where, f"{part.text}: {part.name} has {width} columns", arrays, flag, spec)
        return out

    cameras = None if table.cameras is None else tuple((camera, full(name, True)) for camera, name in table.cameras)
    return dataclasses.replace(
        table, state=parts(table.state), action=parts(table.action),
        cameras=_cameras(arrays) if cameras is None else cameras,
        reward=full(table.reward, False) if table.reward else _first(_REWARDS, arrays),
        success=full(table.success, False) if table.success else _first(_SUCCESSES, arrays),
    )  # fmt: skip


def unnamed(
    where: object, reason: str, arrays: Mapping[str, ArrayInfo], flag: str, spec: RobotSpec | None
) -> DataError:
    """Return the error that lists the `arrays` of an episode and ends in a line ready to paste."""
    if not arrays:
        return DataError(f"{where}: {reason}: an episode of it holds no array of numbers or images")
    listed = "".join(f"\n  {name} {about.text}" for name, about in arrays.items())
    return DataError(
        f"{where}: {reason}. The arrays of an episode:{listed}\nName those that are the state, in its order, the "
        f"action and the cameras:\n  {flag} {_guess(arrays, spec).text}"
    )


def _first(names: Iterable[str], arrays: Mapping[str, ArrayInfo]) -> str:
    return next((name for name in names if name in arrays), "")


def _conventional(arrays: Mapping[str, ArrayInfo]) -> Fields | None:
    action = _first(_ACTIONS, arrays)
    # Of gymnasium's Dict and Tuple spaces all numbers are the state, in the order of the spaces.
    inner = sorted((name for name in arrays if name.startswith("observations/")), key=natural_sort_key)
    spaces = tuple(name for name in inner if not arrays[name].image)
    for convention, (needed, optional) in {**CONVENTIONS, "Minari's spaces": (spaces, ())}.items() if action else ():
        state = [name for name in (*needed, *optional) if name in arrays]
        if state and set(needed) <= set(state) and not any(arrays[name].image for name in state):
            cameras = _cameras(arrays)
            return Fields(
                tuple(map(Part, state)), (Part(action),), cameras, _first(_REWARDS, arrays),
                _first(_SUCCESSES, arrays), convention=convention,
            )  # fmt: skip
    return None


def _cameras(arrays: Mapping[str, ArrayInfo]) -> tuple[tuple[str, str], ...]:
    """Cameras by the last part of their arrays' names that says which."""
    out: dict[str, str] = {}
    for name, about in arrays.items():
        if about.image and not name.startswith("next_"):
            parts = name.split("/")
            said = [part for part in parts if part not in (*_CAMERA_PARTS, "obs", "observation", "observations")]
            camera = (said or parts)[-1].removeprefix("observation.images.").removeprefix("observation.")
            camera = camera.removesuffix("_image").removesuffix("_rgb") if "/" in name else camera
            out[name.replace("/", "_") if camera in out else camera] = name
    return tuple(sorted(out.items()))


def _guess(arrays: Mapping[str, ArrayInfo], spec: RobotSpec | None) -> Fields:
    """A table to begin with: the arrays whose names look like it, each by its full name, of the robot's sizes."""
    numbers = {name: about for name, about in arrays.items() if not about.image and 1 <= len(about.shape) <= 2}
    action = _first(_ACTIONS, numbers) or next((n for n in numbers if "action" in n and "next" not in n), "ACTIONS")
    vectors = [n for n, about in numbers.items() if len(about.shape) == 2 or _GRIPPER.search(n)]
    floats = [n for n in vectors if numbers[n].dtype.startswith("float")]
    state = [n for n in floats if n != action and not _NO_STATE.search(n)]
    sizes = {n: int(np.prod(numbers[n].shape[1:])) for n in state}
    some = [n for n in state if _JOINT.search(n) or _GRIPPER.search(n)]
    likely = some if any(_JOINT.search(n) for n in some) else state
    few = state[:_TRIED]
    parts = itertools.chain([likely], *(itertools.combinations(few, k) for k in range(1, len(few) + 1)))
    fits = (list(p) for p in parts if spec is None or sum(sizes[n] for n in p) == spec.state_dim)
    state = next(fits, likely)
    state.sort(key=lambda n: bool(_GRIPPER.search(n)))
    return Fields(tuple(map(Part, state)) or (Part("STATE"),), (Part(action),), _cameras(arrays))


def concatenated(parts: Sequence[Part], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return the columns of `parts` side by side, float32[N, D]; `read` gives an array [N, ...]."""
    out = []
    for part in parts:
        values = read(part.name)
        values = values.reshape(len(values), -1)
        out.append(values if part.first is None else values[:, part.first : part.last])
    return np.concatenate(out, axis=1)


def column_names(parts: Sequence[Part], arrays: Mapping[str, ArrayInfo]) -> list[str]:
    """Return a name of each column of `parts`: the recorded one, else by its array."""
    out: list[str] = []
    for part in parts:
        about = arrays[part.name]
        width = int(np.prod(about.shape[1:]))
        known = about.names if len(about.names) == width else [f"{part.name}[{i}]" for i in range(width)]
        out += [part.name] if width == 1 else known[part.first : part.last]
    return out


def absolute(where: str, fields: Fields, state: np.ndarray, action: np.ndarray, spec: RobotSpec | None) -> np.ndarray:
    """Return `action` [T, A] as absolute commands, if the fields say that it holds differences from `state` [T, S].

    Grippers' are absolute as they are (openpi's convention). Raises DataError.
    """
    if not fields.difference:
        return action
    if spec is None:
        raise DataError(f"{where}: differences become commands by the robot's joints. Set exp_name to its experiment")
    out = action.copy()
    if action.shape[1] == spec.action_dim and state.shape[1] == spec.state_dim:  # else refused by its width
        for i, joint in enumerate(spec.joint_of_action):
            if joint >= 0 and i not in spec.grippers:
                out[:, i] += state[:, joint]
    return out


def _fitting(names: Sequence[str], what: str, values: np.ndarray) -> Sequence[str]:
    """`names` of the columns of `values`, or their numbers where a file has it wrong."""
    return names if len(names) == values.shape[1] else [f"{what}[{i}]" for i in range(values.shape[1])]


def check_order(
    where: str, fields: Fields, columns: tuple[Sequence[str], Sequence[str]], episode: Episode, spec: RobotSpec | None
) -> None:
    """Raise DataError where states and actions are in another order than the robot's, or of another kind.

    By names: a gripper's number must be one of the robot's. By range: commands lie within the robot's limits. By
    motion, for joints: a command is near the joint that it moves, nearer than to any other, and no difference.

    Args:
        columns: names of the numbers of a state and of an action.
    """
    if spec is None:
        return
    state, action = episode.steps.observation[STATE], episode.steps.action
    columns = _fitting(columns[0], "state", state), _fitting(columns[1], "action", action)
    joints, low, high = np.array(spec.joint_of_action), np.array(spec.action_low), np.array(spec.action_high)
    remedy = "Correct the table's order: NAME[0:6]+OTHER[0] takes columns one by one"

    def fail(text: str) -> DataError:
        return DataError(f"{where}: {text}. {remedy}. The table: {fields.text}")

    grippers = {i: int(joints[i]) for i in spec.grippers}
    for names, own in ((columns[0], {j for j in grippers.values() if j >= 0}), (columns[1], set(grippers))):
        called = {i for i, name in enumerate(names) if _GRIPPER.search(name)}
        if called and own and called.isdisjoint(own):
            what = "state" if names is columns[0] else "action"
            raise fail(
                f"{names[min(called)]} is number {min(called)} of the {what}, the robot's gripper is number "
                f"{', '.join(map(str, sorted(own)))}"
            )
    moved = [i for i in np.flatnonzero(joints >= 0).tolist() if i not in grippers]
    span = high - low
    if moved and len(action) > 1:
        now, command = state[:, joints[moved]], action[:, moved]
        near, size = np.abs(command - now).sum(), np.abs(command).sum()
        if fields.difference is None and near > size / 2:
            if size < near / 2 or np.abs(now).sum() > 4 * size:
                raise DataError(
                    f"{where}: the actions look like differences from the state, the robot takes absolute joints. "
                    "Add actions_are=difference to the table (or actions_are=absolute, if they are none)"
                )
            raise DataError(
                f"{where}: the actions are far from the state (on average {near / size:.1f} of their size), so that "
                "the order is wrong, or they are differences, or in other units. Add actions_are=absolute or "
                f"actions_are=difference to the table, or correct its order. The table: {fields.text}"
            )
        distance = np.median(np.abs(command[:-1, :, None] - state[1:, None, :]), axis=0)  # [moved, S]
        for k, i in enumerate(moved):
            own_distance, best = distance[k, joints[i]], int(distance[k].argmin())
            if own_distance > _FAR * span[i] and distance[k, best] < own_distance / 4:
                raise fail(f"{columns[1][i]} follows {columns[0][best]}, and not {columns[0][joints[i]]}")
    for names, values, limits in (
        (columns[1], action, range(spec.action_dim)),
        (columns[0], state[:, joints], [i for i in range(spec.action_dim) if joints[i] >= 0]),
    ):
        for i in limits:
            outside = (values[:, i] < low[i] - _MARGIN * span[i]) | (values[:, i] > high[i] + _MARGIN * span[i])
            if outside.mean() > _OUTSIDE:
                name = names[i] if values is action else names[joints[i]]
                raise fail(
                    f"{name} lies in {values[:, i].min():.4g}..{values[:, i].max():.4g}, the robot's number {i} in "
                    f"{low[i]:.4g}..{high[i]:.4g}"
                )
