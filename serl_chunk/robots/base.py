"""The environment contract, a gymnasium Env with what a control loop needs in addition, and a base of simulations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np

from serl_chunk.types import IMAGE_PREFIX, STATE, CameraSpec, ConfigError, DataError, Observation, RobotSpec

StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]  # reward, terminated, truncated, info


AS_IS = "as-is"  # the init state that a reset leaves: the robot goes to its start, and nothing else is moved


def seed_of(init_state: str) -> int | None:
    """Return N of the init state `seed-N`, the start that every robot has after `reset(seed=N)`; None for another."""
    number = init_state.removeprefix("seed-")
    return int(number) if number != init_state and number.isdecimal() else None


def check_apart(envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
    """Raise ConfigError where two robots are one environment, as where a function keeps the one that it made."""
    inner = []
    for env in envs:
        while isinstance(within := getattr(env, "env", None), gymnasium.Env):
            env = within
        inner.append(env)
    if len(set(map(id, inner))) < len(inner):
        raise ConfigError(
            f"{len(inner)} environments at once must be as many objects, and two calls of robot.make returned the same "
            "one. Let it make a new one in each call, or give --n_envs 1",
            parameter="n_envs",
        )


class RobotEnv(gymnasium.Env[Observation, np.ndarray]):
    """A robot, real or simulated.

    `reset` and `step` return `{"state": float32[S]}`. Cameras are read by `read_images` on request, because rendering
    or decoding three cameras costs more than a control tick. Built with `images="always"`, both also return
    `images/<camera>`.

    Actions are `float32[A]` in the robot's units. `info["success"]` is a bool; `info["failure"]` marks a declared
    failure; `info["executed_action"]` is the command after the driver's limits (absent: unchanged).
    `info["lost_ticks"]`: for so many ticks before this observation the robot did not follow what it was sent; the plan
    is dropped and no window of training goes on. `info["fault"]`: in words, why the robot truncated the episode.
    `info["unseen"]`: in words, why a frame of this observation is not one to decide on; the robot holds meanwhile.
    `info["intervene_action"]` is present on ticks on which the environment itself let a human intervene;
    `executed_action` is then what the driver made of it, and `info["intervene_images"]` has the frames of the
    observation that the human acted on, if they were not requested. An environment truncates itself at its time limit.

    The control loop calls `send` and `receive`. A robot that lives in another process overrides both: `send` does not
    wait, and with `answers_late` the result is received when the next tick begins.

    `reset(seed=, options={"init_state": id})` restores one of `init_states`; `seed` seeds what is random after it. A
    robot with several `tasks` begins the one of `options={"task": text}`; without, they come in the order of the seeds.
    Where `as-is` is an init state, two of its tasks can undo each other (`actor.turns`).

    Optional: `make_expert() -> Expert`, a scripted demonstrator, and `make_scripted_human() -> InterventionSource`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it so
    robot_spec: RobotSpec
    images: str = "on_request"  # or "always"
    frames_with_observation: bool = False  # `read_images` returns what `reset` and `step` have received already
    starts_repeat: bool | None = None  # whether two resets with one seed agreed, once they have been compared
    init_states: Sequence[str] = ()  # ids of saved states that `reset` restores; a seed's start is none of them
    tasks: Sequence[str] = ()  # the texts of its tasks, where it has several
    task: str = ""  # that of the episode as of its reset, where it has several; else the experiment's holds
    goes_on: bool = False  # it can be stepped beyond its own success or failure, up to the time limit
    answers_late: bool = False  # the result of a tick is there at its end, not when `send` returns
    paced: bool = False  # the caller keeps the rate; else `receive` waits for the end of the tick
    conditions: str = ""  # JSON of what this episode is moved under, as of its reset; recorded with the episode
    stop: Callable[[], str | None] = staticmethod(lambda: None)  # polled where `reset` waits for a person
    may_move: Callable[[], bool] = staticmethod(lambda: True)  # polled where `reset` begins a motion, until it is true
    observes_again: bool = False  # `observe_again` exists: after a reset the robot may stand and be observed later
    _result: StepResult

    def check_init_state(self, name: str, task: str = "") -> None:
        """Raise ConfigError unless `reset` can restore the saved state `name`; `task`: the episode's, of several."""
        states = self.states_of(task) if task else self.init_states
        if name not in states:
            valid = ", ".join(states[:10]) + (", ..." if len(states) > 10 else "")
            raise ConfigError(
                f"robot {self.robot_spec.name} cannot restore init state {name!r} (expected seed-N"
                f"{f', {valid}' if valid else ': it has no saved states'}). Choose another start"
            )

    def check_task(self, text: str) -> None:
        """Raise ConfigError unless `reset` can begin the task `text`, of a robot that has several."""
        if self.tasks and text not in self.tasks:
            valid = ", ".join(map(repr, dict.fromkeys(self.tasks)))
            raise ConfigError(
                f"robot {self.robot_spec.name} has no task {text!r} (expected {valid}). Choose others (group.tasks), "
                "or give actor and learner the same robot"
            )

    def states_of(self, task: str) -> Sequence[str]:
        """Return those of `init_states` that a task can begin in."""
        return self.init_states

    def send(self, command: np.ndarray) -> None:
        """Command one tick, `float32[A]`."""
        raw, reward, terminated, truncated, info = self.step(command)
        self._result = raw, float(reward), terminated, truncated, info

    def receive(self) -> StepResult:
        """Return what `step` returns, of the tick that was sent last. Called once after each `send`."""
        return self._result

    def read_images(self, cameras: Sequence[str] | None = None) -> Observation:
        """Read the current frames, `{"images/<camera>": uint8[H, W, 3]}`; all cameras by default.

        They are recorded without copying: a driver that reuses its buffers returns copies. Raises ConfigError for an
        unknown camera.
        """
        specs = self.robot_spec.cameras if cameras is None else [self.robot_spec.camera(name) for name in cameras]
        return {IMAGE_PREFIX + c.name: self._frame(c.name) for c in specs}

    def watch(self, cameras: Sequence[str]) -> None:
        """Expect that the episodes to come read these cameras. A robot whose cameras may fail gives `info["unseen"]` of
        them, and waits for them in `reset`.
        """

    def frame_numbers(self) -> Mapping[str, int]:
        """Return the sequence numbers of the last returned frames by camera; a camera without one is left out.
        Optional.

        A camera that is slower than the control rate repeats frames, which are recorded once. Frames with different
        numbers are not compared; others are the same only if their bytes are, so that a stuck counter loses no frame.
        """
        return {}

    def observe_again(self) -> Observation:
        """Return a new first observation, of a robot that has stood since its reset; see `observes_again`."""
        raise NotImplementedError

    def restart_limit(self) -> None:
        """Count the time limit from here on: the human who is to move the robot has not yet."""

    def rest(self) -> None:
        """Let the robot stand: an episode has ended, and no command follows before the next reset."""

    def idle(self) -> None:
        """Do what is to be done meanwhile, where the caller waits between episodes. Called many times a second."""

    def hindrances(self) -> Sequence[tuple[str, str]]:
        """Return why the robot cannot begin an episode, each with its remedy. It never waits."""
        return ()

    def camera_ages(self) -> Mapping[str, float]:
        """Return the age of the newest frame of each camera that is read, in seconds, where it is known."""
        return {}

    def _frame(self, camera: str) -> np.ndarray:
        raise NotImplementedError

    def _begin_task(self, seed: int | None, options: Mapping[str, Any]) -> None:
        """Take the task that a reset names, or, without, the one whose turn it is, of those that have its state."""
        if not (text := options.get("task", "")):
            number, state = int(self.np_random.integers(2**31)) if seed is None else seed, options.get("init_state")
            able = [task for task in self.tasks if state is None or state in self.states_of(task)] or self.tasks
            text = able[number % len(able)]
        self.check_task(text)
        self.task = text

    def _set_spaces(self, spec: RobotSpec, images: str) -> None:
        if images not in ("on_request", "always"):
            raise ValueError(f'images must be "on_request" or "always", got {images!r}')
        self.robot_spec, self.images = spec, images
        self._low, self._high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
        self.action_space = gymnasium.spaces.Box(self._low, self._high, dtype=np.float32)
        box, cameras = gymnasium.spaces.Box, spec.cameras if images == "always" else ()
        frames = {IMAGE_PREFIX + c.name: box(0, 255, (c.height, c.width, 3), np.uint8) for c in cameras}
        state = {STATE: box(-np.inf, np.inf, (spec.state_dim,), np.float32)}
        self.observation_space = gymnasium.spaces.Dict({**state, **frames})  # type: ignore[assignment]

    def _observed(self, state: np.ndarray) -> Observation:
        return {STATE: state, **(self.read_images() if self.images == "always" else {})}

    def _checked(self, action: Any, name: str = "action") -> np.ndarray:
        """Return `action` as a fresh `float32[A]`; raise DataError if it is not A finite numbers."""
        try:
            values = np.array(action, np.float32).reshape(-1)
        except (TypeError, ValueError):  # LeRobot's robots name their motors: a dictionary
            values = np.array(action, object)
        if values.dtype != np.float32 or values.shape != self._low.shape or not np.isfinite(values).all():
            wanted = f"{len(self._low)} finite numbers"
            raise DataError(f"robot {self.robot_spec.name}: {name} must be {wanted}, got {values}")
        return values


def moves_spec(
    name: str, control_hz: float, state_dim: int, actions: int, grippers: tuple[int, ...], cameras: Sequence[str],
    image_size: int, max_episode_steps: int, arms: tuple[tuple[int, int], ...] = (),
) -> RobotSpec:  # fmt: skip
    """Return the specification of a robot whose actions are so many numbers in -1..1 that no state measures."""
    low, high, unmeasured = (-1.0,) * actions, (1.0,) * actions, (-1,) * actions
    frames = tuple(CameraSpec(camera, image_size, image_size) for camera in cameras)
    return RobotSpec(name, control_hz, state_dim, low, high, unmeasured, grippers, frames, max_episode_steps, arms)


def joints_spec(
    name: str, control_hz: float, state_dim: int, low: tuple[float, ...], high: tuple[float, ...],
    cameras: Sequence[str], image_size: int | tuple[int, int], max_episode_steps: int,
) -> RobotSpec:  # fmt: skip
    """Return the specification of two arms that take targets of joints, `low` to `high`, and of a gripper, 0 to 1.

    `image_size`: pixels of a side of square frames, or height and width.
    """
    each = len(low) + 1
    arms, grippers = ((0, each), (each, 2 * each)), (each - 1, 2 * each - 1)
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    frames = tuple(CameraSpec(camera, height, width) for camera in cameras)
    limits, joints = ((*low, 0.0) * 2, (*high, 1.0) * 2), tuple(range(2 * each))
    return RobotSpec(name, control_hz, state_dim, *limits, joints, grippers, frames, max_episode_steps, arms)


class SimulatedEnv(RobotEnv):
    """A simulated task that ends at its success or at the time limit.

    `reset(seed=...)` reproduces the start state. `step` raises DataError for an action that is not A finite numbers and
    for a simulation that has diverged.
    """

    goes_on = True
    tick = 0  # of the time limit
    _active = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        super().reset(seed=seed)
        options = options or {}
        if self.tasks:
            self._begin_task(seed, options)
        if init_state := options.get("init_state", ""):
            self.check_init_state(init_state, self.task)
            info = self._restore(init_state)
        else:
            info = self._start(seed)
        self.tick, self._active = 0, True
        return self._observe(), {"success": False, **info}

    def step(self, action: np.ndarray) -> StepResult:
        if not self._active:
            raise gymnasium.error.ResetNeeded("call reset() before the first step()")
        reward, info = self._move(self._checked(action))
        self.tick += 1
        success = info["success"]
        truncated = not success and self.tick >= self.robot_spec.max_episode_steps
        return self._observe(), float(reward), success, truncated, info

    def restart_limit(self) -> None:
        self.tick = 0

    def _start(self, seed: int | None) -> dict[str, Any]:
        """Draw a start state from `np_random`; return additions to the reset's info."""
        raise NotImplementedError

    def _restore(self, init_state: str) -> dict[str, Any]:
        """Put the saved state of this id in place; return additions to the reset's info."""
        raise NotImplementedError

    def _move(self, action: np.ndarray) -> tuple[float, dict[str, Any]]:
        """Simulate one tick; return the reward and `info` with `success` and `executed_action`."""
        raise NotImplementedError

    def _state(self) -> np.ndarray:
        raise NotImplementedError

    def _observe(self) -> Observation:
        state = self._state()
        if not np.isfinite(state).all():
            raise DataError(
                f"robot {self.robot_spec.name}: the simulation has diverged (tick {self.tick}: the state is {state}, "
                "expected finite numbers). Reset the environment"
            )
        return self._observed(state)


class Expert(Protocol):
    """A scripted demonstrator of one environment."""

    def reset(self, seed: int) -> None:
        """Prepare for a new episode (after the environment's reset)."""

    def act(self) -> np.ndarray:
        """Return the command for the current tick, `float32[A]` in the robot's units."""


class InterventionCommand(NamedTuple):
    """A human's command on one tick.

    `idle`: in control, but not moving the robot. `dims`: numbers of the command that are the human's, bool[A]; the
    policy has the others. None: all.
    """

    action: np.ndarray
    idle: bool = False
    dims: np.ndarray | None = None


class DeviceActivity(NamedTuple):
    """What an operator's hands do on the devices that move the robot."""

    lost: tuple[str, ...] = ()  # names of devices that are unplugged, or silent
    busy: tuple[str, ...] = ()  # of those that are deflected
    buttons: tuple[bool, ...] = ()  # of the right mouse
    grippers: tuple[float, ...] = ()  # of all leaders, from 0 closed to 1 open


class InterventionSource(Protocol):
    """Source of interventions: a human's device, a scripted human, a recording.

    Optional: `restart()`, called within an episode after ticks on which the robot did not follow its commands, as after
    a stop and a clear. A human's device then commands nothing until it was neutral. `hands() -> DeviceActivity`: the
    devices of a human, for an operator. `resume()`: an operator gave the arms of lost devices back to the policy.
    `drives`: leaders that may be driven to their arms before an episode (`leader_requests.LeaderDrives`), or None.
    `keys()`: events of the devices' keys that move nothing.
    """

    def reset(self, seed: int) -> None:
        """Begin a new episode (after the environment's reset)."""

    def poll(
        self, tick: int, observation: Observation, decision_tick: bool, last: np.ndarray
    ) -> InterventionCommand | None:
        """Return the human's command for this tick, or None to leave the robot to the policy.

        Args:
            decision_tick: the policy would decide at this tick; a scripted human returns control there.
            last: the last command that was executed, float32[A]; at first the one that holds the robot.
        """

    def close(self) -> None:
        """Release the device."""
