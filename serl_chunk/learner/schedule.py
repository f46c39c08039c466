"""Schedules: the phases of a run, updates relative to online steps, a run's end, the learner's own evaluations."""

from __future__ import annotations

import dataclasses
import enum
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from serl_chunk.config.experiment import LearnerConfig
from serl_chunk.types import Snapshot

if TYPE_CHECKING:
    from serl_chunk.learner.intake import RecordRouter
    from serl_chunk.learner.learner import Learner

BY_LEARNER = "learner"  # `by` of the rows that such an evaluation writes
IDLE_S = 2.0  # without a step, after which a share is taken back where another session waits for one
NOTICE_S = 1.0  # how long a share that was taken back may still be used: until its actor has read so
TURN_S = 10.0  # how long a session whose share was taken back is the last in the queue


class Phase(enum.StrEnum):
    """A phase of training; phases only go forward."""

    PRETRAIN = "pretrain"
    CRITIC_PRETRAIN = "critic pretrain"
    OFFLINE = "offline"
    WARMUP = "warm-up"
    COLLECT = "collect"  # the episodes of an iteration
    TRAIN = "train"
    DONE = "done"


PRETRAINING = (Phase.PRETRAIN, Phase.CRITIC_PRETRAIN)


def phases_of(config: LearnerConfig, *, has_critic: bool) -> list[Phase]:
    """Return the phases that a run has, in their order."""
    online = config.online_steps != 0
    wanted = {
        Phase.PRETRAIN: config.pretrain_steps,
        Phase.CRITIC_PRETRAIN: has_critic and config.critic_pretrain_steps,
        Phase.OFFLINE: config.offline_steps,
        Phase.WARMUP: online,
        Phase.TRAIN: online,
    }
    return [phase for phase, steps in wanted.items() if steps]


@dataclasses.dataclass(frozen=True)
class TrainingProgress:
    """The plain values that a checkpoint records in addition to the agent's state."""

    env_steps: int
    human_ticks: int
    episodes: int
    journal_position: int
    human_steps_held: int
    trainer: Mapping[str, Any]  # what it keeps itself

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> TrainingProgress:
        return cls(**{field.name: meta[field.name] for field in dataclasses.fields(cls)})


@dataclasses.dataclass
class RateLimiter:
    """Keeps critic updates near `utd_ratio` times the online steps recorded since `start`.

    Before `start` nothing is limited: pretraining has its own lengths, the warm-up is counted in episodes. Without a
    ratio nothing is limited after it either: every update is allowed, and every step.
    """

    utd_ratio: float | None  # critic updates per online step; None: no limit
    max_lag_steps: int  # steps an actor may record beyond those the updates so far account for
    _base_steps: int | None = None
    updates: int = 0  # critic updates done since `start`

    def start(self, online_steps: int, updates: int = 0, owed: float = 0.0) -> None:
        """Begin; after a resume, of the updates that `online_steps` allow, `updates` were done and `owed` were not."""
        self._base_steps = online_steps
        if self.utd_ratio is not None:
            self._base_steps -= round((updates + owed) / self.utd_ratio)
        self.updates = updates

    @property
    def started(self) -> bool:
        return self._base_steps is not None

    def _earned(self, online_steps: int) -> float | None:
        """Updates since `start` that so many steps allow, parts of one included; None before it or without a ratio."""
        if self._base_steps is None or self.utd_ratio is None:
            return None
        return (online_steps - self._base_steps) * self.utd_ratio

    def owed(self, online_steps: int) -> float | None:
        """Updates, also parts of one, with which `start` goes on as if nothing had been; None before `start`."""
        if self.started and self.utd_ratio is None:
            return 0.0  # a run that goes on with a ratio counts from here
        return None if (earned := self._earned(online_steps)) is None else earned - self.updates

    def updates_allowed(self, online_steps: int) -> int | None:
        """Critic updates since `start` that so many steps allow, those done included; None as for `_earned`."""
        return None if (earned := self._earned(online_steps)) is None else max(0, math.floor(earned + 1e-6))

    def may_update(self, online_steps: int, count: int) -> bool:
        """Whether `count` more critic updates are covered by the steps recorded so far."""
        if self.utd_ratio is None:
            return self.started
        earned = self._earned(online_steps)
        # 100 steps at 0.29 allow 29 updates, not the 28 that rounding leaves.
        return earned is not None and self.updates + count <= earned + 1e-6

    def steps_missing(self, online_steps: int, count: int) -> int:
        """Steps that `count` more critic updates wait for; 0 where they are covered, or before `start`."""
        if self._base_steps is None or self.utd_ratio is None:
            return 0
        need = math.ceil((self.updates + count - 1e-6) / self.utd_ratio)
        return max(0, self._base_steps + need - online_steps)

    def updates_due(self, online_steps: int) -> int:
        """Critic updates that the recorded steps allow and that are not done; 0 before `start` or without a ratio."""
        return max(0, (self.updates_allowed(online_steps) or 0) - self.updates)

    def did_update(self, count: int) -> None:
        self.updates += count

    def steps_allowed(self, online_steps: int) -> int | None:
        """Steps that lockstep actors may record now; None: no limit."""
        if self._base_steps is None or self.utd_ratio is None:
            return None
        # Rounded up: a fraction of a step less could be what the next update waits for, while the actor waits for it.
        limit = self._base_steps + math.ceil(self.updates / self.utd_ratio + self.max_lag_steps)
        return max(0, limit - online_steps)


class TrainingSchedule:
    """The rate limiter, with the end that `learner.online_steps` and `max_steps` set."""

    def __init__(self, config: LearnerConfig, router: RecordRouter) -> None:
        self._config, self._router = config, router
        self.limiter = RateLimiter(config.utd_ratio, config.max_lag_steps)

    @property
    def steps_used(self) -> int:
        """Online steps that allow updates: at most `online_steps`, however far ahead realtime actors are."""
        wanted, steps = self._config.online_steps, self._router.env_steps
        return steps if wanted is None else min(wanted, steps)

    @property
    def steps_over(self) -> bool:
        return (wanted := self._config.online_steps) is not None and self._router.env_steps >= wanted

    @property
    def starts_after(self) -> int:
        """Fresh steps before training: `training_starts`, or all that are still to come where these are fewer."""
        c = self._config
        if c.online_steps is None:
            return c.training_starts
        return min(c.training_starts, max(0, c.online_steps - self._router.resumed_steps))

    def updates_wanted(self, done: int) -> int:
        """Online updates after which training ends, as far as it is known; `done` of them are."""
        c = self._config
        allowed = None if c.online_steps is None else self.limiter.updates_allowed(c.online_steps)
        if allowed is None:
            return c.max_steps
        return min(c.max_steps, max(done, allowed // c.cta_ratio * c.cta_ratio))

    def progress(self, updates: int) -> tuple[int, int]:
        """Return what of training is done, and its total: updates, or steps where no total of updates is known."""
        c = self._config
        if c.utd_ratio is None and c.online_steps is not None:
            return self.steps_used, c.online_steps
        return updates, self.updates_wanted(updates)

    @property
    def updates_due(self) -> int:
        return self.limiter.updates_due(self.steps_used)

    @property
    def may_update(self) -> bool:
        return self.limiter.may_update(self.steps_used, self._config.cta_ratio)

    def is_over(self, updates: int) -> bool:
        if updates >= self._config.max_steps:
            return True
        # Without a ratio no count of updates belongs to the last step.
        return self.steps_over and (self._config.utd_ratio is None or not self.may_update)

    def steps_allowed(self, phase: Phase) -> int | None:
        if phase is Phase.OFFLINE:  # `offline_steps` was raised: steps that come now are of an old policy
            return 0
        wanted, steps = self._config.online_steps, self._router.env_steps
        # The warm-up waits for steps whatever the limiter of a previous process allows.
        allowed = None if phase is Phase.WARMUP else self.limiter.steps_allowed(steps)
        limits = [allowed, None if wanted is None else max(0, wanted - steps)]
        return min((limit for limit in limits if limit is not None), default=None)

    def steps_missing(self, phase: Phase, episodes: int) -> int:
        c = self._config
        if phase is Phase.WARMUP and episodes >= c.warmup_episodes:
            return max(0, self.starts_after - self._router.fresh_steps)
        return self.limiter.steps_missing(self.steps_used, c.cta_ratio) if phase is Phase.TRAIN else 0

    def begin(self, online_updates: int) -> None:
        """Start counting after the warm-up. `online_updates`: updates done before the last resume."""
        steps = self._router.env_steps
        if self.limiter.started:  # by `resume`
            return
        if online_updates:  # a checkpoint without what was owed
            self.limiter.start(self.steps_used, online_updates)
        else:
            # Steps that the warm-up took from training's share allow updates, for there will be no others.
            self.limiter.start(min(self._config.training_starts, steps) if self.steps_over else steps)

    def did_update(self, calls: int = 1) -> None:
        self.limiter.did_update(calls * self._config.cta_ratio)

    def resume(self, online_updates: int, owed: float | None) -> None:
        """Go on as the previous process would have; `owed` None: it had not begun."""
        # Not the steps themselves: under another ratio they would allow far more updates, or none for long.
        if owed is not None:
            self.limiter.start(self._router.env_steps, online_updates, owed)

    def resumed_phase(self, saved: str, *, offline_updates: int, online_updates: int, missed: bool) -> Phase:
        """Return the phase in which a run goes on whose checkpoint was written in phase `saved`.

        `missed`: a stop cut short the evaluation that a phase ends with.
        """
        if saved in PRETRAINING:  # of step 0: nothing else has begun
            return Phase(saved)
        if not online_updates:
            more = offline_updates < self._config.offline_steps  # also of a phase that was over, now longer
            if more or (missed and saved == Phase.OFFLINE):
                return Phase.OFFLINE
        if self.is_over(online_updates):
            return Phase.TRAIN if missed and saved == Phase.TRAIN else Phase.DONE
        return Phase.WARMUP

    def resume_hint(self, online_updates: int) -> str:
        """Return what to change so that a finished run goes on."""
        if self._config.online_steps != 0:
            return f"raise learner.{'online_steps' if self.steps_over else 'max_steps'} to go on"
        if online_updates:
            return "after online updates the offline phase is over; do not set learner.online_steps=0 to go on online"
        return "raise learner.offline_steps to go on, or do not set learner.online_steps=0 to go on online"


Check = Callable[["Learner", Snapshot], None]  # of a policy against its demonstrations, before an actor gets it


class Evaluate(Protocol):
    """Evaluates a learner's policy on held-out starts and records the result."""

    def __call__(self, learner: Learner, snapshot: Snapshot) -> None: ...  # of its current step
    def close(self) -> None: ...


@dataclasses.dataclass
class Evaluations:
    """The learner's own, at every multiple of `interval` updates, once each; `last` is the step of the newest one."""

    evaluate: Evaluate | None
    interval: int
    check: Check | None = None
    last: int = 0

    def due(self, step: int, *, now: bool = False) -> bool:
        """Whether the policy of `step` is to be evaluated; `now`: also where no multiple was passed."""
        if not self.interval or step == self.last:
            return False
        return now or step // self.interval != self.last // self.interval

    def run(self, learner: Learner, snapshot: Snapshot) -> None:
        assert self.evaluate is not None
        self.evaluate(learner, snapshot)
        self.last = snapshot.version  # also where a stop cut it short: the next process makes up for it

    def close(self) -> None:
        if self.evaluate is not None:
            self.evaluate.close()


class _Share:
    """Steps of one session. It may have recorded `granted` in all, of which `delivered` are here."""

    def __init__(self, session: str, delivered: int) -> None:
        self.session = session
        self.delivered = self.granted = delivered
        self.polled_at, self.moved_at, self.granted_at = -math.inf, 0.0, 0.0
        self.noticed, self.notice_until = 0, 0.0  # what it was granted before it was taken back, and until when
        self.idle_until = 0.0


class StepShares:
    """The allowances of all sessions, whose steps that are not delivered stay together within `steps_left()`.

    A session gets an equal share, and more once it has used half of it; of what is scarce, the one that got some least
    recently. A session that is silent for `gone_s`, or closed, gives its unused share back. One that records nothing
    does so once another waits. For any thread.

    A session's record or poll looks at that session alone, unless it waits for steps of which there may not be enough
    for all: then at all of them.

    Args:
        steps_left: returns None without a limit.
        steps_of: returns the steps that a session has delivered, those of the record under way excepted. Called for
            one that comes, or comes back: those that are away hold nothing, and are not remembered here.
    """

    def __init__(
        self, steps_left: Callable[[], int | None], gone_s: float, clock: Callable[[], float] = time.monotonic,
        *, steps_of: Callable[[str], int],
    ) -> None:  # fmt: skip
        self._steps_left, self._gone_s, self._clock, self._steps_of = steps_left, gone_s, clock, steps_of
        self._shares: dict[str, _Share] = {}  # that polled or moved within `gone_s`, the latest to do so last
        self._live: dict[str, _Share] = {}  # of these, that polled within it, the latest last; the others hold nothing
        self._held = 0  # steps that are granted and not delivered, what was taken back excepted
        self._largest = 0  # no session holds more
        self._notice_until = 0.0  # none that was taken back may be used later
        self._idle_at = math.inf  # no session has held what it holds for IDLE_S before
        self._lock = threading.Lock()

    def delivered(self, session: str, steps: int) -> None:
        """Count steps that came from a session, and that `steps_left` counts already."""
        with self._lock:
            share = self._seen(session)
            if (held := share.granted - share.delivered) > 0:
                self._held -= min(held, steps)
            share.delivered += steps
            share.moved_at, share.idle_until = self._clock(), 0.0

    def _seen(self, session: str) -> _Share:
        share = self._shares.pop(session, None)
        if share is None:
            share = _Share(session, self._steps_of(session))
            share.moved_at = self._clock()
        self._shares[session] = share
        return share

    def closed(self, session: str) -> None:
        """Take back what a session has not used that left, or fell silent."""
        with self._lock:
            self._live.pop(session, None)
            if (share := self._shares.pop(session, None)) is not None:
                self._take_back(share)

    def _take_back(self, share: _Share) -> None:
        if (held := share.granted - share.delivered) > 0:
            self._held -= held
            share.granted = share.delivered

    def allowed(self, session: str) -> int | None:
        """Return the steps that a live session may have recorded in all; None: no limit. Poll it often."""
        with self._lock:
            now, left = self._clock(), self._steps_left()
            share = self._seen(session)
            share.polled_at = now
            self._live.pop(session, None)
            self._live[session] = share
            if next(iter(self._live.values())).polled_at < now - self._gone_s or len(self._shares) > len(self._live):
                self._forget(now - self._gone_s)
            if not left:  # None, or nothing
                self._take_back(share)
            if left is None:
                return None
            fair = max(1, left // len(self._live))
            held = max(0, share.granted - share.delivered)
            if held <= fair // 2:
                n = len(self._live)  # it is scarce where a fair share for each may be more than is left
                scarce = left <= 0 or (n > 1 and n * max(fair, self._largest) > left)
                if share.idle_until or now < self._notice_until or scarce:
                    if left > self._held or now >= self._idle_at:  # else there is nothing to give or to take
                        self._share_out(left, fair, now)
                else:
                    self._held += fair - held
                    self._grant(share, fair - held, now)
                    self._largest, self._idle_at = max(self._largest, fair), min(self._idle_at, now + IDLE_S)
            return max(share.granted, share.delivered) if left else share.delivered

    @staticmethod
    def _grant(share: _Share, steps: int, now: float) -> None:
        share.granted = max(share.granted, share.delivered) + steps
        share.granted_at = share.moved_at = now

    def _forget(self, before: float) -> None:
        """Take back what sessions hold that have not polled since `before`; forget those that did not move either."""
        while (share := next(iter(self._live.values()))).polled_at < before:
            del self._live[share.session]
            self._take_back(share)
            share.notice_until = 0.0
        # One that moved is not forgotten: `steps_of` may lack its newest record.
        while (share := next(iter(self._shares.values()))).polled_at < before and share.moved_at < before:
            del self._shares[share.session]

    def _share_out(self, left: int, fair: int, now: float) -> None:
        """Give all that wait their part of what is free; where that is nothing, take back what is idle."""
        free = left
        waiting: list[tuple[bool, float, int, int, _Share]] = []
        for share in self._live.values():
            most = max(share.granted, share.noticed) if now < share.notice_until else share.granted
            out = max(0, most - share.delivered)  # what it may have recorded or may still record, and is not here
            free -= out
            if out <= fair // 2:
                waiting.append((now < share.idle_until, share.granted_at, len(waiting), out, share))
        waiting.sort()
        starved = False
        for _, _, _, out, share in waiting:
            # One that was idle gets a step, and the rest once it has recorded that.
            give = min(free, (1 if share.idle_until else fair) - out)
            if give > 0:
                self._grant(share, give, now)
                free -= give
            else:
                starved |= out == 0
        self._held, self._largest, self._idle_at = 0, 0, math.inf
        for share in self._live.values():
            held = share.granted - share.delivered
            if held > 0 and starved and free <= 0 and now - share.moved_at > IDLE_S:
                share.noticed, share.notice_until = share.granted, now + NOTICE_S
                share.granted, share.idle_until = share.delivered, now + TURN_S
                self._notice_until = share.notice_until
            elif held > 0:
                self._held, self._largest = self._held + held, max(self._largest, held)
                self._idle_at = min(self._idle_at, share.moved_at + IDLE_S)
