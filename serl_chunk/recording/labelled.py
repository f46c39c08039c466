"""Episodes whose frames are labelled success or failure, by a key, while the robot moves."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.classifier.dataset import CLASSES, FrameLabels, read_frame_labels, write_frame_labels
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.io import plural
from serl_chunk.operator.operator import Operator
from serl_chunk.outcomes.judge import OPERATOR
from serl_chunk.recording.recording import Pace, write_with_room
from serl_chunk.robots.base import InterventionSource, RobotEnv
from serl_chunk.types import Amend, ConfigError, DataError

logger = logging.getLogger(__name__)


class LabellingKeys:
    """Two keys of another meaning, also on a pedal; all others are the operator's.

    The key of success switches "this is a success" on and off, since a terminal reports no release of a key. The key of
    failure ends the episode, which is kept.
    """

    marking = ends = False

    def begin(self) -> None:
        """Begin an episode: nothing is a success yet."""
        self.marking = self.ends = False

    def takes(self, action: Action) -> bool:
        """Act on a label; returns whether `action` is one."""
        if action is Action.SUCCESS:
            self.marking = not self.marking
        elif action is Action.FAILURE:
            self.ends = True
        return action in (Action.SUCCESS, Action.FAILURE)


class LabelledFolder:
    """A folder of episodes with its `frame_labels.json`.

    Args:
        wanted: frames of failure and of success that it shall hold.

    Raises:
        ConfigError: it is labelled with other classes.
        DataError: its labels are damaged.
    """

    def __init__(self, folder: Path, wanted: tuple[int, int]) -> None:
        self.folder, self._wanted = folder, wanted
        self._files: dict[str, Path] = {}  # episode of this recording -> its file
        self._noted, self._dropped = "", dict[str, list[tuple[int, int, str]]]()  # to be discarded: its file's labels
        labels = read_frame_labels(folder)
        if labels is not None and labels.classes != CLASSES:
            raise ConfigError(
                f"{folder}: is labelled with the classes {', '.join(labels.classes)}, expected {', '.join(CLASSES)}. "
                "Give another folder",
                parameter="out",
            )
        known = {} if labels is None else labels.episodes
        # An episode that was being written when a recording was killed has no labels.
        self._ranges = {file.name: known.get(file.name, []) for file in sorted(folder.glob("episode_*.hdf5"))}

    def add(self, episode: str, file: Path, labels: Sequence[bool]) -> None:
        """Label an episode by whether each of its frames shows a success, the final one's included."""
        self._files[episode] = file
        self._ranges[file.name] = _ranges(labels)
        if episode == self._noted:
            self._drop(file.name)
        self._save()

    def amend(self, record: Amend) -> None:
        file = self._files.pop(record.episode_id, None)
        if record.discard and file is not None:
            del self._ranges[file.name]
            self._dropped.pop(file.name, None)
            file.unlink()
            logger.info(f"{file.name}: removed; {self.counts()}")
            self._save_in_the_loop()

    def note_discard(self, episode_id: str) -> None:
        """Drop the labels of an episode at once; an empty id, or another one, brings them back until `amend`."""
        self._ranges.update(self._dropped)
        self._dropped, self._noted = {}, episode_id
        if (file := self._files.get(episode_id)) is not None:
            self._drop(file.name)
        self._save_in_the_loop()

    def _save_in_the_loop(self) -> None:
        try:
            self._save()
        except DataError as error:  # the control loop calls this, and goes on
            logger.warning(f"{error}. It is written with the next episode")

    @property
    def discard_noted(self) -> bool:
        return True

    def _drop(self, name: str) -> None:
        """Leave a file as one that was being written when a recording was killed: without labels."""
        self._dropped[name], self._ranges[name] = self._ranges[name], []

    @property
    def frames(self) -> tuple[int, int]:
        found = [0, 0]
        for start, stop, name in (r for ranges in self._ranges.values() for r in ranges):
            found[CLASSES.index(name)] += stop - start
        return found[0], found[1]

    @property
    def done(self) -> bool:
        return all(have >= want for have, want in zip(self.frames, self._wanted, strict=True))

    def counts(self) -> str:
        (failures, successes), (of_failure, of_success) = self.frames, self._wanted
        return f"{successes} of {of_success} frames of success, {failures} of {of_failure} of failure"

    def _save(self) -> None:
        write_frame_labels(self.folder, FrameLabels(CLASSES, self._ranges))


class LabelledRecording:
    """Records episodes with a label for each frame.

    Neither the environment nor a classifier ends an episode: it lasts up to the time limit, or until a key ends it.

    Args:
        source: of the human's commands; None: the robot holds, or the environment lets the human in.
        writer: to the folder of `labels`; the caller closes it.
        cameras: recorded on every tick.
        ended: whether the recording is to end, by Ctrl-C after its stop.
    """

    def __init__(
        self, env: RobotEnv, source: InterventionSource | None, writer: EpisodeWriter, labels: LabelledFolder,
        *, config: ExperimentConfig, cameras: tuple[str, ...], keys: LabellingKeys, operator: Operator,
        ended: Callable[[], bool],
    ) -> None:  # fmt: skip
        actor = config.actor.without_human_limit()
        outcome = OutcomeConfig(success=lambda observation: False, environment=False)
        config = dataclasses.replace(config, actor=actor, outcome=outcome)
        self._writer, self._labels, self._keys, self._operator = writer, labels, keys, operator
        self._marked: list[bool] = []  # whether each frame of the episode under way shows a success
        self._pace = Pace(config, env.robot_spec, paced=True)
        self._runner = EpisodeRunner(
            env, None, writer, config=config, cameras=cameras, intervention=source,
            stop=lambda: OPERATOR if keys.ends else None, observer=self._observe, operator=operator,
        )  # fmt: skip
        operator.actor.describe = self._described
        operator.actor.without_human = ActorState.HUMAN  # no change of who moves it, which would empty the keys
        self._ended = ended

    def close(self) -> None:
        self._runner.close()

    def run(self, seed: int) -> None:
        """Record from start state `seed` on until there are enough frames, or the operator ends it."""
        while not (self._labels.done or self._operator.quits or self._ended()):
            self.episode(seed)
            seed += 1
        self._operator.send_pending()

    def episode(self, seed: int) -> None:
        self._marked, before = [], len(self._writer.written)
        self._keys.begin()
        name = f"labelled-{self._runner.spec.name}-{seed:06d}"
        length = self._runner.run_episode(seed, episode_id=name).length
        write_with_room(self._writer.flush, self._operator, self._ended, self._writer.again)
        for file in self._writer.written[before:]:
            marked = self._marked[:length]
            labels = [*marked, self._keys.marking]
            write_with_room(functools.partial(self._labels.add, name, file, labels), self._operator, self._ended)
            logger.info(
                f"{file.name}: {sum(marked)} of {plural(len(marked), 'tick')} a success; {self._labels.counts()}"
            )

    def _described(self) -> dict[str, str]:
        now = "SUCCESS" if self._keys.marking else "failure"
        return {"question": f"labelled {now} (s switches, f ends the episode): {self._labels.counts()}"}

    def _observe(self, tick: int) -> None:
        self._pace.wait(tick)
        self._marked.append(self._keys.marking)


def _ranges(labels: Sequence[bool]) -> list[tuple[int, int, str]]:
    out: list[tuple[int, int, str]] = []
    for tick, success in enumerate(labels):
        name = CLASSES[success]
        if out and out[-1][2] == name:
            out[-1] = out[-1][0], tick + 1, name
        else:
            out.append((tick, tick + 1, name))
    return out
