"""The transforms between a robot and its agent, the same on both sides: observations to inputs, chunks to commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from serl_chunk.config.agents.encoder import shown
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.frames import SingleFrame
from serl_chunk.data.letterbox import letterbox, letterboxed
from serl_chunk.data.normalise.normaliser import Normaliser, fit_normaliser
from serl_chunk.data.prompts import PADDING, Prompts, RowTexts, make_prompts
from serl_chunk.types import (
    IMAGE_PREFIX,
    PROMPT,
    PROMPT_MASK,
    STATE,
    CameraSpec,
    DataError,
    End,
    Episode,
    Observation,
    Record,
    RobotSpec,
    StepBlock,
)


@dataclasses.dataclass(frozen=True, eq=False)  # compared by `digest`, as its normaliser
class Preprocess:
    """The transforms of an experiment: an immutable value, safe to use from any thread.

    Args:
        normaliser: of states and chunks. It alone is fitted to data, and travels; all else follows from the settings.
        cameras: of the agent, with the size of the frames that it reads.
        prompts: of the tasks' texts; None where the agent reads no language.
        recorded: the same cameras with the size of the frames that the robot gives; empty: that of `cameras`.
    """

    normaliser: Normaliser
    cameras: tuple[CameraSpec, ...] = ()
    prompts: Prompts | None = None
    recorded: tuple[CameraSpec, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "recorded", self.recorded or self.cameras)

    @classmethod
    def of(cls, config: ExperimentConfig, spec: RobotSpec, normaliser: Normaliser) -> Preprocess:
        """Build those of an experiment. Raises ConfigError for a camera that the robot lacks, and as `make_prompts`."""
        recorded, prompts = tuple(map(spec.camera, config.agent.image_keys)), make_prompts(config, spec.state_dim)
        return cls(normaliser, shown(recorded, config.agent.encoder.frame_size), prompts, recorded)

    @classmethod
    def restored(
        cls, config: ExperimentConfig, spec: RobotSpec, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> Preprocess:
        """Build those of an experiment with a saved normaliser: the inverse of `fields` and `to_arrays`."""
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
        inputs = {STATE: state}
        for c in self.cameras:
            key = IMAGE_PREFIX + c.name
            inputs[key] = letterbox(observation[key], c.height, c.width)
        if self.prompts is not None:
            inputs[PROMPT], inputs[PROMPT_MASK] = self.prompts(task, state)
        return inputs

    def stacked(self, rows: Sequence[Observation]) -> dict[str, np.ndarray]:
        """Return what `observe` made of several observations with a leading axis; each prompt is filled up to the most.

        Its length then depends on no text, so that a client's longer one compiles nothing while others wait.
        """
        nothing = {PROMPT: PADDING, PROMPT_MASK: False}
        most = 0 if self.prompts is None else self.prompts.length

        def filled(name: str, value: np.ndarray) -> np.ndarray:
            return np.pad(value, (0, most - value.size), constant_values=nothing[name]) if name in nothing else value

        return {name: np.stack([filled(name, row[name]) for row in rows]) for name in rows[0]}

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

    def record(self, record: Record) -> Record:
        """Return a record with the frames that the agent reads: letterboxed, lazy ones on each access.

        Raises DataError for frames of another size than the robot's.
        """
        if self.recorded == self.cameras:
            return record
        if isinstance(record, StepBlock):
            return self._steps(record)
        return self._end(record) if isinstance(record, End) else record

    def episode(self, episode: Episode) -> Episode:
        """Return an episode with the frames that the agent reads, as `record`."""
        if self.recorded == self.cameras:
            return episode
        return episode._replace(steps=self._steps(episode.steps), end=self._end(episode.end))

    def _steps(self, block: StepBlock) -> StepBlock:
        sparse = dict(block.sparse)
        for number, key in self._cameras_in(sparse):
            rows = sparse[key]
            sparse[key] = rows._replace(values=self._frames(block.episode_id, number, rows.values))
        return dataclasses.replace(block, sparse=sparse)

    def _end(self, end: End) -> End:
        if end.final_observation is None:
            return end
        final: dict[str, Any] = dict(end.final_observation)
        for number, key in self._cameras_in(final):
            frames = self._frames(end.episode_id, number, final[key][None])
            final[key] = frames[0] if isinstance(frames, np.ndarray) else SingleFrame(frames)
        return end._replace(final_observation=final)

    def _cameras_in(self, entries: Mapping[str, Any]) -> list[tuple[int, str]]:
        """Return the number and the entry's name of each camera that `entries` have a frame of."""
        keys = enumerate(IMAGE_PREFIX + c.name for c in self.cameras)
        return [(number, key) for number, key in keys if key in entries]

    def _frames(self, episode_id: str, number: int, values: Any) -> Any:
        """Return frames [N, H, W, 3] of camera `number` as the agent reads them."""
        given, camera = self.recorded[number], self.cameras[number]
        if values.shape[1:] != (given.height, given.width, 3) or values.dtype != np.uint8:
            raise DataError(
                f"episode {episode_id}: frames of camera {camera.name!r} are {values.dtype}{values.shape}, the robot's "
                f"are uint8{(len(values), given.height, given.width, 3)}"
            )
        return letterboxed(values, camera.height, camera.width)

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
    def bounded(self) -> bool:
        """Whether model space is [-1, 1] in every number of an action."""
        return self.normaliser.bounded

    @property
    def followed_joints(self) -> np.ndarray:
        """The state's numbers that actions are relative to, in increasing order, int[J]."""
        joint = self.normaliser.joint
        return np.unique(joint[joint >= 0])

    @property
    def joint_reach(self) -> np.ndarray:
        """How far demonstrations command each of `followed_joints` to move in a tick, float32[J], robot units."""
        n, joints = self.normaliser, self.followed_joints
        return np.array([n.scale[0, n.joint == joint].max() for joint in joints], np.float32)

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
