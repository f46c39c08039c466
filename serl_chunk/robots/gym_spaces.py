"""How the spaces of a gymnasium environment become a state, cameras and a vector of actions, and what cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from serl_chunk.types import IMAGE_PREFIX, CameraSpec, ConfigError, DataError, Observation

Path = tuple[str, ...]

_LEAST_SIDE = 16  # pixels: a smaller matrix of another type than cameras' is taken for a history of vectors
_WRAPPERS = "docs/your_robot.md, section 2"  # has what the errors here point to


class ObservationLayout(NamedTuple):
    """Paths of state and cameras in an environment's observations; a flat observation has the path ()."""

    vectors: tuple[Path, ...]
    cameras: tuple[tuple[Path, CameraSpec], ...]
    state_dim: int

    @classmethod
    def of(cls, space: spaces.Space[Any]) -> ObservationLayout:
        """Return the layout of `space`; raise ConfigError naming an entry that is neither vector nor camera."""
        vectors: list[Path] = []
        cameras: dict[str, tuple[Path, CameraSpec]] = {}
        state_dim = 0
        for path, entry in _entries(space, ()):
            shape = _without_time(entry)
            if len(shape) == 1:
                vectors.append(path)
                state_dim += shape[0]
            elif len(shape) == 3 and shape[2] == 3 and entry.dtype == np.uint8:
                # HIL-SERL's "left/wrist": a column's name has one slash
                camera = "_".join(path[1:] if len(path) > 1 and path[0] == "images" else path) or "image"
                camera = camera.replace("/", "_")
                if camera in cameras:
                    name = "/".join(path)
                    raise ConfigError(f"observation {name!r}: camera {camera!r} exists already. Rename one of them")
                cameras[camera] = path, CameraSpec(camera, shape[0], shape[1])
            else:
                raise _refused(space, path, entry, shape)
        if not vectors:
            raise ConfigError(
                f"observation: no vector for the state. Add the joint positions, or a constant ({_WRAPPERS})"
            )
        return cls(tuple(vectors), tuple(cameras.values()), state_dim)

    def state(self, observation: Any) -> np.ndarray:
        """Return the state `float32[S]`, a copy; raise DataError if it is not S finite numbers."""
        vectors = ", ".join("/".join(path) or "observation" for path in self.vectors)
        parts = [_at(observation, path) for path in self.vectors]
        try:
            state = np.concatenate([np.ravel(part) for part in parts]).astype(np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(f"the environment's state: not numbers ({error}), of the vectors {vectors}") from error
        if state.shape != (self.state_dim,):
            raise DataError(f"the environment's state: wrong size (got {len(state)}, declared {self.state_dim})")
        if not np.isfinite(state).all():  # it would look like a diverged policy and spoil the training
            index = int(np.argmin(np.isfinite(state)))
            raise DataError(
                f"the environment's state: not finite (got state[{index}] = {state[index]}, of the vectors {vectors} "
                "in this order). Repair the sensor, or end the episode with an exception"
            )
        return state

    def frames(self, observation: Any) -> Observation:
        """Return copies of all frames, `{"images/<camera>": uint8[H, W, 3]}`; raise DataError for another shape."""
        frames = {}
        for path, spec in self.cameras:
            frame = np.asarray(_at(observation, path))
            frame = frame[0] if frame.ndim == 4 and len(frame) == 1 else frame
            if frame.shape != (spec.height, spec.width, 3) or frame.dtype != np.uint8:
                raise DataError(
                    f"camera {spec.name!r}: wrong frame (got {frame.dtype} {frame.shape}, declared uint8 "
                    f"{(spec.height, spec.width, 3)})"
                )
            frames[IMAGE_PREFIX + spec.name] = np.array(frame)
        return frames


class ActionLayout(NamedTuple):
    """An action space as one vector: a Box, or a Dict of Boxes, in its own order of keys."""

    space: spaces.Space[Any]
    low: np.ndarray  # float64[A]
    high: np.ndarray  # float64[A]
    whole: np.ndarray  # bool[A]: integers

    @classmethod
    def of(cls, space: spaces.Space[Any]) -> ActionLayout:
        """Return the layout of `space`; raise ConfigError, with a wrapper, unless it is of Boxes with limits."""
        if len(space.shape or ()) > 1 and isinstance(space, spaces.Box):
            raise ConfigError(
                f"the action space must have the shape (A,), got {space.shape}. Remove a wrapper that executes several "
                "actions per step, or flatten it: env = gymnasium.wrappers.TransformAction(env, lambda a: "
                f"a.reshape({space.shape}), gymnasium.spaces.flatten_space(env.action_space))"
            )
        boxes = [_box(entry, path) for path, entry in _entries(space, (), sort=False)]
        low, high = (np.concatenate([getattr(box, side).ravel() for box in boxes]) for side in ("low", "high"))
        whole = [np.full(box.low.size, box.dtype is not None and box.dtype.kind in "iub") for box in boxes]
        return cls(space, low.astype(np.float64), high.astype(np.float64), np.concatenate(whole))

    def bounded(self, action: np.ndarray) -> np.ndarray:
        """Return `action float32[A]` within the limits, integers rounded, as float64[A]."""
        # In float64: a limit of that type may lie within its float32 neighbour.
        values = np.clip(action.astype(np.float64), self.low, self.high)
        return np.where(self.whole, np.rint(values), values)

    def native(self, values: np.ndarray) -> Any:
        """Return the action of the environment's own space, of what `bounded` returned."""
        return spaces.unflatten(self.space, values)

    def flat(self, action: Any) -> Any:
        """Return an action of the environment's own space as one vector; what is none, unchanged."""
        if isinstance(self.space, spaces.Dict) and isinstance(action, Mapping):
            try:
                return spaces.flatten(self.space, action)
            except (KeyError, TypeError, ValueError):
                return action
        return action


def _box(entry: spaces.Space[Any], path: Path) -> spaces.Box:
    name = f"action {'/'.join(path)!r}" if path else "the action space"
    if isinstance(entry, spaces.Discrete) and not path:
        start = f"{entry.start} + " if entry.start else ""
        raise ConfigError(
            f"{name} must be a Box, got {entry}. Let the largest of {entry.n} numbers choose: env = gymnasium.wrappers."
            f"TransformAction(env, lambda a: {start}a.argmax(), gymnasium.spaces.Box(0, 1, ({entry.n},)))"
        )
    if not isinstance(entry, spaces.Box):
        raise ConfigError(
            f"{name} must be a Box, got {entry}. Wrap the environment: gymnasium.wrappers.TransformAction(env, func, "
            "gymnasium.spaces.Box(low, high, (A,))), whose func makes such an action of A numbers"
        )
    widths = entry.high.astype(np.float64) - entry.low
    if not entry.is_bounded("both") or not (widths < np.finfo(np.float32).max).all():
        keys = "".join(f"[{key!r}]" for key in path)
        raise ConfigError(
            f"{name} must have finite limits, got {entry}. Declare your robot's, such as env.action_space{keys} = "
            f'gymnasium.spaces.Box(-1, 1, {entry.shape}, "{entry.dtype}")'
        )
    return entry


def _refused(space: spaces.Space[Any], path: Path, entry: spaces.Space[Any], shape: tuple[int, ...]) -> ConfigError:
    """Return why an entry of observations is neither vector nor camera, and how to convert it or to leave it out."""
    name, got = "/".join(path) or "observation", f"{entry.dtype} {entry.shape}"
    ways = ["convert it with gymnasium.wrappers.TransformObservation"]
    if _flattens(space) and all(len(part.shape or ()) < 3 for _, part in _entries(space, ())):
        ways = ["make one vector of all: env = gymnasium.wrappers.FlattenObservation(env)"]
    if not isinstance(entry, spaces.Box):
        why = f"not a Box (got {type(entry).__name__})"
    elif (kind := _picture(shape, entry.dtype, name)) is not None:
        why = f"a {kind} is no camera (got {got}, expected uint8 (H, W, 3))"
        ways = [f"make it a camera ({_WRAPPERS})"]
    else:
        why = f"a history or matrix is not supported (got {got}, expected a vector (D,) or frames uint8 (H, W, 3))"
        ways.insert(0, "configure the environment for one observation (HIL-SERL: ChunkingWrapper(obs_horizon=1))")
    others = sorted({*space.spaces} - {*path}) if len(path) == 1 and isinstance(space, spaces.Dict) else []
    if others:
        ways.append(f"leave it out: env = gymnasium.wrappers.FilterObservation(env, {others})")
    way = ", or ".join(ways)
    return ConfigError(f"observation {name!r}: {why}. {way[:1].upper()}{way[1:]}")


def _flattens(space: spaces.Space[Any]) -> bool:
    try:
        return space.is_np_flattenable
    except NotImplementedError:  # of a space of the user's own
        return False


def _picture(shape: tuple[int, ...], dtype: Any, name: str) -> str | None:
    """Return the kind of picture that a matrix or a stack of three holds; None: a history, or other numbers."""
    depth, one = "depth" in name.lower(), len(shape) == 2 or 1 in (shape[0], shape[-1])
    large = sorted(shape)[-2] >= _LEAST_SIDE
    if not (large or depth or dtype in (np.uint8, np.uint16)) or len(shape) > 3:
        return None
    return "picture" if not one else "grey image" if dtype == np.uint8 and not depth else "depth image"


def _entries(space: spaces.Space[Any], path: Path, *, sort: bool = True) -> Iterator[tuple[Path, spaces.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for key in sorted(space.spaces) if sort else space.spaces:
            yield from _entries(space.spaces[key], (*path, key), sort=sort)
    else:
        yield path, space


def _without_time(entry: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the shape of a Box without a leading time axis of 1: (1, D) -> (D,), (1, H, W, 3) -> (H, W, 3); a scalar
    is (1,). That of another space is ().
    """
    if not isinstance(entry, spaces.Box):
        return ()
    shape = entry.shape or (1,)
    return shape[1:] if len(shape) in (2, 4) and shape[0] == 1 else shape


def _at(observation: Any, path: Path) -> Any:
    for key in path:
        if not isinstance(observation, Mapping) or key not in observation:
            name = "/".join(path)
            raise DataError(f"the environment's observation lacks {name!r}, which its observation space declares")
        observation = observation[key]
    return observation
