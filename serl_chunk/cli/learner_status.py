"""A learner's state as its status line shows it."""

from __future__ import annotations

import time

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.phases import Phase
from serl_chunk.runs.status_line import StatusFields, StatusLine
from serl_chunk.transport.server.server import LearnerServer

STATUS_PERIOD = 0.1  # seconds between looks at the server's health and at the status line
POKE_PERIOD = 0.01  # seconds between pushed allowances


def status_fields(config: ExperimentConfig, learner: Learner, server: LearnerServer | None = None) -> StatusFields:
    """The learner's present state for the status line, with its network's where there is one."""
    c = config.learner
    offline = (learner.offline_updates, c.offline_steps)
    totals = {
        Phase.PRETRAIN: (learner.phase_updates, c.pretrain_steps),
        Phase.CRITIC_PRETRAIN: (learner.phase_updates, c.critic_pretrain_steps),
        Phase.OFFLINE: offline,
        Phase.WARMUP: (learner.episodes, c.warmup_episodes),
        Phase.CRITIC_WARMUP: (learner.phase_updates, c.critic_warmup_steps),
    }
    online = (learner.online_updates, learner.updates_wanted)
    done, total = totals.get(learner.phase, offline if c.online_steps == 0 else online)
    limited = config.actor.clock == "lockstep" and learner.phase is Phase.TRAIN
    always: StatusFields = {
        "done": done,
        "total": total,
        "paused": learner.training_stats.evaluation_seconds,
        "evaluating": learner.training_stats.evaluating,
        "step": learner.updates,
        "updates_per_s": learner.training_stats.rates.get("rates/updates_per_s", 0.0),
    }
    if c.online_steps == 0:  # there are no actors
        return always
    fields: StatusFields = {
        **always,
        "env_steps": learner.env_steps,
        "episodes": learner.episodes,
        "success": learner.training_stats.success_without_intervention,
        "human": learner.human_ticks / learner.env_steps if learner.env_steps else None,
        "learner_wait": learner.training_stats.waiting[0],
        "actor_wait": learner.training_stats.waiting[1],
        "steps_missing": learner.steps_missing(),
        "updates_due": learner.schedule.updates_due,
        "may_record": learner.steps_allowed() if limited else None,
        "empty_half": learner.replay.empty_half,
        "version": learner.version,
    }
    if server is not None:
        fields["actors"] = tuple(s["actor_id"] for s in server.sessions() if s["live"])
        fields["stalled"] = server.stalled
    return fields


class StatusReporter:
    """Keeps the status line true, and the server's errors from passing unseen."""

    def __init__(self, config: ExperimentConfig, learner: Learner, server: LearnerServer, status: StatusLine) -> None:
        self._config, self._learner, self._server, self._status = config, learner, server, status
        self._next = self._next_poke = 0.0
        self._poked = 0

    def tick(self) -> None:
        now = time.monotonic()
        if self._learner.updates != self._poked and now >= self._next_poke:
            # Lockstep actors wait for the updates their steps entitle to: tell them soon, but not for each one.
            self._poked, self._next_poke = self._learner.updates, now + POKE_PERIOD
            self._server.push_allowances()
        if now < self._next:
            return
        self._next = now + STATUS_PERIOD
        self._server.check()
        self._status.update(str(self._learner.phase), status_fields(self._config, self._learner, self._server))
