"""The transforms between a robot and its agent, the same on both sides: observations to inputs, chunks to commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.normalise.normaliser import Normaliser, fit_normaliser
from serl_chunk.data.prompts import Prompts, RowTexts, make_prompts
from serl_chunk.types import IMAGE_PREFIX, PROMPT, PROMPT_MASK, STATE, CameraSpec, Episode, Observation, RobotSpec


@dataclasses.dataclass(frozen=True, eq=False)  # compared by `digest`, as its normaliser
class Preprocess:
    """An immutable value; safe to use from any thread.

    Args:
        normaliser: of states and chunks. It alone is fitted to data, and travels; all else follows from the settings.
        cameras: of the agent.
        prompts: of the tasks' texts; None where the agent reads no language.
    """

    normaliser: Normaliser
    cameras: tuple[CameraSpec, ...] = ()
    prompts: Prompts | None = None

    @classmethod
    def of(cls, config: ExperimentConfig, spec: RobotSpec, normaliser: Normaliser) -> Preprocess:
        """Build that of an experiment. Raises ConfigError for a camera that the robot lacks, and as `make_prompts`."""
        return cls(normaliser, tuple(map(spec.camera, config.agent.image_keys)), make_prompts(config))

    @classmethod
    def restored(
        cls, config: ExperimentConfig, spec: RobotSpec, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> Preprocess:
        """Build that of an experiment with a saved normaliser: the inverse of `fields` and `to_arrays`."""
        return cls.of(config, spec, Normaliser.restored(fields, arrays))

    @property
    def image_keys(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.cameras)

    # -- observations ----------------------------------------------------------------------------------------

    def observe(self, observation: Observation, task: str = "") -> Observation:
        """Return the inputs of an agent: `state`, frames of its cameras and, where it reads language, the prompt.

        Args:
            observation: raw: `state float32[S]`, and a frame of every camera of the agent.
            task: the episode's, in words.
        """
        state = self.normaliser.observe(observation[STATE])
        inputs = {STATE: state, **{key: observation[key] for key in (IMAGE_PREFIX + c.name for c in self.cameras)}}
        if self.prompts is not None:
            inputs[PROMPT], inputs[PROMPT_MASK] = self.prompts(task, state)
        return inputs

    def observe_rows(self, state: np.ndarray, texts: RowTexts | None) -> dict[str, np.ndarray]:
        """Return the inputs without frames of B observations: fresh float32[B, S], int32[B, L] and bool[B, L].

        Args:
            state: raw, float32[B, S].
            texts: of the tasks; None where the agent reads no language.
        """
        inputs = {STATE: self.normaliser.observe(state)}
        if self.prompts is not None and texts is not None:
            inputs[PROMPT], inputs[PROMPT_MASK] = self.prompts.of_rows(texts, inputs[STATE])
        return inputs

    # -- chunks ----------------------------------------------------------------------------------------------

    @property
    def horizon(self) -> int:
        """Actions of the longest chunk."""
        return self.normaliser.horizon

    def encode(self, state: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Convert a chunk float32[..., H', A] (H' <= H) to model space, given the raw state float32[..., S]."""
        return self.normaliser.encode(state, chunk)

    def decode(self, state: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Convert a chunk float32[..., H', A] of model space to the robot's units, given the raw state."""
        return self.normaliser.decode(state, chunk)

    @property
    def followed_joints(self) -> np.ndarray:
        """The state's numbers that actions are relative to, in increasing order, int[J]."""
        joint = self.normaliser.joint
        return np.unique(joint[joint >= 0])

    def shifts(self, moved: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Normaliser.shifts`."""
        return self.normaliser.shifts(moved)

    def count_outside(self, state: np.ndarray, action: np.ndarray, lost_ticks: np.ndarray) -> tuple[int, int]:
        """See `Normaliser.count_outside`."""
        return self.normaliser.count_outside(state, action, lost_ticks)

    # -- what travels ----------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Return sixteen hex digits that change when any number of the normaliser does."""
        return self.normaliser.digest()

    def fields(self) -> dict[str, str]:
        """Return the plain values for the handshake and for a checkpoint's meta."""
        return self.normaliser.fields()

    def to_arrays(self) -> dict[str, np.ndarray]:
        return self.normaliser.to_arrays()


def fit_preprocess(config: ExperimentConfig, spec: RobotSpec, episodes: Sequence[Episode]) -> Preprocess:
    """Return the transforms of an experiment, fitted to `episodes`. Raises as `fit_normaliser` and `Preprocess.of`."""
    normaliser = fit_normaliser(spec, config.normaliser, config.chunk.carried, episodes)
    return Preprocess.of(config, spec, normaliser)
