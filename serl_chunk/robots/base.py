"""The one environment contract: a gymnasium Env with the few things a control loop needs beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np

from serl_chunk.types import IMAGE_PREFIX, STATE, Observation, RobotSpec


class RobotEnv(gymnasium.Env[Observation, np.ndarray]):
    """A robot, real or simulated.

    `reset` and `step` return `{"state": float32[S]}`; cameras are read by `read_images` when they are needed, because
    rendering or decoding three cameras costs more than a control tick. Built with `images="always"`, both also carry
    `images/<camera>`, as plain gymnasium users expect.

    Actions are `float32[A]` in the robot's units. `info["success"]` is a bool; `info["failure"]` marks a declared
    failure; `info["executed_action"]` is the command after the driver's limits (absent: unchanged).
    `info["intervene_action"]` appears where the environment itself lets a human intervene; `info["executed_action"]` is
    then what the driver made of the human's command, and `info["intervene_images"]` is
    `{"images/<camera>": uint8[H, W, 3]}` of the observation that the human acted on, which was not requested. An
    environment truncates itself at its time limit.

    One that has a scripted demonstrator also has `make_expert() -> Expert`, one that has a scripted human
    `make_scripted_human() -> InterventionSource`; `registry.make_expert` and `registry.make_intervention` call them.
    """

    robot_spec: RobotSpec
    images: str = "on_request"  # or "always"
    frames_with_observation: bool = False  # `read_images` hands out what `reset` and `step` have got already, for free
    starts_repeat: bool | None = None  # whether two resets with one seed agreed, once they have been compared

    def read_images(self, cameras: Sequence[str] | None = None) -> Observation:
        """Frames of the present moment, `{"images/<camera>": uint8[H, W, 3]}`; all cameras by default.

        They are recorded without copying: a driver that reuses its buffers returns copies.
        """
        raise NotImplementedError

    def frame_numbers(self) -> Mapping[str, int]:
        """Sequence numbers of the frames that were handed out last, by camera; a camera without one is left out.

        Optional. A camera that is slower than the control rate gives the same frame on several ticks. It is recorded
        once, and later ticks refer to it. Frames whose numbers differ are not compared; all others are the same only
        where their bytes are, so that a driver whose numbers stand still spoils no picture.
        """
        return {}

    def save_state(self) -> Any:
        """Everything `restore_state` needs to continue bit for bit; simulators only."""
        raise NotImplementedError(f"{self.robot_spec.name} cannot save its state")

    def restore_state(self, state: Any) -> Observation:
        """Return to a saved state and give its observation."""
        raise NotImplementedError(f"{self.robot_spec.name} cannot restore a state")

    def _set_spaces(self, spec: RobotSpec, images: str) -> None:
        """Declare `robot_spec`, `action_space` and `observation_space` from `spec`."""
        if images not in ("on_request", "always"):
            raise ValueError(f'images must be "on_request" or "always", got {images!r}')
        self.robot_spec, self.images = spec, images
        self.action_space = gymnasium.spaces.Box(
            np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32), dtype=np.float32
        )
        spaces: dict[str, gymnasium.Space[Any]] = {
            STATE: gymnasium.spaces.Box(-np.inf, np.inf, (spec.state_dim,), np.float32)
        }
        if images == "always":
            for c in spec.cameras:
                spaces[IMAGE_PREFIX + c.name] = gymnasium.spaces.Box(0, 255, (c.height, c.width, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict(spaces)  # type: ignore[assignment]


class Expert(Protocol):
    """A scripted demonstrator of one environment."""

    def reset(self, seed: int) -> None:
        """Prepare for a new episode (after the environment's reset)."""

    def act(self) -> np.ndarray:
        """The command for the present tick, `float32[A]` in the robot's units."""


class InterventionCommand(NamedTuple):
    """A human's command on one tick. `idle`: in control, but not moving the robot."""

    action: np.ndarray
    idle: bool = False


class InterventionSource(Protocol):
    """Source of interventions: a human's device, a scripted human, a recording."""

    def reset(self, seed: int) -> None:
        """A new episode begins (after the environment's reset)."""

    def poll(self, tick: int, observation: Observation, decision_tick: bool) -> InterventionCommand | None:
        """The human's command for this tick, or None to leave the robot to the policy.

        `decision_tick` is True where the policy would decide at this tick (queue empty): a scripted human
        hands back there.
        """

    def close(self) -> None:
        """Release the device."""
