"""The part of a learner that is the same in every phase: state, replay, checkpoints, publishing, statistics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from serl_chunk.agents.base import Agent
from serl_chunk.agents.state import AgentState
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.learner.checks import ValueRange, restored_normaliser, warn_of_imitated_critic, warn_of_random_backbone
from serl_chunk.learner.ingest import IngestState, RecordIngest
from serl_chunk.learner.offline_data import Dataset, FeaturePrecomputation, OfflineData
from serl_chunk.learner.phases import PRETRAINING, Phase, TrainingProgress, resume_hint, resumed_phase
from serl_chunk.learner.publisher import Publish, SnapshotPublisher
from serl_chunk.learner.schedule import EvalSchedule, Evaluate, TrainingSchedule, last_evaluated
from serl_chunk.learner.training_stats import TrainingStats
from serl_chunk.replay.batch_loader import BatchLoader, updates_at_once
from serl_chunk.replay.episode import EpisodeStats
from serl_chunk.replay.replay import Replay
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.metric_rows import Counters, read_metrics
from serl_chunk.runs.metrics import MetricsLog
from serl_chunk.runs.timed_checkpoints import TimedCheckpoints
from serl_chunk.types import ChunkBatch, Episode, RobotSpec, Snapshot

ON_DATA = (*PRETRAINING, Phase.OFFLINE)  # phases of the demonstrations alone


class LearnerHost:
    """Owns the agent's state, the replay, the checkpoints and the metrics of one run; `Learner` runs the phases.

    Args:
        demos: demonstrations, kept for the whole run.
        publish: takes each snapshot and its info (on the publisher's thread where `threaded`).
        threaded: prefetch batches and publish beside the training thread; False reproduces a run bit for bit.
        dataset: opens offline data that are replaced part by part, in the state they have after so many updates.
        evaluate: what `learner.eval_interval` calls; closed with the learner.
        say: prints one line for the operator.
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
        dataset: Dataset | None = None,
        evaluate: Evaluate | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.config, self.agent, self.metrics = config, agent, metrics
        self._say = say
        c = config.learner
        OfflineData.require(c, there=bool(demos) or dataset is not None)
        self.checkpoints = CheckpointStore(run_dir, keep=c.keep_checkpoints)
        self.timed_checkpoints = TimedCheckpoints(run_dir)
        self.state: AgentState = agent.init(jax.random.key(config.seed))
        restored = self.checkpoints.restore_state(jax.eval_shape(lambda: self.state))
        if restored is None:  # else the weights are in the checkpoint, and their file need not be there any more
            self.state = agent.pretrained(self.state)
            warn_of_random_backbone(config.agent, say)
        else:
            saved = Normaliser.from_arrays(restored.meta["normaliser_mode"], restored.normaliser)
            normaliser = restored_normaliser(saved, normaliser, same_data=dataset is None, say=say)
        self.normaliser = normaliser
        # With the weights that the run has: they never change.
        embed = agent.frame_embedder(self.state if restored is None else restored.state)

        def make_replay(ended: Callable[[EpisodeStats], None]) -> Replay:
            a = config.agent
            return Replay(
                spec, config, self.normaliser, image_keys=a.image_keys, bc_on=a.bc_on, on_episode=ended, embed=embed
            )

        self.ingest = RecordIngest(make_replay, say)
        self.replay = self.ingest.replay
        self._precompute = None if embed is None else FeaturePrecomputation(self.replay, say)
        self._range = ValueRange(config, say)
        self._data = OfflineData(
            self.replay, demos, dataset,
            seek=None if restored is None else restored.step, seen=self._range.demonstrations,
        )  # fmt: skip
        self.schedule = TrainingSchedule(c, self.ingest)
        self._publisher = SnapshotPublisher(agent, publish, run_dir, threaded=threaded)
        self._rng = np.random.default_rng(config.seed)
        prefetch = config.replay.prefetch if threaded else 0
        self._batches = BatchLoader(self.replay, self._rng, c.batch_size, prefetch)
        self._updates_at_once = updates_at_once(c.batch_size, [spec.camera(k) for k in config.agent.image_keys])
        self.phase = Phase.PRETRAIN
        self.phase_updates = 0
        self.updates = 0  # critic updates of the offline and the online phase
        self.has_trained = False  # whether this process has made an update, of whatever kind
        self._unsaved = False  # whether it has since the newest checkpoint
        self._critic_warmed = 0  # updates of a critic's warm-up that a previous process was stopped in
        self._offline_updates: int | None = None  # of them, those of the offline phase; None: all, it is not over
        self.human_ticks = 0
        self.episodes = 0
        self._evaluate, self._eval_schedule = evaluate, EvalSchedule(c.eval_interval)
        self.tick: Callable[[], None] = lambda: None  # for what takes long within one piece of work
        self.training_stats = TrainingStats(metrics, self.replay, c.log_period, self.counters)
        if restored is not None:
            self._resume(*restored[:3])
        pretrains = self.phase in PRETRAINING and (c.pretrain_steps or self._of_critic(c.critic_pretrain_steps))
        offline = self.phase in ON_DATA and self.updates < c.offline_steps
        if (
            pretrains or offline
        ) and not self.env_steps:  # else human steps may be demonstrations: a journal may follow
            self._data.require_window()
            if self.phase is Phase.PRETRAIN and c.pretrain_steps:
                self._data.require_imitated(config.agent)
        if agent.imitates_critic and c.offline_steps and self.phase in ON_DATA and not self._data.has_failures:
            warn_of_imitated_critic(say)

    @property
    def offline_updates(self) -> int:
        """Critic updates of the offline phase."""
        return self.updates if self._offline_updates is None else self._offline_updates

    @property
    def online_updates(self) -> int:
        """Critic updates of the online phase."""
        return self.updates - self.offline_updates

    @property
    def env_steps(self) -> int:
        """Online steps so far."""
        return self.ingest.env_steps

    def _of_critic(self, updates: int) -> int:
        """`updates` of the critic alone, where there is one."""
        return updates if self.agent.has_critic else 0

    def _evaluate_if_due(self, *, now: bool = False) -> bool:
        """Evaluate the present policy where the schedule wants it (`now`: an end does); False where it does not.

        Nothing that training draws from is touched, and the time it takes is no time of training.
        """
        if self._evaluate is None or not self._eval_schedule.due(self.updates, now=now):
            return False
        params = self.agent.flatten_params(self.agent.policy_params(self.state, pretrained=self._pretrained))
        with self.training_stats.evaluation():
            self.tick()
            self._evaluate(Snapshot(self.updates, params), self.counters())
        self._eval_schedule.last = self.updates  # also where a stop cut it short: the next life makes up for it
        return True

    def _enter(self, phase: Phase) -> None:
        self._batches.close()
        self.phase, self.phase_updates = phase, 0
        self.metrics.event(f"phase: {phase}", self.counters())
        if phase is not Phase.DONE:
            self._say(f"phase: {phase}")

    def _next_batch(self, updates: int) -> ChunkBatch:
        stream = self._batches.stream(updates, "demo" if self.phase in ON_DATA else None)
        with self.training_stats.sampling():
            return stream.next()

    # -- counts ----------------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """Where the run stands."""
        return Counters(self.updates, self.env_steps, self.human_ticks)

    def _count_episodes(self) -> IngestState:
        """Note what ended since the last time; what had come in at that moment."""
        taken = self.ingest.take()
        for e in taken.episodes:
            self.episodes += 1
            self.human_ticks += e.human_ticks
            self._range.online(e.episode_id, *e.returns)
            # A resumed run gathers data before it trains on, but with a policy that has been trained.
            trained = self.phase in (Phase.TRAIN, Phase.DONE) or self.online_updates
            self.training_stats.episode(e, number=self.episodes, phase="train" if trained else "warmup")
        return taken

    # -- out -------------------------------------------------------------------------------------------------

    def publish(self) -> int:
        """Publish the policy; returns its version."""
        params = self.agent.policy_params(self.state, pretrained=self._pretrained)
        info = {"step": self.updates, "env_steps": self.env_steps}
        return self._publisher.publish(params, info, normaliser=self.normaliser.digest())

    @property
    def _pretrained(self) -> bool:
        """Whether the critic has seen no failure yet: neither online, nor in the data of an offline phase."""
        # A resumed run passes through the warm-up too, with a critic that has seen online data.
        warmed_up = self.phase is Phase.TRAIN and self._of_critic(self.config.learner.critic_warmup_steps)
        if warmed_up or self.online_updates:
            return False
        return not (self.offline_updates and self._data.has_failures)

    @property
    def version(self) -> int:
        """The newest published version."""
        return self._publisher.version

    def checkpoint(self, *, timed: bool = False) -> bool:
        """Write a checkpoint of the present state in the background: of this step, or `timed`, which takes the place
        of the timed one before; False where writing failed at once."""
        policy = self.agent.flatten_params(self.agent.policy_params(self.state, pretrained=self._pretrained))
        taken = self._count_episodes()
        meta = {
            "experiment": self.config.name,
            "agent": self.config.agent.kind,
            "normaliser_mode": self.normaliser.mode,
            "normaliser_digest": self.normaliser.digest(),
            "updates": int(self.state.critic_updates) + int(self.state.policy_updates),
            **TrainingProgress(
                env_steps=taken.env_steps,
                human_ticks=self.human_ticks,
                episodes=self.episodes,
                sampler_rng=self._rng.bit_generator.state,
                journal_position=taken.position,
                human_steps_held=int(self.replay.stats()["replay/human_rows"]),
                phase=str(self.phase),
                phase_updates=self.phase_updates,
                offline_updates=self.offline_updates,
                updates_owed=self.schedule.owed(taken.env_steps),
            ).notes(),
        }
        content = (self.updates, self.state, policy, self.normaliser.to_arrays(), meta)
        if timed:
            self.timed_checkpoints.save(*content)
            self._unsaved = False
            return True
        self.timed_checkpoints.postpone()
        self._unsaved = not self.checkpoints.save(*content)
        return not self._unsaved

    def _made_updates(self) -> None:
        """Note that there is something to save."""
        self.has_trained = self._unsaved = True

    def _checkpoint_if_time(self) -> None:
        """A timed checkpoint, where one is due and there is something new."""
        if self._unsaved and self.timed_checkpoints.due:
            self.checkpoint(timed=True)

    @property
    def writes_checkpoint(self) -> bool:
        """Whether closing now writes one: while actors collect for the warm-up there is nothing to write."""
        return self._unsaved or self._of_a_step

    @property
    def _of_a_step(self) -> bool:
        """Whether that is the one of its step: before and between the phases that count steps it is a timed one."""
        return self.phase in (Phase.OFFLINE, Phase.TRAIN, Phase.DONE)

    def close(self) -> None:
        """Write the final checkpoint, hand over the last snapshot, stop the threads.

        A full disk or a failed hand-over raises nothing: it is said.
        """
        self._batches.close()
        self._count_episodes()
        if self._of_a_step and not (self._unsaved and self.updates in self.checkpoints.steps()):
            self.checkpoint()
        elif self._unsaved:
            self.checkpoint(timed=True)
        self.checkpoints.close()
        self.timed_checkpoints.wait()
        self._publisher.close()
        self._data.close()
        if self._evaluate is not None:
            self._evaluate.close()
        if (error := self._publisher.error) is not None:
            self._say(f"WARNING: the newest snapshot did not reach the actors ({type(error).__name__}: {error})")

    def _resume(self, step: int, state: AgentState, meta: dict[str, Any]) -> None:
        saved = TrainingProgress.of(meta)
        self.state = state
        self.updates = step
        self.ingest.resume(saved.env_steps, saved.journal_position, saved.human_steps_held)
        self.human_ticks, self.episodes = saved.human_ticks, saved.episodes
        self._rng.bit_generator.state = dict(saved.sampler_rng)
        self._offline_updates = saved.offline_updates
        self.schedule.resume(self.online_updates, saved.updates_owed)
        self.metrics.resumed(self.counters(), self.episodes)
        if self._evaluate is not None:
            self._eval_schedule.last = last_evaluated(read_metrics(self.checkpoints.run_dir))
        self.phase = resumed_phase(
            self.config.learner,
            saved.phase,
            offline_updates=self.offline_updates,
            online_updates=self.online_updates,
            over=self.schedule.is_over(self.online_updates),
            missed=self._evaluate is not None and self._eval_schedule.due(self.updates, now=True),
        )
        if self.phase in ON_DATA:
            self._offline_updates = None
        if self.phase in PRETRAINING:
            self.phase_updates = saved.phase_updates
        elif not self.online_updates and saved.phase == Phase.CRITIC_WARMUP:
            self._critic_warmed = saved.phase_updates
        elif not self.online_updates and saved.phase == Phase.TRAIN:
            self._critic_warmed = self.config.learner.critic_warmup_steps
        if self.phase is Phase.DONE:
            self._say(f"resumed at step {step}: training is complete ({self._how_to_go_on()})")
            return
        self._say(
            f"resumed at step {step}, {self.env_steps} online steps, {self._data.episodes} demonstrations"
            + (", in the offline phase" if self.phase is Phase.OFFLINE else "")
            + (f", after update {self.phase_updates} of phase {self.phase}" if self.phase in PRETRAINING else "")
        )
        if self.phase not in ON_DATA:
            self.publish()

    def _how_to_go_on(self) -> str:
        return resume_hint(self.config.learner, online_updates=self.online_updates, steps_over=self.schedule.steps_over)
