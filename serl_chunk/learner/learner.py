"""The training loop: pretrain, train offline, warm up, train, publish, checkpoint. It never asks for the algorithm.

`work()` does one bounded piece of work and says whether there was any, so that the same loop serves a process
of its own (`cli/learner.py`), which sleeps when there is none, and the single-process mode, which then lets
the actor go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from serl_chunk.learner.host import LearnerHost
from serl_chunk.learner.offline_data import FeaturePrecomputation
from serl_chunk.learner.phases import Phase

__all__ = ["Learner", "Phase"]


class Learner(LearnerHost):
    """Runs the phases of one run; see `LearnerHost` for the arguments and for what it owns."""

    @property
    def updates_wanted(self) -> int:
        """Online updates after which training ends, as far as it is known."""
        return self.schedule.updates_wanted(self.online_updates)

    def steps_allowed(self) -> int | None:
        """How many more steps lockstep actors may record now; None: no limit."""
        return self.schedule.steps_allowed(self.phase)

    def steps_missing(self) -> int:
        """How many more online steps the next update waits for; 0 where it waits for none, or for episodes."""
        return self.schedule.steps_missing(self.phase, self.episodes)

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, tick: Callable[[], None] = lambda: None) -> None:
        """Work until the run's end or `stop`; `tick` is called between pieces of work, and within long ones."""
        self.say_if_empty()
        self.tick = tick
        while self.phase is not Phase.DONE and not stop.is_set():
            if not self.work():
                start = time.perf_counter()
                self.ingest.wait(0.02)
                self.training_stats.waited(time.perf_counter() - start)
            tick()

    def say_if_empty(self) -> None:
        """Tell that a resumed run has no online steps to train on, as where no journal was kept."""
        if self.online_updates and self.phase is not Phase.DONE and not self.replay.ready.online:
            need = self.schedule.starts_after
            self._say(f"the online replay is empty: training goes on after {need} new steps")

    def work(self) -> bool:
        """One piece of work; False where there is none until more steps arrive."""
        self._count_episodes()
        self._checkpoint_if_time()
        c = self.config.learner
        if self._evaluate_if_due():  # before anything is changed: a resume makes up for one that was cut short
            return True
        if self._precompute is not None and self._computed_features(self._precompute):
            return True
        if self.phase is Phase.PRETRAIN:
            return self._pretrain(c.pretrain_steps, self.agent.update_policy, Phase.CRITIC_PRETRAIN)
        if self.phase is Phase.CRITIC_PRETRAIN:
            following = Phase.OFFLINE if c.offline_steps else Phase.WARMUP
            return self._pretrain(self._of_critic(c.critic_pretrain_steps), self.agent.update_critic, following)
        if self.phase is Phase.OFFLINE:
            return self._train_offline()
        if self.phase is Phase.WARMUP:
            return self._warm_up()
        if self.phase is Phase.CRITIC_WARMUP:
            return self._pretrain(self._of_critic(c.critic_warmup_steps), self.agent.update_critic, Phase.TRAIN)
        if self.phase is Phase.TRAIN:
            return self._train()
        return False

    def _computed_features(self, precompute: FeaturePrecomputation) -> bool:
        """Before the first update: those of the frames that are there. Not in the constructor, so that a stop is heard
        and a journal has been read."""
        if self.phase is not Phase.DONE:
            with self.training_stats.aside():
                if precompute.work():
                    return True
        self._precompute = None
        return False

    def _pretrain(self, total: int, update: Callable[..., Any], following: Phase) -> bool:
        if self.phase_updates < total:
            n = self._updates_at_once
            self.state, metrics = update(self.state, self._next_batch(n))
            self.phase_updates += n
            self._made_updates()
            self.training_stats.updated(n, metrics)
        if self.phase_updates >= total:
            if following is Phase.WARMUP:
                self._begin_online()
                return True
            self._enter(following)
            if following is Phase.TRAIN:
                self.publish()
            if following is Phase.OFFLINE:
                self.checkpoint()  # step 0: what pretraining alone achieves, and where a killed run goes on
        return True

    def _train_offline(self) -> bool:
        c = self.config.learner
        if self.updates < c.offline_steps:
            self._update()
            self._checkpoint_if_due()
        elif not self._evaluate_if_due(now=True):
            self._begin_online()
        return True

    def _begin_online(self) -> None:
        """Everything learnt so far is kept; the first snapshot lets the actors begin."""
        self._offline_updates = self.updates
        self._enter(Phase.DONE if self.config.learner.online_steps == 0 else Phase.WARMUP)
        self.publish()
        self.checkpoint()  # at step 0: what imitation alone achieves

    def _update(self) -> None:
        """One compiled update of everything."""
        c = self.config.learner
        self.state, metrics = self.agent.update(self.state, self._next_batch(self.agent.batches_used(c.cta_ratio)))
        self.updates += c.cta_ratio
        self._made_updates()
        self.training_stats.updated(c.cta_ratio, metrics)
        self._data.advance(c.cta_ratio)

    def _checkpoint_if_due(self) -> None:
        c = self.config.learner
        if c.checkpoint_period and _crossed(self.updates - c.cta_ratio, self.updates, c.checkpoint_period):
            self.checkpoint()

    def _warm_up(self) -> bool:
        c = self.config.learner
        over = self.schedule.steps_over
        waits = self.episodes < c.warmup_episodes or self.ingest.fresh_steps < self.schedule.starts_after
        if (waits and not over) or self.replay.ready.online == 0:
            return over and self._end_unready()
        if waits:  # no more steps will come
            self._say(
                f"the warm-up ends early: all {c.online_steps} online steps are recorded, in {self.episodes} of "
                f"learner.warmup_episodes={c.warmup_episodes} episodes"
            )
        self.schedule.begin(self.online_updates)
        # After online updates the critic has been warmed up, in an earlier life.
        self._enter(Phase.TRAIN if self.online_updates else Phase.CRITIC_WARMUP)
        if self.phase is Phase.CRITIC_WARMUP:
            self.phase_updates = self._critic_warmed
        return True

    def _end_unready(self) -> bool:
        """All online steps came, and none can be trained on."""
        if not self._evaluate_if_due(now=True):
            self._say(
                f"training ends: all {self.config.learner.online_steps} online steps are recorded, and the online "
                "replay has no window to train on; raise --online_steps to go on"
            )
            self._enter(Phase.DONE)
        return True

    def _train(self) -> bool:
        c = self.config.learner
        if self.schedule.is_over(self.online_updates):
            if not self._evaluate_if_due(now=True):
                if not self.online_updates:
                    self._say(
                        f"training ends without an update: {self.schedule.steps_used} online steps entitle to none"
                    )
                self._enter(Phase.DONE)
            return True
        if not self.schedule.may_update:
            return False
        if not self.replay.ready.windows:  # what there was has been discarded
            self._say("the replay has no window left to train on: waiting for new steps")
            self._enter(Phase.WARMUP)
            return True
        start, actors_wait = time.perf_counter(), self.steps_allowed() == 0
        self._update()
        self.schedule.did_update()
        if actors_wait:
            self.training_stats.actors_waited(time.perf_counter() - start)
        if _crossed(self.updates - c.cta_ratio, self.updates, c.steps_per_update):
            self.publish()
        self._checkpoint_if_due()
        return True


def _crossed(before: int, after: int, period: int) -> bool:
    return before // period != after // period
