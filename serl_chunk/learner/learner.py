"""The training loop: pretrain, warm up, train, publish, checkpoint. It never asks which algorithm it runs.

`work()` does one bounded piece of work and says whether there was any, so that the same loop serves a process
of its own (`commands/learner.py`), which sleeps when there is none, and the single-process mode, which then lets
the actor go on.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from serl_chunk.agents.base import Agent, AgentState
from serl_chunk.agents.checkpoints import CheckpointStore, Restored
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.normaliser import Normaliser
from serl_chunk.learner.episode import EpisodeStats
from serl_chunk.learner.metrics import MetricsLog
from serl_chunk.learner.publisher import Publish, SnapshotPublisher
from serl_chunk.learner.rate_limiter import RateLimiter
from serl_chunk.learner.replay import Replay
from serl_chunk.learner.run_metrics import Counters
from serl_chunk.learner.sampler import BatchStream
from serl_chunk.types import ChunkBatch, ConfigError, DataError, Episode, Record, RobotSpec

PRETRAIN_SCAN = 20  # pretraining updates in one compiled call (lengths are rounded up): amortises the dispatch
MEASURE_AFTER = 2.0  # seconds without a metric row from which a waiting learner renews what the status line shows


class Phase(enum.StrEnum):
    """Where a run is; phases only go forward."""

    PRETRAIN = "pretrain"
    CRITIC_PRETRAIN = "critic pretrain"
    WARMUP = "warm-up"
    CRITIC_WARMUP = "critic warm-up"
    TRAIN = "train"
    DONE = "done"


class Learner:
    """Owns the agent's state, the replay, the checkpoints and the metrics of one run.

    Args:
        publish: takes each snapshot and its info (on the publisher's thread where `threaded`).
        threaded: prefetch batches and publish beside the training thread; False reproduces a run bit for bit.
        say: prints one line for a person.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        spec: RobotSpec,
        agent: Agent,
        normaliser: Normaliser,
        demos: list[Episode],
        run_dir: Path,
        *,
        publish: Publish,
        metrics: MetricsLog,
        threaded: bool,
        say: Callable[[str], None] = print,
    ) -> None:
        self.config, self.agent, self.metrics = config, agent, metrics
        self._say = say
        c = config.learner
        if not demos and (c.pretrain_steps or c.critic_pretrain_steps):
            raise ConfigError(
                "pretraining needs demonstrations: give --demo_path, or set --config.learner.pretrain_steps=0 and "
                "--config.learner.critic_pretrain_steps=0"
            )
        self.checkpoints = CheckpointStore(run_dir, keep=c.keep_checkpoints, say=say)
        self.state: AgentState = agent.init(jax.random.key(config.seed))
        restored = self.checkpoints.restore_state(jax.eval_shape(lambda: self.state))
        self.normaliser = self._restored_normaliser(normaliser, restored)
        self.replay = Replay(
            spec,
            config,
            self.normaliser,
            image_keys=config.agent.image_keys,
            bc_on=config.agent.bc_on,
            on_episode=self._on_episode,
        )
        self.replay.add_demo(*demos)
        self._demos = len(demos)
        self.limiter = RateLimiter(c.utd_ratio, c.max_lag_steps)
        self._publisher = SnapshotPublisher(agent, publish, run_dir, threaded=threaded)
        self._prefetch = config.replay.prefetch if threaded else 0
        self._rng = np.random.default_rng(config.seed)
        self._stream: BatchStream | None = None
        self._stream_updates = 0
        self._wake = threading.Condition()
        self._finished_episodes: deque[EpisodeStats] = deque()
        self._reported: list[EpisodeStats] = []  # by the replay, on its way to the counters
        self._position = 0  # journal entries that the counters cover
        self.phase = Phase.PRETRAIN
        self.phase_updates = 0
        self.updates = 0  # critic updates of the online phase
        self.env_steps = 0
        self.human_ticks = 0
        self.episodes = 0
        self._human_held = 0  # steps of earlier lives' interventions that outlived the online store
        self._resumed_steps = 0  # online steps of earlier lives, whose transitions are gone
        self._period = _Period()
        self.rates: dict[str, float] = {}
        self.waiting = (0.0, 0.0)  # shares of time the learner waited for steps, and actors for updates, of late
        self.recent: deque[tuple[bool, bool]] = deque(maxlen=20)  # (success, helped) of the last episodes
        if restored is not None:
            self._resume(*restored[:3])

    # -- records in (any thread) -----------------------------------------------------------------------------

    def insert(self, session: str, record: Record, position: int | None = None) -> None:
        """Take a record of an actor; raises DataError where it cannot be one. One thread inserts.

        `position`: how many journal entries there are, this record's included. A checkpoint says how many of them its
        counters cover.
        """
        steps = self.replay.insert(session, record)
        with self._wake:
            self.env_steps += steps
            self._finished_episodes.extend(self._reported)
            self._reported.clear()
            self._position = self._position if position is None else position
            self._wake.notify()

    def close_session(self, session: str, *, gone: bool, position: int | None = None) -> None:
        """An actor fell silent, or is gone for good: see Replay.close_session. For the inserting thread."""
        self.replay.close_session(session, gone=gone)
        with self._wake:
            self._finished_episodes.extend(self._reported)
            self._reported.clear()
            self._position = self._position if position is None else position

    def refill(self, records: Iterable[tuple[int, str, Record | None]]) -> int:
        """Put back what a learner before this one received: (journal entry, session, record), oldest first.

        No record: the session was given up there, in the middle of an episode perhaps. What the checkpoint's counters
        cover fills the replay and is not counted again. Returns the steps put back. A record that does not fit (the
        experiment was changed) is left out, and said.
        """
        counted, self._position = self._position, 0
        steps = refused = 0
        for number, session, record in records:
            try:
                if number >= counted:
                    before = self.env_steps
                    if record is None:
                        self.close_session(session, gone=True, position=number + 1)
                    else:
                        self.insert(session, record, number + 1)
                    steps += self.env_steps - before
                else:
                    self._position = number + 1
                    covered = 0
                    if record is None:
                        self.replay.close_session(session, gone=True)
                    else:
                        covered = self.replay.insert(session, record)
                    steps, self._resumed_steps = steps + covered, self._resumed_steps - covered
                    self._reported.clear()
            except DataError as error:
                refused += 1
                if refused == 1:
                    self._say(f"WARNING: the journal holds a record that does not fit: {error}")
        if refused:
            self._say(f"WARNING: {refused} records of the journal were left out")
        if self._position < counted:
            self._say(
                f"WARNING: the journal ends at entry {self._position}, the checkpoint has seen {counted}: what lies "
                "between is missing in the replay"
            )
            self._position = counted
        held = int(self.replay.stats()["replay/human_rows"])
        if held < self._human_held:
            self._say(
                f"WARNING: {self._human_held - held} of {self._human_held} steps of old interventions could not be put "
                "back: the journal keeps the newest steps (transport.journal_bytes keeps more of them)"
            )
        return steps

    def _on_episode(self, stats: EpisodeStats) -> None:
        self._reported.append(stats)

    def steps_allowed(self) -> int | None:
        """How many more steps lockstep actors may record now; None: no limit."""
        return self.limiter.steps_allowed(self.env_steps)

    def steps_missing(self) -> int:
        """How many more online steps the next update waits for; 0 where it waits for none, or for episodes."""
        c = self.config.learner
        if self.phase is Phase.WARMUP and self.episodes >= c.warmup_episodes:
            return max(0, c.training_starts - (self.env_steps - self._resumed_steps))
        return self.limiter.steps_missing(self.env_steps, c.cta_ratio) if self.phase is Phase.TRAIN else 0

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, tick: Callable[[], None] = lambda: None) -> None:
        """Work until `max_steps` or `stop`; `tick` is called between pieces of work (status, signals)."""
        self.say_if_empty()
        while self.phase is not Phase.DONE and not stop.is_set():
            if not self.work():
                start = time.perf_counter()
                with self._wake:
                    self._wake.wait(0.02)
                now = time.perf_counter()
                self._period.waited += now - start
                if now - self._period.start > MEASURE_AFTER:
                    self._measure(now)
            tick()

    def say_if_empty(self) -> None:
        """Tell that a resumed run has no online steps to train on, as where no journal was kept."""
        if self.updates and self.phase is not Phase.DONE and not self.replay.ready.online:
            need = self.config.learner.training_starts
            self._say(f"the online replay is empty: training goes on after {need} new steps")

    def work(self) -> bool:
        """One piece of work; False where there is none until more steps arrive."""
        self._drain_episodes()
        c = self.config.learner
        if self.phase is Phase.PRETRAIN:
            return self._pretrain(c.pretrain_steps, self.agent.update_policy, Phase.CRITIC_PRETRAIN)
        if self.phase is Phase.CRITIC_PRETRAIN:
            return self._pretrain(c.critic_pretrain_steps, self.agent.update_critic, Phase.WARMUP)
        if self.phase is Phase.WARMUP:
            return self._warm_up()
        if self.phase is Phase.CRITIC_WARMUP:
            return self._pretrain(c.critic_warmup_steps, self.agent.update_critic, Phase.TRAIN)
        if self.phase is Phase.TRAIN:
            return self._train()
        return False

    def _pretrain(self, total: int, update: Callable[..., Any], following: Phase) -> bool:
        if self.phase_updates < total:
            self.state, metrics = update(self.state, self._batches(PRETRAIN_SCAN))
            self.phase_updates += PRETRAIN_SCAN
            self._count(PRETRAIN_SCAN, metrics)
        if self.phase_updates >= total:
            self._enter(following)
            if following in (Phase.WARMUP, Phase.TRAIN):
                self.publish()
            if following is Phase.WARMUP:
                self.checkpoint()  # step 0: what imitation alone achieves
        return True

    def _warm_up(self) -> bool:
        c = self.config.learner
        fresh = self.env_steps - self._resumed_steps
        if self.episodes < c.warmup_episodes or fresh < c.training_starts or self.replay.ready.online == 0:
            return False
        if self.updates:  # a resume: the critic has been warmed up in an earlier life
            self.limiter.restore(self.env_steps, self.updates)
            self._enter(Phase.TRAIN)
        else:
            self.limiter.start(self.env_steps)
            self._enter(Phase.CRITIC_WARMUP)
        return True

    def _train(self) -> bool:
        c = self.config.learner
        if not self.limiter.may_update(self.env_steps, c.cta_ratio):
            return False
        start, actors_wait = time.perf_counter(), self.steps_allowed() == 0
        self.state, metrics = self.agent.update(self.state, self._batches(c.cta_ratio))
        self.limiter.did_update(c.cta_ratio)
        before = self.updates
        self.updates += c.cta_ratio
        self._count(c.cta_ratio, metrics)
        if actors_wait:
            self._period.actors_waited += time.perf_counter() - start
        if _crossed(before, self.updates, c.steps_per_update):
            self.publish()
        if c.checkpoint_period and _crossed(before, self.updates, c.checkpoint_period):
            self.checkpoint()
        if self.updates >= c.max_steps:
            self._enter(Phase.DONE)
        return True

    def _enter(self, phase: Phase) -> None:
        self._close_stream()  # what it prepared ahead was drawn from the data of the phase that ends
        self.phase, self.phase_updates = phase, 0
        self.metrics.event(f"phase: {phase}", self.counters())
        if phase is not Phase.DONE:
            self._say(f"phase: {phase}")

    def _batches(self, updates: int) -> ChunkBatch:
        if self._stream is None or self._stream_updates != updates:
            self._close_stream()
            self._stream = BatchStream(
                self.replay,
                self._rng,
                self.config.learner.batch_size,
                updates,
                put=jax.device_put,
                prefetch=self._prefetch,
            )
            self._stream_updates = updates
        start = time.perf_counter()
        batch = self._stream.next()
        self._period.sampling += time.perf_counter() - start
        return batch

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    # -- accounts --------------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """Where the run stands."""
        return Counters(self.updates, self.env_steps, self.human_ticks)

    def _count(self, updates: int, metrics: dict[str, jax.Array]) -> None:
        # Waiting for the update before last bounds what is dispatched ahead, and makes the rates true.
        jax.block_until_ready(self._period.last_metrics)
        self._period.last_metrics = metrics
        before = self._period.updates
        self._period.updates += updates
        if before // self.config.learner.log_period != self._period.updates // self.config.learner.log_period:
            self._log(metrics)

    def _measure(self, now: float) -> None:
        """Rates and waits since the last metric row."""
        p = self._period
        seconds = max(now - p.start, 1e-9)
        done = p.updates - p.logged_updates
        self.rates = {
            "rates/updates_per_s": done / seconds,
            "rates/env_steps_per_s": (self.env_steps - p.env_steps) / seconds,
            "wait/learner_s": p.waited,
            "wait/actor_s": p.actors_waited,
            "timer/sample_replay_buffer": p.sampling / max(done, 1),
            "timer/train": (seconds - p.waited - p.sampling) / max(done, 1),
        }
        self.waiting = (p.waited / seconds, p.actors_waited / seconds)

    def _log(self, metrics: dict[str, jax.Array]) -> None:
        p, now = self._period, time.perf_counter()
        self._measure(now)
        stats = self.replay.stats()
        values = {k: float(v) for k, v in metrics.items()}
        self.metrics.train(self.counters(), {**values, **self.rates, **stats})
        p.start, p.env_steps, p.logged_updates, p.waited, p.sampling = now, self.env_steps, p.updates, 0.0, 0.0
        p.actors_waited = 0.0

    def _drain_episodes(self) -> None:
        while self._finished_episodes:
            e = self._finished_episodes.popleft()
            self.episodes += 1
            self.human_ticks += e.human_ticks
            if e.success is not None:
                self.recent.append((e.success, e.human_ticks > 0))
            self.metrics.episode(
                self.counters(),
                actor_id=e.session.rpartition("/")[0] or e.session,
                ret=e.episode_return,
                length=e.length,
                succeed=e.success,
                intervention_steps=e.human_ticks,
                intervention_count=e.segments,
                # A resumed run gathers data before it trains on, but with a policy that has been trained.
                phase="train" if self.phase in (Phase.TRAIN, Phase.DONE) or self.updates else "warmup",
                number=self.episodes,
                q=[q for q, _ in e.decisions],
                g=[g for _, g in e.decisions],
            )

    # -- out -------------------------------------------------------------------------------------------------

    def publish(self) -> int:
        """Publish the policy; returns its version."""
        params = self.agent.policy_params(self.state, pretrained=self._pretrained)
        return self._publisher.publish(params, {"step": self.updates, "env_steps": self.env_steps})

    @property
    def _pretrained(self) -> bool:
        # A resumed run passes through the warm-up too, with a critic that has seen online data.
        return self.phase in (Phase.WARMUP, Phase.CRITIC_WARMUP) and self.updates == 0

    @property
    def version(self) -> int:
        """The newest published version."""
        return self._publisher.version

    def checkpoint(self) -> bool:
        """Write a checkpoint of the present step in the background."""
        policy = self.agent.flatten_params(self.agent.policy_params(self.state, pretrained=self._pretrained))
        with self._wake:  # counters and position of one moment
            env_steps, position = self.env_steps, self._position
            self._drain_episodes()
        meta = {
            "experiment": self.config.name,
            "agent": self.config.agent.kind,
            "normaliser_mode": self.normaliser.mode,
            "normaliser_digest": self.normaliser.digest(),
            "env_steps": env_steps,
            "journal_position": position,
            "human_ticks": self.human_ticks,
            "episodes": self.episodes,
            "human_steps_held": int(self.replay.stats()["replay/human_rows"]),
            "phase": str(self.phase),
            "sampler_rng": self._rng.bit_generator.state,
        }
        return self.checkpoints.save(self.updates, self.state, policy, self.normaliser.to_arrays(), meta)

    def close(self) -> None:
        """Write the final checkpoint, hand over the last snapshot, stop the threads.

        A full disk or a failed hand-over raises nothing: it is said.
        """
        self._close_stream()
        self._drain_episodes()
        if self.phase in (Phase.TRAIN, Phase.DONE):
            self.checkpoint()
        self.checkpoints.close()
        self._publisher.close()
        if (error := self._publisher.error) is not None:
            self._say(f"WARNING: the newest snapshot did not reach the actors ({type(error).__name__}: {error})")

    def _restored_normaliser(self, fresh: Normaliser, restored: Restored | None) -> Normaliser:
        if restored is None:
            return fresh
        saved = Normaliser.from_arrays(restored.meta["normaliser_mode"], restored.normaliser)
        if saved.digest() != fresh.digest():
            # Statistics of other demonstrations under an old network would shift every input.
            self._say("the demonstrations changed since the checkpoint: its normaliser is kept")
        return saved

    def _resume(self, step: int, state: AgentState, meta: dict[str, Any]) -> None:
        self.state = state
        self.updates = step
        self.env_steps = self._resumed_steps = int(meta["env_steps"])
        self.human_ticks, self.episodes = int(meta["human_ticks"]), int(meta["episodes"])
        self._position = int(meta.get("journal_position", 0))
        self._rng.bit_generator.state = meta["sampler_rng"]
        self._human_held = int(meta.get("human_steps_held", 0))
        self.metrics.resumed(self.counters(), self.episodes)
        if step >= self.config.learner.max_steps:
            self.phase = Phase.DONE
            self._say(f"resumed at step {step}: training is complete (raise --config.learner.max_steps to go on)")
        else:
            self.phase = Phase.WARMUP
            self._say(f"resumed at step {step}, {self.env_steps} online steps, {self._demos} demonstrations")
            self.publish()


class _Period:
    """Sums since the last metric row."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.updates = self.logged_updates = self.env_steps = 0
        self.waited = self.actors_waited = self.sampling = 0.0  # seconds
        self.last_metrics: Any = None


def _crossed(before: int, after: int, period: int) -> bool:
    return before // period != after // period
