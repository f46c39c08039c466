"""The phases of training: pretrain, train offline, warm up, train on what actors record."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from serl_chunk.agents.spec import BatchSpec
from serl_chunk.learner.offline_data import InitialData, OfflineData
from serl_chunk.learner.schedule import PRETRAINING, Phase, TrainingSchedule, phases_of
from serl_chunk.learner.trainers.base import Trainer
from serl_chunk.replay.replay import BatchLoader, Request
from serl_chunk.runs.status_line import StatusFields
from serl_chunk.types import CameraSpec, ChunkBatch

if TYPE_CHECKING:
    from serl_chunk.learner.learner import Learner

logger = logging.getLogger(__name__)

ON_DATA = (*PRETRAINING, Phase.OFFLINE)  # phases of the demonstrations alone
SCAN = 20  # updates in one compiled call of a phase before training: amortises the dispatch
PIECE_BYTES = 256 << 20  # of their images; several such pieces are in memory at a time


def updates_at_once(batch_size: int, cameras: Sequence[CameraSpec]) -> int:
    """Return how many batches go to the device as one piece in the phases before training; 1 at least."""
    pixels = sum(c.height * c.width * 3 for c in cameras)  # of an observation; a window has two
    return max(1, min(SCAN, PIECE_BYTES // max(1, 2 * batch_size * pixels)))


class Saved(NamedTuple):
    """What a checkpoint keeps of the phases."""

    sampler_rng: Mapping[str, Any]
    phase: str
    phase_updates: int
    offline_updates: int
    pretrained: bool
    updates_owed: float | None  # None: the rate limiter had not begun


class PhaseTrainer(Trainer):
    """Trains in phases; a run has those whose lengths are set."""

    phase: Phase

    def __init__(self, learner: Learner, data: InitialData, *, threaded: bool, step: int | None) -> None:
        super().__init__(learner, data, threaded=threaded, step=step)
        self._agent, self._config = learner.agent, learner.config.learner
        c, replay = self._config, learner.replay
        self._data = OfflineData(replay, data, seek=step, seen=learner.value_range.demonstrations)
        self.schedule = TrainingSchedule(c, learner.router)
        self._rng = np.random.default_rng(learner.config.seed)
        prefetch = learner.config.replay.prefetch if threaded else 0
        self._batches = BatchLoader(replay, self._rng, put=jax.device_put, prefetch=prefetch)
        self._updates_at_once = updates_at_once(c.batch_size, learner.preprocess.cameras)
        critic = self._agent.has_critic
        self._lengths = {  # updates of the phases that train the policy or the critic alone
            Phase.PRETRAIN: c.pretrain_steps,
            Phase.CRITIC_PRETRAIN: c.critic_pretrain_steps if critic else 0,
        }
        self.phases = phases_of(c, has_critic=critic)
        self.phase, self.phase_updates = Phase.PRETRAIN, 0
        self._was_pretrained = True  # where a previous process stopped
        self._offline_updates: int | None = None  # those of the offline phase; None: all, it is not over

    @property
    def offline_updates(self) -> int:
        return self._learner.updates if self._offline_updates is None else self._offline_updates

    @property
    def online_updates(self) -> int:
        return self._learner.updates - self.offline_updates

    @property
    def done(self) -> bool:
        return self.phase is Phase.DONE

    @property
    def pretrained(self) -> bool:
        """Whether the critic saw no failure: neither online, nor in the data of an offline phase."""
        if self.online_updates or not self._was_pretrained:
            return False
        return not (self.offline_updates and self._data.has_failures)

    @property
    def policy_trained(self) -> bool:
        # A resumed run gathers data before it trains on, but with a policy that has been trained.
        return self.phase in (Phase.TRAIN, Phase.DONE) or self.online_updates > 0

    @property
    def counts_steps(self) -> bool:
        return self.phase in (Phase.OFFLINE, Phase.TRAIN, Phase.DONE)

    def steps_allowed(self) -> int | None:
        return self.schedule.steps_allowed(self.phase)

    def status(self) -> StatusFields:
        c, learner = self._config, self._learner
        if self.phase in self._lengths:
            done, total = self.phase_updates, self._lengths[self.phase]
        elif self.phase is Phase.WARMUP:
            done, total = learner.episodes, c.warmup_episodes
        elif self.phase is Phase.OFFLINE or c.online_steps == 0:
            done, total = self.offline_updates, c.offline_steps
        else:
            done, total = self.schedule.progress(self.online_updates)
        fields: StatusFields = {"done": done, "total": total}
        if self.phase in self.phases:
            fields |= {"phase_number": self.phases.index(self.phase) + 1, "phase_total": len(self.phases)}
        if c.online_steps != 0:
            limited = learner.config.actor.clock == "lockstep" and self.phase is Phase.TRAIN
            fields["steps_missing"] = self.schedule.steps_missing(self.phase, learner.episodes)
            fields["updates_due"] = self.schedule.updates_due
            fields["may_record"] = self.steps_allowed() if limited else None
        return fields

    def work(self) -> bool:
        agent, learner = self._agent, self._learner
        match self.phase:
            case Phase.PRETRAIN:
                return self._pretrain(agent.update_policy, "policy", Phase.CRITIC_PRETRAIN)
            case Phase.CRITIC_PRETRAIN:
                following = Phase.OFFLINE if self._config.offline_steps else Phase.WARMUP
                return self._pretrain(agent.update_critic, "critic", following)
            case Phase.OFFLINE:
                if learner.updates < self._config.offline_steps:
                    self._update()
                    self._checkpoint_if_due()
                elif not learner.evaluate_if_due(now=True):
                    self._begin_online()
                return True
            case Phase.WARMUP:
                return self._warm_up()
        return self.phase is Phase.TRAIN and self._train()

    def log_if_empty(self) -> None:
        if self.online_updates and not self.done and not self._learner.replay.ready.online:
            logger.info("the online replay is empty: training goes on after %d new steps", self.schedule.starts_after)

    def _enter(self, phase: Phase) -> None:
        self._batches.close()
        self.phase, self.phase_updates = phase, 0
        self._learner.metrics.event(f"phase: {phase}", self._learner.counters())
        if phase in self.phases:
            logger.info("phase: %s", self._phase_title)

    @property
    def _phase_title(self) -> str:
        """`3/5 warm-up`: the phase among those that this run has; the name alone where it is none of them."""
        number = f"{self.phases.index(self.phase) + 1}/{len(self.phases)} " if self.phase in self.phases else ""
        return f"{number}{self.phase}"

    def _next_batches(self, wanted: Mapping[str, BatchSpec], updates: int) -> dict[str, ChunkBatch]:
        size = self._config.batch_size
        requests = [
            Request(name, updates if spec.each else 1, spec.size or size, spec.next_observations)
            for name, spec in wanted.items()
        ]
        with self._learner.stats.timed("sampling"):
            return self._batches.next(*requests, half="demo" if self.phase in ON_DATA else None)

    def _pretrain(self, update: Callable[..., Any], name: str, following: Phase) -> bool:
        learner, n, total = self._learner, self._updates_at_once, self._lengths[self.phase]
        if self.phase_updates < total:
            wanted = self._agent.wants().get(name, BatchSpec(next_observations=name == "critic"))
            batch = self._next_batches({name: wanted._replace(each=True)}, n)[name]
            with learner.stats.first_call(f"updates of the {name}"):
                learner.state, metrics = update(learner.state, learner.base, batch)
            self.phase_updates += n
            learner.updated(n, metrics)
        if self.phase_updates >= total:
            if following is Phase.WARMUP:
                self._begin_online()
                return True
            self._enter(following)
            if following is Phase.OFFLINE:
                learner.checkpoint()  # step 0: what pretraining alone achieves, and where a killed run goes on
        return True

    def _begin_online(self) -> None:
        """Keep everything learnt so far; the first snapshot lets the actors begin."""
        learner = self._learner
        self._offline_updates = learner.updates
        if self._config.pretrain_steps or learner.updates:
            learner.check_policy()
        self._enter(Phase.DONE if self._config.online_steps == 0 else Phase.WARMUP)
        learner.publish()
        learner.checkpoint()  # at step 0: what imitation alone achieves

    def _update(self) -> None:
        learner, n = self._learner, self._config.cta_ratio
        batches = self._next_batches(self._agent.wants(), n)
        with learner.stats.first_call("updates"):
            learner.state, metrics = self._agent.update(learner.state, learner.base, batches)
        learner.updates += n
        learner.updated(n, metrics)
        self._data.advance(n)

    def _crossed(self, period: int) -> bool:
        updates = self._learner.updates
        return (updates - self._config.cta_ratio) // period != updates // period

    def _checkpoint_if_due(self) -> None:
        if (period := self._config.checkpoint_period) and self._crossed(period):
            self._learner.checkpoint()

    def _warm_up(self) -> bool:
        c, learner, over = self._config, self._learner, self.schedule.steps_over
        waits = learner.episodes < c.warmup_episodes or learner.router.fresh_steps < self.schedule.starts_after
        if (waits and not over) or learner.replay.ready.online == 0:
            return over and self._end_unready()
        if waits:  # no more steps will come
            logger.info(
                f"the warm-up ends early: all {c.online_steps} online steps came, in {learner.episodes} of "
                f"learner.warmup_episodes={c.warmup_episodes} episodes"
            )
        self.schedule.begin(self.online_updates)
        self._enter(Phase.TRAIN)
        return True

    def _end_unready(self) -> bool:
        """All online steps came, and none can be trained on."""
        if not self._learner.evaluate_if_due(now=True):
            logger.warning(
                f"training ends: all {self._config.online_steps} online steps are recorded, and the online replay has "
                "no window to train on. Raise learner.online_steps to go on"
            )
            self._enter(Phase.DONE)
        return True

    def _train(self) -> bool:
        learner, c = self._learner, self._config
        if self.schedule.is_over(self.online_updates):
            if learner.evaluate_if_due(now=True):
                return True
            if not self.online_updates:
                steps, ratio = self.schedule.steps_used, c.utd_ratio
                reason = (
                    f"all {steps} online steps came before the first one. Raise learner.online_steps to go on"
                    if ratio is None
                    else f"{steps} online steps are fewer than learner.utd_ratio={ratio:g} requires"
                )
                logger.warning("training ends without an update: %s", reason)
            self._enter(Phase.DONE)
            return True
        if not self.schedule.may_update:
            return False
        if not learner.replay.ready.windows:  # what there was has been discarded
            logger.info("the replay has no window left to train on: training goes on with new steps")
            self._enter(Phase.WARMUP)
            return True
        with learner.stats.timed("actors_waited") if self.steps_allowed() == 0 else contextlib.nullcontext():
            self._update()
            self.schedule.did_update()
        if self._crossed(c.steps_per_update):
            learner.publish()
        self._checkpoint_if_due()
        return True

    def check_data(self) -> None:
        """Raise ConfigError where the phase trains on data that hold no window, or imitates none of their steps."""
        c, phase = self._config, self.phase
        if phase not in ON_DATA:
            return
        pretrains = phase in PRETRAINING and (c.pretrain_steps or self._lengths[Phase.CRITIC_PRETRAIN])
        # With online steps, human ones may be demonstrations: a journal may follow.
        if (pretrains or self._learner.updates < c.offline_steps) and not self._learner.env_steps:
            self._data.require_window()
            if phase is Phase.PRETRAIN and c.pretrain_steps:
                self._data.require_imitated(self._learner.config)

    def progress(self, env_steps: int) -> dict[str, Any]:
        return Saved(
            self._rng.bit_generator.state, str(self.phase), self.phase_updates, self.offline_updates, self.pretrained,
            self.schedule.limiter.owed(env_steps),
        )._asdict()  # fmt: skip

    def resume(self, progress: Mapping[str, Any], *, missed_evaluation: bool) -> None:
        saved = Saved(**progress)
        self._rng.bit_generator.state = dict(saved.sampler_rng)
        self._offline_updates = saved.offline_updates
        self._was_pretrained = saved.pretrained
        self.schedule.resume(self.online_updates, saved.updates_owed)
        offline, online, missed = self.offline_updates, self.online_updates, missed_evaluation
        self.phase = self.schedule.resumed_phase(
            saved.phase, offline_updates=offline, online_updates=online, missed=missed
        )
        if self.phase in ON_DATA:
            self._offline_updates = None
        if self.phase in PRETRAINING:
            self.phase_updates = saved.phase_updates
        step = self._learner.updates
        if self.done:
            hint = self.schedule.resume_hint(self.online_updates)
            logger.info("resumed at step %d: training is complete (%s)", step, hint)
            return
        where = f", in phase {self._phase_title}" if self.phase in ON_DATA else ""
        where += f" after update {self.phase_updates}" if self.phase in PRETRAINING else ""
        steps, demos = self._learner.env_steps, self._data.episodes
        logger.info("resumed at step %d, %d online steps, %d demonstrations%s", step, steps, demos, where)
        if self.phase not in ON_DATA:
            self._learner.publish()

    def close(self) -> None:
        self._batches.close()
        self._data.close()
