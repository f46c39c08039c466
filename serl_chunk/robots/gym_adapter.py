"""Any gymnasium environment behind the package's contract: the way to bring your own robot.

Section 1 of docs/your_robot.md lists how observations, rewards, ends and `info` are read. HIL-SERL reports its time
limit as `done`: an end without success or declared failure on the last permitted tick is therefore a truncation.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from serl_chunk.config.fields import require
from serl_chunk.config.loader import user_error
from serl_chunk.config.robots import GymConfig
from serl_chunk.extras import choose_opengl, opengl_error
from serl_chunk.robots.base import Expert, InterventionSource, RobotEnv
from serl_chunk.types import IMAGE_PREFIX, CameraSpec, ConfigError, DataError, Observation, RobotSpec, SerlChunkError

Path = tuple[str, ...]
SUCCESS_KEYS = ("succeed", "is_success", "success", "next.success")
ACTION_KEYS = ("intervene_action", "teleop_action", "action_intervention")
FLAG_KEYS = ("is_intervention", "intervene_flag")  # the second one is RLinf's, next to HIL-SERL's action

_UNDERSTOOD = frozenset((*ACTION_KEYS, *FLAG_KEYS))
_LIKE_INTERVENTION = re.compile(
    r"interven|teleop|take_?over|^(is_|by_)?human($|_(action|acts|active|command|control|input|override))"
)


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
            name = "/".join(path) or "observation"
            if not isinstance(entry, spaces.Box):
                raise ConfigError(
                    f"observation {name!r}: not a Box space (got {type(entry).__name__}). Convert it with "
                    "gymnasium.wrappers.TransformObservation, or drop it with FilterObservation"
                )
            shape = _without_time(entry.shape, name)
            if len(shape) == 1:
                vectors.append(path)
                state_dim += shape[0]
            elif len(shape) == 3 and shape[2] == 3 and entry.dtype == np.uint8:
                # HIL-SERL's "left/wrist": a column's name has one slash
                camera = "_".join(path[1:] if len(path) > 1 and path[0] == "images" else path) or "image"
                camera = camera.replace("/", "_")
                if camera in cameras:
                    raise ConfigError(f"observation {name!r}: camera {camera!r} exists already. Rename one of them")
                cameras[camera] = path, CameraSpec(camera, shape[0], shape[1])
            else:
                raise ConfigError(
                    f"observation {name!r}: wrong shape or type (got {entry.dtype} {entry.shape}, expected a vector "
                    "(D,) or camera frames uint8 (H, W, 3), each with at most a leading axis of 1). Convert it with "
                    "gymnasium.wrappers.TransformObservation"
                )
        if not vectors:
            raise ConfigError("observation: no vector for the state. Add the joint positions")
        return cls(tuple(vectors), tuple(cameras.values()), state_dim)

    def state(self, observation: Any) -> np.ndarray:
        """Return the state `float32[S]`, a copy; raise DataError if it is not S finite numbers."""
        state = np.concatenate([np.ravel(_at(observation, path)) for path in self.vectors]).astype(np.float32)
        if state.shape != (self.state_dim,):
            raise DataError(f"the environment's state: wrong size (got {len(state)}, declared {self.state_dim})")
        if not np.isfinite(state).all():  # it would look like a diverged policy and spoil the training
            index = int(np.argmin(np.isfinite(state)))
            vectors = ", ".join("/".join(path) or "observation" for path in self.vectors)
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


def call_factory(make: Callable[..., Any], *leading: Any, fake_env: bool, evaluating: bool) -> Any:
    """Return `make(*leading, fake_env, evaluating)`, without `evaluating` for a factory that has no such parameter."""
    try:
        takes_evaluating = "evaluating" in inspect.signature(make).parameters
    except ValueError:  # a built-in without a signature
        takes_evaluating = False
    return make(*leading, fake_env, **({"evaluating": evaluating} if takes_evaluating else {}))


def gym_spec(config: GymConfig) -> RobotSpec:
    """Return the specification of the environment that `config.make` builds with `fake_env`."""
    env = GymAdapter(config, fake_env=True)
    env.close()
    return env.robot_spec


class GymAdapter(RobotEnv):
    """The environment that `config.make` builds, as a RobotEnv.

    `read_images` returns the frames of the last observation. With `fake_env` only the spaces are used. Raises
    ConfigError if the environment's spaces cannot be used, with a suitable wrapper, and if it cannot render.
    """

    frames_with_observation = True

    def __init__(
        self, config: GymConfig, *, fake_env: bool = False, evaluating: bool = False, images: str = "on_request"
    ) -> None:
        assert config.make is not None  # GymConfig refuses None
        choose_opengl()
        try:
            env = call_factory(config.make, fake_env=fake_env, evaluating=evaluating)
        except SerlChunkError:
            raise
        except Exception as error:
            user = f"the environment of robot {config.robot_name!r}"
            raise (opengl_error(error, user) or user_error(error, "make()")) from error
        if not isinstance(env, gymnasium.Env):
            raise ConfigError(f"must return a gymnasium.Env, got {type(env).__name__}", parameter="robot.make")
        self.env: gymnasium.Env[Any, Any] = env
        self._layout = ObservationLayout.of(env.observation_space)
        self._box = _checked_actions(env.action_space)
        self._set_spaces(_spec(config, env, self._box, self._layout), images)
        self._last: Any = None  # the environment's last observation
        self._looked = False  # whether frames have been requested
        self._shown = False  # whether those of the last observation have been
        self._numbers: dict[str, int] = {}  # of its frames
        self._tick = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        super().reset(seed=seed)
        try:
            self._last, info = self.env.reset(seed=seed, options=options)
        except Exception as error:  # the first frame may be drawn here
            if sentence := opengl_error(error, f"the environment of robot {self.robot_spec.name!r}"):
                raise sentence from error
            raise
        self._tick, self._shown, self._numbers = 0, False, _frame_numbers(info)
        return self._observe(), {**plain_info(info, self.robot_spec.name), "success": False}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Execute `action float32[A]`, clipped to the action space.

        `info["executed_action"] float32[A]` is the environment's own report, else the human's action, else the clipped
        one. `info["intervene_action"] float32[A]` is present on a human's ticks only. Raises DataError for an action
        (the human's too) that is not A finite numbers, for an unknown report of an intervention, and for a reward that
        is not finite.
        """
        given = np.clip(self._checked(action), self._low, self._high)
        # Clipped again in the environment's type: a float64 limit may lie within its float32 neighbour.
        native = np.clip(given.astype(self._box.dtype), self._box.low, self._box.high)
        # Copied before the report of an intervention: the environment may reuse its buffers.
        seen = self._layout.frames(self._last) if self._looked and not self._shown else {}
        self._last, reward, terminated, truncated, native_info = self.env.step(native)
        self._shown, self._numbers = False, _frame_numbers(native_info)
        self._tick += 1

        info = plain_info(native_info, self.robot_spec.name)
        human = human_action(info, self.robot_spec.name)
        info.pop("intervene_action", None)
        if human is not None:
            key, command = human
            info["intervene_action"] = given = self._checked(command, f'info["{key}"]')
            info["intervene_images"] = seen
        info["executed_action"] = self._checked(info.get("executed_action", given), 'info["executed_action"]')
        info["success"] = success = succeeded(info)
        given_reward = float(np.asarray(reward).item())  # HIL-SERL's classifiers give arrays of one element
        if not np.isfinite(given_reward):
            raise DataError(f"robot {self.robot_spec.name!r}: the reward is not finite (got {given_reward})")

        judged = success or is_true(info.get("failure"))
        if self._tick >= self.robot_spec.max_episode_steps or is_true(info.get("rerecord_episode")):
            terminated, truncated = False, True
        terminated = bool(terminated) or judged
        return self._observe(), given_reward, terminated, bool(truncated) and not terminated, info

    def read_images(self, cameras: Sequence[str] | None = None) -> Observation:
        if self._last is None:
            raise gymnasium.error.ResetNeeded("reset the environment before reading its cameras")
        frames, self._looked, self._shown = self._layout.frames(self._last), True, True
        if cameras is None:
            return frames
        return {IMAGE_PREFIX + self.robot_spec.camera(c).name: frames[IMAGE_PREFIX + c] for c in cameras}

    def _observe(self) -> Observation:
        return self._observed(self._layout.state(self._last))

    def frame_numbers(self) -> Mapping[str, int]:
        return self._numbers

    def make_expert(self) -> Expert:
        return self._made_by("make_expert", ("reset", "act"), "record demonstrations by hand")

    def make_scripted_human(self) -> InterventionSource:
        needed = ("reset", "poll", "close")
        return self._made_by("make_scripted_human", needed, "set actor.intervention to none or a file")

    def close(self) -> None:
        self.env.close()

    def _made_by(self, factory: str, methods: tuple[str, ...], otherwise: str) -> Any:
        name, needed = self.robot_spec.name, ", ".join(f"{m}()" for m in methods)
        if not self.env.has_wrapper_attr(factory):
            raise ConfigError(
                f"robot {name!r}: its environment has no {factory}(). Add the method, its result with {needed} "
                f"(docs/your_robot.md), or {otherwise}"
            )
        made = self.env.get_wrapper_attr(factory)()
        missing = [m for m in methods if not callable(getattr(made, m, None))]
        if missing:
            raise ConfigError(
                f"robot {name!r}: the result of {factory}() has no {missing[0]}() (got {type(made).__name__}, expected "
                f"an object with {needed})"
            )
        return made


def _spec(config: GymConfig, env: gymnasium.Env[Any, Any], box: spaces.Box, layout: ObservationLayout) -> RobotSpec:
    limit, steps = getattr(env.unwrapped, "max_episode_length", None), config.time_limit  # HIL-SERL's
    if isinstance(limit, int) and limit < steps:
        seconds = config.max_episode_s is not None
        field, most = ("max_episode_s", limit / config.control_hz) if seconds else ("max_episode_steps", limit)
        raise ConfigError(
            f"later than the environment's own end, which looks like a failure (got {steps} ticks, expected at most "
            f"its max_episode_length={limit}). Set robot.{field}={most:g}",
            parameter=f"robot.{field}",
        )
    dim, joints = box.shape[0], config.joint_of_action or (-1,) * box.shape[0]
    count = f"must have {dim} entries, one per action dimension, got {len(joints)}"
    require(len(joints) == dim, "robot.joint_of_action", count)
    place = f"must be action dimensions in 0..{dim - 1}, got {config.grippers}"
    require(all(0 <= g < dim for g in config.grippers), "robot.grippers", place)
    return RobotSpec(
        name=config.robot_name,
        control_hz=config.control_hz,
        state_dim=layout.state_dim,
        action_low=tuple(map(float, box.low)),
        action_high=tuple(map(float, box.high)),
        joint_of_action=joints,
        grippers=config.grippers,
        cameras=tuple(spec for _, spec in layout.cameras),
        max_episode_steps=config.time_limit,
    )


def _frame_numbers(info: Mapping[str, Any]) -> dict[str, int]:
    numbers = info.get("frame_numbers", {})
    if not isinstance(numbers, Mapping) or not all(isinstance(n, int | np.integer) for n in numbers.values()):
        raise DataError(f'info["frame_numbers"] must map cameras to whole numbers, got {numbers!r}')
    return {str(camera).replace("/", "_"): int(n) for camera, n in numbers.items()}


def _checked_actions(space: spaces.Space[Any]) -> spaces.Box:
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise ConfigError(f"the action space must be a Box of floating-point numbers, got {space}")
    if len(space.shape) != 1:
        raise ConfigError(
            f"the action space must have the shape (A,), got {space.shape}. Flatten it with "
            "gymnasium.wrappers.TransformAction, or remove a wrapper that executes several actions per step"
        )
    if not np.isfinite([space.low, space.high]).all():
        raise ConfigError(
            f"the action space must have finite limits, got {space}. Declare them, or wrap the environment with "
            "gymnasium.wrappers.RescaleAction"
        )
    return space


def _entries(space: spaces.Space[Any], path: Path) -> Iterator[tuple[Path, spaces.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for key in sorted(space.spaces):
            yield from _entries(space.spaces[key], (*path, key))
    else:
        yield path, space


def _without_time(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Return `shape` without a leading time axis of 1: (1, D) -> (D,), (1, H, W, 3) -> (H, W, 3); a scalar is (1,)."""
    if len(shape) not in (2, 4) or shape[-1] == 0:
        return shape or (1,)
    if shape[0] != 1:
        raise ConfigError(
            f"observation {name!r}: a history of {shape[0]} observations is not supported (got shape {shape}). "
            "Configure the environment for one (HIL-SERL: ChunkingWrapper(obs_horizon=1)). A camera's frames need "
            "three colours, (H, W, 3)"
        )
    return shape[1:]


def _at(observation: Any, path: Path) -> Any:
    for key in path:
        if not isinstance(observation, Mapping) or key not in observation:
            name = "/".join(path)
            raise DataError(f"the environment's observation lacks {name!r}, which its observation space declares")
        observation = observation[key]
    return observation


def plain_info(native: Mapping[Any, Any], robot: str) -> dict[Any, Any]:
    """Return a copy of `info` with members of enumerations replaced by their values, as keys.

    Raises DataError for an unknown key that looks like an intervention: its actions would be recorded as the policy's.
    """
    info = {key.value if isinstance(key, enum.Enum) else key: value for key, value in native.items()}
    for key in info:
        if isinstance(key, str) and key not in _UNDERSTOOD and _LIKE_INTERVENTION.search(key.lower()):
            raise DataError(
                f'info["{key}"] of robot {robot!r}: unknown report of an intervention. Rename it in a wrapper to '
                'info["intervene_action"], on the human\'s ticks only, or to info["is_intervention"] with '
                'info["teleop_action"]; remove it if it is something else'
            )
    return info


def human_action(info: Mapping[Any, Any], robot: str) -> tuple[str, Any] | None:
    """Return key and value of a human's command on this tick; None if no human acted.

    A flag decides; without one, HIL-SERL's action is present on a human's ticks only. Raises DataError for an
    intervention without its action, and for LeRobot's action without its flag.
    """
    flags = [key for key in FLAG_KEYS if key in info]
    acting = [key for key in flags if is_true(info[key])]
    if flags and not acting:
        return None
    key = next((key for key in ACTION_KEYS if info.get(key) is not None), None)
    if key is None and acting:
        raise DataError(
            f'info["{acting[0]}"] of robot {robot!r}: true without the human\'s command. Add it as '
            "info['intervene_action'] or info['teleop_action']"
        )
    lerobot = None if flags else next((key for key in ACTION_KEYS[1:] if info.get(key) is not None), None)
    if lerobot is not None:
        raise DataError(
            f'info["{lerobot}"] of robot {robot!r}: present without info["is_intervention"]. Add the flag on every '
            "tick: gym-hil reports this action on the policy's ticks too"
        )
    return None if key is None else (key, info[key])


def succeeded(info: Mapping[Any, Any]) -> bool:
    """Return whether the environment, or its operator's key, reports success."""
    return any(is_true(info.get(key)) for key in SUCCESS_KEYS)


def is_true(value: Any) -> bool:
    """Return whether a flag is true: one element of an array suffices. None is false."""
    return value is not None and bool(np.any(value))
