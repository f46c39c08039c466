"""Observations in messages: openpi's names of states, cameras and prompts, and a robot's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, Observation, RobotSpec
from serl_chunk_robot.wire.codec import WireError

FLAT = "observation/"
PROMPT = "prompt"
JOINTS, GRIPPER = f"{FLAT}joint_position", f"{FLAT}gripper_position"  # DROID's two parts of a state
Size = tuple[int, int]  # height, width


class ObservationReader:
    """Reads a robot's observations out of requests.

    Two forms are read: ALOHA's, `state` and `images` {camera: uint8[3, H, W] or [H, W, 3]}, and flat names,
    `observation/state` (or DROID's joint and gripper position) and `observation/CAMERA`. Both have a `prompt`. Other
    values are ignored, as openpi ignores them.

    Args:
        spec: of the robot.
        sizes: of frames that are taken, by camera that the policy reads: the robot's, and the agent's.
        task: of requests without a prompt; None: they are refused.
    """

    def __init__(self, spec: RobotSpec, sizes: Mapping[str, Sequence[Size]], task: str | None = "") -> None:
        self._spec, self._sizes, self._task = spec, sizes, task

    def read(self, values: Mapping[str, Any]) -> tuple[Observation, str]:
        """Return a raw observation, float32[S] and uint8[H, W, 3], and the task. Raises WireError naming the field."""
        observation: dict[str, np.ndarray] = {STATE: self._state(values)}
        for camera, sizes in self._sizes.items():
            name, value = self._frame(values, camera)
            observation[IMAGE_PREFIX + camera] = _image(name, value, sizes)
        return observation, self._prompt(values)

    def _state(self, values: Mapping[str, Any]) -> np.ndarray:
        valid = f"expected {self._spec.state_dim} finite numbers"
        name = next((n for n in (STATE, f"{FLAT}{STATE}") if n in values), "")
        parts = [values[name]] if name else [values[n] for n in (JOINTS, GRIPPER) if n in values]
        name = name or JOINTS
        if not parts:
            raise WireError(
                f"{STATE}: missing (got {_listed(values)}; {valid}). Send it as {STATE!r} or {FLAT + STATE!r}"
            )
        try:
            numbers = [np.asarray(part) for part in parts]
        except ValueError as error:
            raise WireError(f"{name}: no array ({valid}). Send one array of numbers") from error
        if any(n.dtype.kind not in "iuf" or n.ndim > 1 for n in numbers):
            got = ", ".join(f"{n.dtype}{list(n.shape)}" for n in numbers)
            raise WireError(f"{name}: got {got}, {valid}. Send one array of numbers, without a batch's axis")
        with np.errstate(over="ignore"):
            state = np.concatenate([np.atleast_1d(n) for n in numbers]).astype(np.float32)
        if len(state) != self._spec.state_dim:
            raise WireError(f"{name}: got {len(state)} numbers, {valid}. Send the state of robot {self._spec.name!r}")
        if not np.isfinite(state).all():
            i = int(np.flatnonzero(~np.isfinite(state))[0])
            raise WireError(f"{name}[{i}]: got {state[i]}, {valid}. Check the robot's sensors")
        return state

    def _frame(self, values: Mapping[str, Any], camera: str) -> tuple[str, Any]:
        nested = values.get("images")
        if isinstance(nested, Mapping) and camera in nested:
            return f"images.{camera}", nested[camera]
        flat = (IMAGE_PREFIX + camera, FLAT + camera, f"{FLAT}{IMAGE_PREFIX}{camera}", f"{FLAT}{camera}_image")
        for name in flat:
            if name in values:
                return name, values[name]
        got = _listed([*values, *(f"images.{name}" for name in nested)] if isinstance(nested, Mapping) else values)
        raise WireError(
            f"images.{camera}: missing (got {got}). Send a frame of every camera, {', '.join(self._sizes)}, as "
            f"images.{camera} or {FLAT}{camera}"
        )

    def _prompt(self, values: Mapping[str, Any]) -> str:
        prompt = values.get(PROMPT, self._task)
        if prompt is None:
            raise WireError(f"{PROMPT}: missing, and the robot has several tasks. Send the task in words")
        if not isinstance(prompt, str):
            raise WireError(f"{PROMPT}: got {type(prompt).__name__}, expected text. Send the task in words")
        return prompt


def _image(name: str, value: Any, sizes: Sequence[Size]) -> np.ndarray:
    """Return a frame uint8[H, W, 3] of one of `sizes`, from channels first or last."""
    valid = " or ".join(f"uint8[3, {h}, {w}]" for h, w in dict.fromkeys(sizes))
    if not isinstance(value, np.ndarray):
        raise WireError(f"{name}: got {type(value).__name__}, expected an array, {valid}. Send the frame's pixels")
    if value.dtype == np.uint8 and value.ndim == 3:
        if value.shape[2] == 3 and value.shape[:2] in sizes:
            return value
        if value.shape[0] == 3 and value.shape[1:] in sizes:
            return np.ascontiguousarray(value.transpose(1, 2, 0))
    raise WireError(
        f"{name}: got {value.dtype}{list(value.shape)}, expected {valid}, or channels last. Send the camera's "
        "frames as they are"
    )


def _listed(names: Any) -> str:
    shown = [str(name)[:60] for name in names]
    return ", ".join(shown[:12]) + (", ..." if len(shown) > 12 else "") or "nothing"


class _Entry(NamedTuple):
    name: str  # in the request
    read: Callable[[Observation], np.ndarray]


class ObservationWriter:
    """Makes requests of a robot's observations.

    Args:
        spec: of the robot.
        entries: `NAME=SOURCE` each; SOURCE is `state`, `state[a:b]` or `images/CAMERA`. Frames keep channels last.
            Empty: ALOHA's form with all cameras of the robot.
        parameter: the setting that gave `entries`.

    Raises ConfigError for an entry of another form.
    """

    def __init__(self, spec: RobotSpec, entries: Sequence[str] = (), parameter: str = "entries") -> None:
        self._entries: list[_Entry] = []
        self.cameras: tuple[str, ...] = () if entries else tuple(c.name for c in spec.cameras)
        """Cameras whose frames are sent."""
        for text in entries:
            name, equals, source = text.partition("=")
            if not (name and equals):
                raise ConfigError(
                    f"got {text!r}, expected NAME=SOURCE. Write it as observation/state=state", parameter=parameter
                )
            self._entries.append(_Entry(name, self._source(source, spec, parameter)))

    def _source(self, source: str, spec: RobotSpec, parameter: str) -> Callable[[Observation], np.ndarray]:
        if source.startswith(IMAGE_PREFIX):
            camera = spec.camera(source.removeprefix(IMAGE_PREFIX)).name
            self.cameras = tuple(dict.fromkeys((*self.cameras, camera)))
            return lambda observation: observation[source]
        match = re.fullmatch(r"state(?:\[(\d+):(\d+)\])?", source)
        if match is None or (match[1] and not int(match[1]) < int(match[2]) <= spec.state_dim):
            raise ConfigError(
                f"unknown source {source!r} (expected state, state[a:b] within {spec.state_dim} numbers, or "
                "images/CAMERA). Correct it",
                parameter=parameter,
            )
        part = slice(int(match[1]), int(match[2])) if match[1] else slice(None)
        return lambda observation: observation[STATE][part]

    def write(self, observation: Observation, task: str) -> dict[str, Any]:
        if self._entries:
            return {**{entry.name: entry.read(observation) for entry in self._entries}, PROMPT: task}
        images = {c: np.ascontiguousarray(observation[IMAGE_PREFIX + c].transpose(2, 0, 1)) for c in self.cameras}
        return {STATE: observation[STATE].astype(np.float64), "images": images, PROMPT: task}
