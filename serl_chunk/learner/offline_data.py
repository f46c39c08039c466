"""Data that a learner has before any actor sends steps: demonstrations, a data set, and features of their frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from serl_chunk.config.agents import AgentConfig
from serl_chunk.config.learner import LearnerConfig
from serl_chunk.replay.replay import Replay
from serl_chunk.types import ConfigError, Episode, Outcome

FRAMES = 64  # of one piece of work: short enough to stop and to be seen within
SAY_EVERY = 5.0  # seconds between lines


class Dataset(Protocol):
    """Offline data of which a part is there at a time (`data.shards.ShardedSource`)."""

    def take(self) -> list[Episode]:
        """The episodes of the part in use, which it then need not hold."""

    def advance(self) -> bool:
        """Count one update; True where another part is in use now."""

    def seek(self, updates: int) -> None:
        """Be where so many calls of `advance` lead from the beginning."""

    def close(self) -> None:
        """Stop reading ahead."""


class OfflineData:
    """Demonstrations that stay in the replay for the whole run, and those of a data set, which give way to others.

    Args:
        replay: takes them.
        demos: those that stay.
        dataset: none, or the data set in the state it is opened in.
        seek: updates of the checkpoint that the run resumes from; None for a fresh run.
        seen: is shown all of it, part by part.
    """

    def __init__(
        self,
        replay: Replay,
        demos: Sequence[Episode],
        dataset: Dataset | None,
        *,
        seek: int | None = None,
        seen: Callable[[Sequence[Episode]], None] = lambda episodes: None,
    ) -> None:
        self._replay, self._dataset, self._seen = replay, dataset, seen
        if demos or dataset is None:
            replay.add_demo(*demos)
        if dataset is not None and seek is not None:
            dataset.seek(seek)
        first = [] if dataset is None else dataset.take()
        if dataset is not None:
            replay.replace_demos(first)
        self.episodes = len(demos) + len(first)  # at the start
        # A critic that has seen successes alone misleads an actor that chooses by it. Of a data set: what it has shown
        # so far, in this life.
        self.has_failures = _fail(demos) or _fail(first)
        seen(demos)
        seen(first)

    @staticmethod
    def require(config: LearnerConfig, *, there: bool) -> None:
        """Raise ConfigError where `config` trains on demonstrations and none are `there`."""
        if there:
            return
        if config.pretrain_steps or config.critic_pretrain_steps:
            raise ConfigError(
                "pretraining needs demonstrations: give --demo_path, or set --config.learner.pretrain_steps=0 and "
                "--config.learner.critic_pretrain_steps=0"
            )
        if config.offline_steps:
            raise ConfigError(
                "--offline_steps trains on demonstrations or a data set: give --demo_path or --dataset_dir"
            )

    def require_imitated(self, agent: AgentConfig) -> None:
        """Raise ConfigError where a pretrained policy would imitate none of the steps that are there at the start."""
        # `bc_invalid` imitates every row as it is; later parts of a data set may have what this one has not.
        if getattr(agent, "bc_invalid", False) or self._dataset is not None or self._replay.imitates_demos:
            return
        human_only = agent.bc_on == "interventions"
        raise ConfigError(
            f"learner.pretrain_steps imitates demonstrations, and no step of these {self.episodes} is imitated: "
            f"agent.bc_on={agent.bc_on} takes the steps of successful or undecided ones"
            + (" that a human acted on" if human_only else "")
            + ", failed ones never. Give others, "
            + ("set --config.agent.bc_on=demo, " if human_only else "")
            + "or set --config.learner.pretrain_steps=0"
        )

    def require_window(self) -> None:
        """Raise ConfigError where what is there at the start has no window to train on."""
        if self._replay.ready.demo:
            return
        stats = self._replay.stats()
        episodes = int(stats["replay/demo_episodes"])
        steps = int(stats["replay/demo_rows"]) - episodes  # a row of each is for its final observation
        whole = self._replay.window_steps
        found = f"a window takes {whole} consecutive steps, and they have {steps} in {episodes} episodes"
        remedy = (
            "Give longer ones, or lower what sets it: chunk.horizon (--horizon_length), chunk.critic_horizon or "
            "chunk.return_steps"
        )
        if stats["replay/excluded_share"]:
            found += ", but no image of every camera that is recent enough where one begins and ends"
            remedy = "Raise --config.replay.max_image_age, or give demonstrations with more frames"
        raise ConfigError(
            f"the demonstrations hold no window to train on: {found}. {remedy}; or do without "
            "training on them alone: --config.learner.pretrain_steps=0, --config.learner.critic_pretrain_steps=0 and "
            "no --offline_steps"
        )

    def advance(self, updates: int) -> None:
        """Count `updates`; where another part of the data set is in use after them, it takes the replay's place."""
        if self._dataset is not None and sum(self._dataset.advance() for _ in range(updates)):
            part = self._dataset.take()
            self.has_failures = self.has_failures or _fail(part)
            self._replay.replace_demos(part)
            self._seen(part)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._dataset is not None:
            self._dataset.close()


def _fail(episodes: Sequence[Episode]) -> bool:
    return any(e.end.outcome is not Outcome.SUCCESS for e in episodes)


class FeaturePrecomputation:
    """Features of the frames that are stored when training begins: demonstrations, and what a journal put back.

    They are computed in pieces, with progress lines; what comes in meanwhile is left to the batches that show it.

    Args:
        say: prints one line for the operator.
        now: seconds of a clock that never goes back.
    """

    def __init__(self, replay: Replay, say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._replay, self._say, self._now = replay, say, now
        self._total = -1  # frames that lacked features at the first call
        self._done = 0
        self._begun = self._said = 0.0

    def work(self) -> bool:
        """One piece; False where none is left. Raises DataError for a file of a demonstration that cannot be read."""
        if self._total < 0:
            self._total = self._replay.frames_unseen
            self._begun = self._said = self._now()
        if self._done >= self._total:
            return False
        computed = self._replay.embed_frames(FRAMES)
        # Fewer may be left than there were: episodes leave.
        self._done = min(self._total, self._done + computed) if computed else self._total
        if self._done == self._total:
            self._say(f"features of {self._total:,} stored frames computed in {self._now() - self._begun:.1f} s")
        elif self._now() - self._said >= SAY_EVERY:
            self._said = self._now()
            self._say(f"computing features of stored frames: {self._done:,} of {self._total:,}")
        return True
