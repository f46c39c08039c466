"""The transforms between a robot and its agent, the same on both sides: observations to inputs, chunks to commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from serl_chunk.config.agents.encoder import shown
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.frames import Frames, LazyImages, SingleFrame
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
    """The transforms of an experiment: an immutable value, safe to use from any thread."""

    normaliser: Normaliser  # of states and chunks. It alone is fitted to data, and travels; all else is of the settings
    cameras: tuple[CameraSpec, ...] = ()  # of the agent, with the size of the frames that it reads
    prompts: Prompts | None = None  # of the tasks' texts; None where the agent reads no language
    recorded: tuple[CameraSpec, ...] = ()  # the same cameras as the robot gives them; empty: as `cameras`

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
        """Build those of an experiment with a saved normaliser: the inverse of its `fields` and `to_arrays`."""
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
            sparse = dict(record.sparse)
            for key, given, camera in self._cameras_in(sparse):
                values = _of_size(record.episode_id, sparse[key].values, given, camera)
                sparse[key] = sparse[key]._replace(values=values)
            return dataclasses.replace(record, sparse=sparse)
        if isinstance(record, End) and record.final_observation is not None:
            final: dict[str, Any] = dict(record.final_observation)
            for key, given, camera in self._cameras_in(final):
                frames = _of_size(record.episode_id, final[key][None], given, camera)
                final[key] = frames[0] if isinstance(frames, np.ndarray) else SingleFrame(frames)
            return record._replace(final_observation=final)
        return record

    def episode(self, episode: Episode) -> Episode:
        """Return an episode with the frames that the agent reads, as `record`."""
        if self.recorded == self.cameras:
            return episode
        steps: Any = self.record(episode.steps)
        end: Any = self.record(episode.end)
        return episode._replace(steps=steps, end=end)

    def _cameras_in(self, entries: Mapping[str, Any]) -> list[tuple[str, CameraSpec, CameraSpec]]:
        """Return the name of each entry that is a camera's, with the robot's camera and the agent's."""
        both = ((IMAGE_PREFIX + c.name, given, c) for given, c in zip(self.recorded, self.cameras, strict=True))
        return [each for each in both if each[0] in entries]

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

    @property
    def joint_reach(self) -> np.ndarray:
        """How far demonstrations command each of `followed_joints` to move in a tick, float32[J], robot units."""
        n, joints = self.normaliser, self.followed_joints
        return np.array([n.scale[0, n.joint == joint].max() for joint in joints], np.float32)

    def digest(self) -> str:
        """Return sixteen hex digits that change when any number of the normaliser does."""
        return self.normaliser.digest()


def fit_preprocess(config: ExperimentConfig, spec: RobotSpec, episodes: Sequence[Episode]) -> Preprocess:
    """Return the transforms of an experiment, fitted to `episodes`. Raises as `fit_normaliser` and `Preprocess.of`."""
    normaliser = fit_normaliser(spec, config.normaliser, config.chunk.carried, episodes)
    return Preprocess.of(config, spec, normaliser)


# -- frames of another size ----------------------------------------------------------------------------------


def letterbox(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scale images uint8[..., H, W, 3] into the middle of black ones, uint8[..., height, width, 3].

    The pixels are those of openpi's data transform. Images that have the size are returned as they are.
    """
    h, w = images.shape[-3:-1]
    if (h, w) == (height, width):
        return images
    from PIL import Image  # slow to import, and few agents need it

    ratio = max(w / width, h / height)
    inner_height, inner_width = max(1, int(h / ratio)), max(1, int(w / ratio))
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    out = np.zeros((*images.shape[:-3], height, width, 3), np.uint8)
    inner = out[..., top : top + inner_height, left : left + inner_width, :]
    for place in np.ndindex(images.shape[:-3]):
        scaled = Image.fromarray(images[place]).resize((inner_width, inner_height), Image.Resampling.BILINEAR)
        inner[place] = np.asarray(scaled)
    return out


def _of_size(episode_id: str, values: Any, given: CameraSpec, camera: CameraSpec) -> Any:
    """Return frames [N, H, W, 3] of the size that `camera` has. Raises DataError where they are not those `given`."""
    if values.shape[1:] != (given.height, given.width, 3) or values.dtype != np.uint8:
        raise DataError(
            f"episode {episode_id}: frames of camera {camera.name!r} are {values.dtype}{values.shape}, the robot's "
            f"are uint8{(len(values), given.height, given.width, 3)}"
        )
    return letterboxed(values, camera.height, camera.width)


def letterboxed(images: Any, height: int, width: int) -> Any:
    """Return `images` [N, H, W, 3] with another size: an array scaled at once, lazy ones on each access."""
    if isinstance(images, np.ndarray):
        return letterbox(images, height, width)
    return (_LetterboxedFrames if isinstance(images, Frames) else _LetterboxedImages)(images, height, width)


class _LetterboxedImages(LazyImages):
    """Images that are letterboxed on each access, of `images` that are decoded on each access."""

    def __init__(self, images: Any, height: int, width: int) -> None:
        super().__init__((height, width, 3), np.arange(len(images)))
        self._images = images

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, int | np.integer) or isinstance(self, Frames):
            return super().__getitem__(i)
        return type(self)(self._images[i], *self.shape[1:3])  # which lets the files of the others go

    def decode(self, at: int) -> np.ndarray:
        image = self._images[at]
        if image.shape != tuple(self._images.shape[1:]):
            raise DataError(f"a frame is {image.shape}, {tuple(self._images.shape[1:])} before: its file was changed")
        return letterbox(image, *self.shape[1:3])


class _LetterboxedFrames(_LetterboxedImages, Frames):
    """The same of `Frames`, whose stored files are of the other size."""
