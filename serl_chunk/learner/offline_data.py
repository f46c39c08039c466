"""Data that a learner has before any actor sends steps: demonstrations, a data set, and features of what they show."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.learner import LearnerConfig
from serl_chunk.data.rotating_dataset import ShardedSource
from serl_chunk.replay.replay import Replay
from serl_chunk.types import ConfigError, Episode, Outcome

logger = logging.getLogger(__name__)

PIECE = 64  # inputs of one piece of work: short enough for stops and progress in between
LOG_PERIOD = 5.0  # seconds between lines


class InitialData(NamedTuple):
    """Demonstrations that stay for the whole run, and a data set, in the state it is opened in."""

    demos: Sequence[Episode] = ()
    dataset: ShardedSource | None = None

    def require(self, config: LearnerConfig) -> None:
        """Raise ConfigError where `config` trains on demonstrations and there are none."""
        if self.demos or self.dataset is not None:
            return
        if config.pretrain_steps or config.critic_pretrain_steps:
            text = (
                "pretraining needs demonstrations. Give some (demo_path), or set learner.pretrain_steps=0 and "
                "learner.critic_pretrain_steps=0"
            )
            raise ConfigError(text, parameter="learner.pretrain_steps")
        if config.offline_steps:
            text = "the offline phase needs demonstrations (demo_path) or a data set (dataset_dir). Give one of them"
            raise ConfigError(text, parameter="learner.offline_steps")


class OfflineData:
    """Puts a run's initial data into the replay, and later the parts of the data set that take each other's place.

    Args:
        seek: updates of the checkpoint that the run resumes from; None for a fresh run.
        seen: called with all of the data, part by part.
    """

    def __init__(
        self, replay: Replay, data: InitialData, *, seek: int | None, seen: Callable[[Sequence[Episode]], None]
    ) -> None:
        self._replay, self._seen = replay, seen
        demos, self._dataset = data
        first: list[Episode] = []
        if demos or self._dataset is None:
            replay.add_demo(*demos)
        if self._dataset is not None:
            if seek is not None:
                self._dataset.seek(seek)
            first = self._dataset.take()
            replay.replace_demos(first)
        self.episodes = len(demos) + len(first)  # at the start
        # A critic that has seen successes alone misleads an actor that chooses by it. Of a data set: the parts so far.
        self.has_failures = _fail([*demos, *first])
        seen([*demos, *first])

    def require_imitated(self, agent: AgentConfig) -> None:
        """Raise ConfigError where a pretrained policy would imitate none of the steps that are there at the start."""
        # The published code imitates every row as it is; later parts of a data set may have what this one has not.
        if agent.imitates_all_rows or self._dataset is not None or self._replay.imitates_demos:
            return
        human_only = agent.bc_on == "interventions"
        raise ConfigError(
            f"no step of these {self.episodes} demonstrations is imitated: agent.bc_on={agent.bc_on} takes the steps "
            f"of successful or undecided ones{' that a human acted on' if human_only else ''}, failed ones never. Give "
            f"others, {'set agent.bc_on=demo, ' if human_only else ''}or set learner.pretrain_steps=0",
            parameter="learner.pretrain_steps",
        )

    def require_window(self) -> None:
        """Raise ConfigError where what is there at the start has no window to train on."""
        if self._replay.ready.demo:
            return
        stats = self._replay.stats()
        episodes = int(stats["replay/demo_episodes"])
        steps = int(stats["replay/demo_rows"]) - episodes  # a row of each is for its final observation
        found = f"a window takes {self._replay.window_steps} steps in a row, they have {steps} in {episodes} episodes"
        remedy = "Give longer ones, or lower chunk.horizon, chunk.critic_horizon or chunk.return_steps"
        if stats["replay/excluded_share"]:
            found += ", but no image of every camera that is recent enough where one begins and ends"
            remedy = "Raise replay.max_image_age, or give demonstrations with more frames"
        raise ConfigError(
            f"the demonstrations hold no window to train on: {found}. {remedy}; or do not train on them alone: set "
            "learner.pretrain_steps, learner.critic_pretrain_steps and learner.offline_steps to 0"
        )

    def advance(self, updates: int) -> None:
        """Count `updates`; put another part of the data set into the replay where it is in use after them."""
        if self._dataset is not None and sum(self._dataset.advance() for _ in range(updates)):
            part = self._dataset.take()
            self.has_failures = self.has_failures or _fail(part)
            self._replay.replace_demos(part)
            self._seen(part)

    def close(self) -> None:
        if self._dataset is not None:
            self._dataset.close()


def _fail(episodes: Sequence[Episode]) -> bool:
    return any(e.end.outcome is not Outcome.SUCCESS for e in episodes)


def precompute_features(replay: Replay, now: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """Compute the features that are missing at the first `next`, a piece each, with progress lines.

    Those of later frames and observations are left to the batches that show them. Yields the number done; raises
    DataError for a demonstration's file that cannot be read.
    """
    total, done = replay.features_missing, 0
    begun = logged = now()
    while done < total:
        computed = replay.compute_features(PIECE)
        # Fewer may be left than there were: episodes leave.
        done = min(total, done + computed) if computed else total
        if done == total:
            logger.info(f"{total:,} features of stored observations computed in {now() - begun:.1f} s")
        elif now() - logged >= LOG_PERIOD:
            logged = now()
            logger.info(f"computing features of stored observations: {done:,} of {total:,}")
        yield done
