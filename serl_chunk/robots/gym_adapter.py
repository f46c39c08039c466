"""Any gymnasium environment behind the package's contract: the way to bring your own robot.

Section 1 of docs/your_robot.md lists how observations, rewards, ends and `info` are read. HIL-SERL reports its time
limit as `done`: an end without success or declared failure on the last permitted tick is therefore a truncation.
"""

from __future__ import annotations

import enum
import inspect
import logging
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from serl_chunk.config.fields import require
from serl_chunk.config.loader import user_error
from serl_chunk.config.robots import GymConfig
from serl_chunk.extras import choose_opengl, opengl_error
from serl_chunk.robots.base import Expert, InterventionSource, RobotEnv
from serl_chunk.robots.gym_spaces import ActionLayout, ObservationLayout
from serl_chunk.types import (
    IMAGE_PREFIX,
    SUCCESS_REWARD,
    ConfigError,
    DataError,
    Observation,
    RobotSpec,
    SerlChunkError,
    UserCodeError,
    success_step,
)

logger = logging.getLogger(__name__)

_COUNTERS = ("_elapsed_steps", "curr_path_length")  # of time limits: gymnasium's TimeLimit, HIL-SERL's environments
SUCCESS_KEYS = ("succeed", "is_success", "success", "next.success")
ACTION_KEYS = ("intervene_action", "teleop_action", "action_intervention")
FLAG_KEYS = ("is_intervention", "intervene_flag")  # the second one is RLinf's, next to HIL-SERL's action

_OF_OLD_GYM = re.compile(r"got an unexpected keyword argument '(seed|options)'|values to unpack \(expected [25]")
_RETURNED_BY_OLD_GYM = (("reset", 1), ("step", 4))  # so many values
_UNDERSTOOD = frozenset((*ACTION_KEYS, *FLAG_KEYS))
_LIKE_INTERVENTION = re.compile(
    r"interven|teleop|take_?over|^(is_|by_)?human($|_(action|acts|active|command|control|input|override))"
)


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
            old = any(base.__module__.partition(".")[0] == "gym" for base in type(env).__mro__)
            wrapper = "shimmy's GymV26CompatibilityV0(env=env), or GymV21CompatibilityV0 before gym 0.26"
            way = wrapper if old else "a class of gymnasium.Env, such as OldGym of docs/your_robot.md, section 2"
            raise ConfigError(
                f"must return a gymnasium.Env, got {type(env).__name__}. Wrap it in {way}", parameter="robot.make"
            )
        self.env: gymnasium.Env[Any, Any] = env
        self._layout = ObservationLayout.of(env.observation_space)
        self._actions = ActionLayout.of(env.action_space)
        self._set_spaces(_spec(config, env, self._actions, self._layout), images)
        for name in ("init_states", "tasks"):
            texts = env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else ()
            if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):  # LeRobot's is a bool
                setattr(self, name, tuple(texts))
        self._last: Any = None  # the environment's last observation
        self._looked = False  # whether frames have been requested
        self._shown = False  # whether those of the last observation have been
        self._numbers: dict[str, int] = {}  # of its frames
        self._rewards: list[float] = []  # of the episode
        self._reports = False  # whether `info` has ever had a key of success
        self._warned = False  # of its absence

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        super().reset(seed=seed)
        self._last, info = self._returned("reset", 2, seed=seed, options=options)
        if self.tasks:
            self.task = self._begun_task((options or {}).get("task", ""))
        self._rewards, self._shown, self._numbers = [], False, _frame_numbers(info)
        return self._observe(), {**plain_info(info, self.robot_spec.name), "success": False}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Execute `action float32[A]`, clipped to the action space; where that has integers, rounded.

        `info["executed_action"] float32[A]` is the environment's own report, else the human's action, else the clipped
        one. `info["intervene_action"] float32[A]` is present on a human's ticks only. Raises DataError for an action
        (the human's too) that is not A finite numbers, for an unknown report of an intervention, and for a reward that
        is not finite.
        """
        bounded = self._actions.bounded(self._checked(action))
        given, native = bounded.astype(np.float32), self._actions.native(bounded)
        # Copied before the report of an intervention: the environment may reuse its buffers.
        seen = self._layout.frames(self._last) if self._looked and not self._shown else {}
        self._last, reward, terminated, truncated, native_info = self._returned("step", 5, native)
        self._shown, self._numbers = False, _frame_numbers(native_info)

        info = plain_info(native_info, self.robot_spec.name)
        human = human_action(info, self.robot_spec.name)
        info.pop("intervene_action", None)
        if human is not None:
            key, command = human
            info["intervene_action"] = given = self._checked(self._actions.flat(command), f'info["{key}"]')
            info["intervene_images"] = seen
        executed = self._actions.flat(info.get("executed_action", given))
        info["executed_action"] = self._checked(executed, 'info["executed_action"]')
        self._rewards.append(self._reward(reward))
        self._reports |= any(key in info for key in SUCCESS_KEYS)
        terminated, truncated = bool(terminated), bool(truncated)
        limit = len(self._rewards) >= self.robot_spec.max_episode_steps
        ends = terminated or truncated or limit
        info["success"] = success = succeeded(info) or (ends and self._rewarded(info, terminated))

        judged = success or is_true(info.get("failure"))
        if limit or is_true(info.get("rerecord_episode")):
            terminated, truncated = False, True
        terminated = terminated or judged
        return self._observe(), self._rewards[-1], terminated, truncated and not terminated, info

    def read_images(self, cameras: Sequence[str] | None = None) -> Observation:
        if self._last is None:
            raise gymnasium.error.ResetNeeded("reset the environment before reading its cameras")
        frames, self._looked, self._shown = self._layout.frames(self._last), True, True
        if cameras is None:
            return frames
        return {IMAGE_PREFIX + self.robot_spec.camera(c).name: frames[IMAGE_PREFIX + c] for c in cameras}

    def _begun_task(self, wanted: str) -> str:
        found: Any = self.env.get_wrapper_attr("task") if self.env.has_wrapper_attr("task") else None
        if found not in self.tasks or wanted not in ("", found):
            valid = repr(wanted) if wanted else ", ".join(map(repr, self.tasks))
            raise ConfigError(
                f"robot {self.robot_spec.name!r}: its environment's attribute task is {found!r} after a reset "
                f'(expected {valid}). Let reset begin the task of options["task"] and set task to its text, or remove '
                "the attribute tasks (docs/your_robot.md)"
            )
        return found

    def _observe(self) -> Observation:
        return self._observed(self._layout.state(self._last))

    def _returned(self, method: str, values: int, *given: Any, **options: Any) -> Sequence[Any]:
        """Return what the environment's `method` returns, so many values of which the last is `info`.

        Raises UserCodeError for an exception in it, ConfigError where it is not gymnasium's or cannot render.
        """
        name = self.robot_spec.name
        try:
            returned = getattr(self.env, method)(*given, **options)
        except SerlChunkError:
            raise
        except Exception as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            caller = frame.f_globals.get("__name__", "").partition(".")[0]
            if caller in ("serl_chunk", "gymnasium") and _OF_OLD_GYM.search(str(error)):  # else of the user's own calls
                raise _other_api(name, f"{method}() is old gym's, before 0.26 ({error})") from error
            known = opengl_error(error, f"the environment of robot {name!r}")  # a frame may be drawn here
            raise known or user_error(error, f"{method}()", kind=UserCodeError) from error
        several = returned if isinstance(returned, tuple | list) else (returned,)
        if len(several) == values and isinstance(several[-1], Mapping):
            return several
        old = "old gym's, before 0.26" if (method, len(several)) in _RETURNED_BY_OLD_GYM else "not gymnasium's"
        got = ", ".join(type(value).__name__ for value in several)
        raise _other_api(name, f"{method}() is {old} (it returned {got}, expected {values} values, the last a dict)")

    def _reward(self, reward: Any) -> float:
        try:
            given = float(np.asarray(reward).item())  # HIL-SERL's classifiers give arrays of one element
        except (TypeError, ValueError) as error:
            raise DataError(f"robot {self.robot_spec.name!r}: the reward is no number (got {reward!r})") from error
        if not np.isfinite(given):
            raise DataError(f"robot {self.robot_spec.name!r}: the reward is not finite (got {given})")
        return given

    def _rewarded(self, info: Mapping[Any, Any], terminated: bool) -> bool:
        """Return whether the rewards show a success at an episode's end, where no key reports one; warn of it once."""
        judged = any(is_true(info.get(key)) for key in ("failure", "rerecord_episode"))
        if self._reports or judged or (most := max(self._rewards)) < SUCCESS_REWARD:
            return False
        success = terminated and success_step(self._rewards) == len(self._rewards) - 1
        if not self._warned:
            self._warned = True
            counts = "counts as one: it alone is above 0, and its step terminated" if success else "is none"
            logger.warning(
                f"robot {self.robot_spec.name!r} reports no success, and a reward of {most:g} {counts}. Decide it in "
                "your environment: info['success'], true or false, on every step (docs/your_robot.md, section 1)"
            )
        return success

    def frame_numbers(self) -> Mapping[str, int]:
        return self._numbers

    def restart_limit(self) -> None:
        self._rewards = []
        layer: Any = self.env
        while layer is not None:
            for counter in _COUNTERS:
                if isinstance(vars(layer).get(counter), int):
                    setattr(layer, counter, 0)
            layer = vars(layer).get("env")

    def make_expert(self) -> Expert:
        return self._made_by("make_expert", ("reset", "act"), "record demonstrations by hand")

    def make_scripted_human(self) -> InterventionSource:
        needed = ("reset", "poll", "close")
        return self._made_by("make_scripted_human", needed, "set actor.intervention to none or a file")

    def close(self) -> None:
        try:
            self.env.close()
        except Exception as error:  # which must not hide what ended the episode
            logger.warning(f"robot {self.robot_spec.name!r} is not closed: {user_error(error, 'close()')}")

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


def _other_api(robot: str, what: str) -> ConfigError:
    return ConfigError(
        f"robot {robot!r}: its {what}. Let reset(*, seed=None, options=None) return (observation, info), and "
        "step(action) return (observation, reward, terminated, truncated, info), or wrap env.unwrapped in OldGym of "
        "docs/your_robot.md, section 2"
    )


def _spec(
    config: GymConfig, env: gymnasium.Env[Any, Any], actions: ActionLayout, layout: ObservationLayout
) -> RobotSpec:
    limit, steps = getattr(env.unwrapped, "max_episode_length", None), config.time_limit  # HIL-SERL's
    if isinstance(limit, int) and limit < steps:
        seconds = config.max_episode_s is not None
        field, most = ("max_episode_s", limit / config.control_hz) if seconds else ("max_episode_steps", limit)
        raise ConfigError(
            f"later than the environment's own end, which looks like a failure (got {steps} ticks, expected at most "
            f"its max_episode_length={limit}). Set robot.{field}={most:g}",
            parameter=f"robot.{field}",
        )
    dim = len(actions.low)
    joints = config.joint_of_action or (-1,) * dim
    count = f"must have {dim} entries, one per action dimension, got {len(joints)}"
    require(len(joints) == dim, "robot.joint_of_action", count)
    place = f"must be action dimensions in 0..{dim - 1}, got {config.grippers}"
    require(all(0 <= g < dim for g in config.grippers), "robot.grippers", place)
    return RobotSpec(
        name=config.robot_name,
        control_hz=config.control_hz,
        state_dim=layout.state_dim,
        action_low=tuple(map(float, actions.low)),
        action_high=tuple(map(float, actions.high)),
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
