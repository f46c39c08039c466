"""Training in phases: pretrain, train offline, warm up, train on what actors record."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from serl_chunk.agents.acfql import Acfql
from serl_chunk.agents.state import Metrics
from serl_chunk.learner.device_replay import DeviceReplay, gathers
from serl_chunk.learner.offline_data import InitialData
from serl_chunk.learner.schedule import PRETRAINING, Phase, TrainingSchedule, phases_of
from serl_chunk.learner.trainers.pretraining import ON_DATA, PretrainingTrainer
from serl_chunk.learner.trainers.relabelling import Relabelled
from serl_chunk.runs.status_line import StatusFields

if TYPE_CHECKING:
    from serl_chunk.learner.learner import Learner

logger = logging.getLogger(__name__)


class Saved(NamedTuple):
    """What a checkpoint keeps of the phases."""

    sampler_rng: Mapping[str, Any]
    phase: str
    phase_updates: int
    offline_updates: int
    pretrained: bool
    updates_owed: float | None  # None: the rate limiter had not begun


class PhaseTrainer(PretrainingTrainer):
    """Trains in phases; a run has those whose lengths are set."""

    def __init__(self, learner: Learner, data: InitialData, *, threaded: bool, step: int | None) -> None:
        super().__init__(learner, data, threaded=threaded, step=step)
        self.schedule = TrainingSchedule(self._config, learner.router)
        size = self._config.policy_batch_size or self._config.batch_size
        self._relabelled: Relabelled | None = None
        if isinstance(self._agent, Acfql) and learner.config.agent.relabels:
            prefetch = learner.config.replay.prefetch if threaded else 0
            self._relabelled = Relabelled(learner.replay, self._agent, size, learner.config.seed, prefetch=prefetch)
        self._device: DeviceReplay | None = None
        if gathers(learner.config, self._agent, learner.replay, learner.devices):
            self._device = DeviceReplay(
                learner.replay, self._agent, learner.config, learner.preprocess, self._rng, threaded=threaded
            )
        self.phases = phases_of(self._config, has_critic=self._agent.has_critic)
        self._was_pretrained = True  # where a previous process stopped
        self._offline_updates: int | None = None  # those of the offline phase; None: all, it is not over

    @property
    def offline_updates(self) -> int:
        return self._learner.updates if self._offline_updates is None else self._offline_updates

    @property
    def online_updates(self) -> int:
        return self._learner.updates - self.offline_updates

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

    def _enter(self, phase: Phase) -> None:
        if self._relabelled is not None:
            self._relabelled.close()
        super()._enter(phase)

    def close(self) -> None:
        if self._relabelled is not None:
            self._relabelled.close()
        if self._device is not None:
            self._device.close()
        super().close()

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
            fields["steps_missing"] = self.steps_missing
            fields["updates_due"] = self.schedule.updates_due
            fields["may_record"] = self.steps_allowed() if limited else None
        return fields

    @property
    def steps_missing(self) -> int:
        return self.schedule.steps_missing(self.phase, self._learner.episodes)

    def work(self) -> bool:
        agent, learner = self._agent, self._learner
        match self.phase:
            case Phase.PRETRAIN:
                if self._pretrain(agent.update_policy, "policy"):
                    self._enter(Phase.CRITIC_PRETRAIN)
                return True
            case Phase.CRITIC_PRETRAIN:
                if self._pretrain(agent.update_critic, "critic"):
                    self._end_pretraining()
                return True
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

    def _end_pretraining(self) -> None:
        if not self._config.offline_steps:
            self._begin_online()
            return
        self._enter(Phase.OFFLINE)
        self._learner.checkpoint()  # step 0: what pretraining alone achieves, and where a killed run goes on

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
        """Do the updates of a call, or of several."""
        learner, n = self._learner, self._config.cta_ratio
        if self._device is not None:
            calls, metrics = self._update_on_device(self._device)
        else:
            calls, metrics = 1, self._update_with_batches()
        learner.updates += n * calls
        learner.updated(n * calls, metrics)
        self._data.advance(n * calls)

    def _update_on_device(self, device: DeviceReplay) -> tuple[int, Metrics]:
        learner = self._learner
        requests = self._requests(self._agent.wants(), self._config.cta_ratio)
        owed = self._calls_owed if learner.stats.has_called("updates") else 1  # the first one compiles
        program = device.program(owed, learner.state, learner.base, requests)
        with learner.stats.timed("sampling"):
            drawn = device.draw(program.calls, requests, self._half)
        with learner.stats.first_call("updates"):
            learner.state, metrics = device.update(learner.state, learner.base, drawn, program)
        return program.calls, metrics

    @property
    def _calls_owed(self) -> int:
        """Calls of updates that are due before something else is: a row, a publication, a checkpoint, an end."""
        c, learner, online = self._config, self._learner, self.phase is Phase.TRAIN
        end = c.max_steps - self.online_updates if online else c.offline_steps - learner.updates
        periods = c.checkpoint_period, c.export_period, learner.eval_interval, c.steps_per_update if online else 0
        left = [end, learner.stats.updates_to_row, *(p - learner.updates % p for p in periods if p)]
        left += [] if self._data.updates_left is None else [self._data.updates_left]
        calls = min(-(-updates // c.cta_ratio) for updates in left)
        limited = online and c.utd_ratio is not None
        return min(calls, self.schedule.updates_due // c.cta_ratio) if limited else calls

    def _update_with_batches(self) -> Metrics:
        learner, n = self._learner, self._config.cta_ratio
        wants, chosen = self._agent.wants(), Metrics()
        teacher = None if self.pretrained else self._relabelled  # a critic that does not choose yet is none either
        if self._relabelled is not None and teacher is None:
            wants["policy"] = self._agent.batch_spec("policy")
        batches = self._next_batches(wants, n)
        if teacher is not None:
            with learner.stats.timed("relabelling"):
                batches["policy"], chosen = teacher.next(learner.state, learner.base, learner.updates)
        if self._relabelled is not None:
            chosen = chosen | {"relabel/share": jnp.float32(teacher is not None)}
        with learner.stats.first_call("updates"):
            learner.state, metrics = self._agent.update(learner.state, learner.base, batches)
        return metrics | chosen

    def _crossed(self, period: int) -> bool:
        updates = self._learner.updates
        return (updates - self._config.cta_ratio) // period != updates // period

    def _checkpoint_if_due(self) -> None:
        if (period := self._config.checkpoint_period) and self._crossed(period):
            self._learner.checkpoint()
        if (period := self._config.export_period) and self._crossed(period):
            self._learner.export()

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
            before = learner.updates
            self._update()
            self.schedule.did_update((learner.updates - before) // c.cta_ratio)
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
