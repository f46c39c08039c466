"""How updates and online steps keep step with each other, up to the end of the run."""

from __future__ import annotations

from serl_chunk.config.learner import LearnerConfig
from serl_chunk.learner.inbox import Inbox
from serl_chunk.learner.phase import Phase
from serl_chunk.learner.rate_limiter import RateLimiter


class Pace:
    """The rate limiter, with the end that `learner.online_steps` and `max_steps` set."""

    def __init__(self, config: LearnerConfig, inbox: Inbox) -> None:
        self._config, self._inbox = config, inbox
        self.limiter = RateLimiter(config.utd_ratio, config.max_lag_steps)
        self._begun = False  # whether steps entitle to updates already; in an earlier life, as they did there

    @property
    def steps_used(self) -> int:
        """Online steps that entitle to updates: at most `online_steps`, however far ahead realtime actors are."""
        wanted, steps = self._config.online_steps, self._inbox.env_steps
        return steps if wanted is None else min(wanted, steps)

    @property
    def steps_over(self) -> bool:
        """Whether all online steps came."""
        wanted = self._config.online_steps
        return wanted is not None and self._inbox.env_steps >= wanted

    @property
    def starts_after(self) -> int:
        """Fresh steps before training: `training_starts`, or all that are still to come where these are fewer."""
        c = self._config
        if c.online_steps is None:
            return c.training_starts
        return min(c.training_starts, max(0, c.online_steps - self._inbox.resumed_steps))

    def updates_wanted(self, done: int) -> int:
        """Online updates after which training ends, as far as it is known; `done` of them are."""
        c = self._config
        entitled = None if c.online_steps is None else self.limiter.entitled(c.online_steps)
        if entitled is None:
            return c.max_steps
        return min(c.max_steps, max(done, entitled // c.cta_ratio * c.cta_ratio))

    @property
    def updates_due(self) -> int:
        """Critic updates that the recorded steps entitle to and that are not done."""
        return self.limiter.updates_due(self.steps_used)

    @property
    def may_update(self) -> bool:
        """Whether the recorded steps entitle to one more call."""
        return self.limiter.may_update(self.steps_used, self._config.cta_ratio)

    def is_over(self, updates: int) -> bool:
        """Whether no online update is to follow these."""
        return updates >= self._config.max_steps or (self.steps_over and not self.may_update)

    def steps_allowed(self, phase: Phase) -> int | None:
        """How many more steps lockstep actors may record now; None: no limit."""
        if phase is Phase.OFFLINE:  # more of it was asked for: what comes meanwhile would be of an old policy
            return 0
        # The warm-up waits for steps whatever the limiter of an earlier life says.
        allowed = None if phase is Phase.WARMUP else self.limiter.steps_allowed(self._inbox.env_steps)
        wanted = self._config.online_steps
        if wanted is None:
            return allowed
        left = max(0, wanted - self._inbox.env_steps)
        return left if allowed is None else min(left, allowed)

    def steps_missing(self, phase: Phase, episodes: int) -> int:
        """How many more online steps the next update waits for; 0 where it waits for none, or for episodes."""
        c = self._config
        if phase is Phase.WARMUP and episodes >= c.warmup_episodes:
            return max(0, self.starts_after - self._inbox.fresh_steps)
        return self.limiter.steps_missing(self.steps_used, c.cta_ratio) if phase is Phase.TRAIN else 0

    def begin(self, online_updates: int) -> None:
        """The warm-up is over. `online_updates`: of earlier lives."""
        c, steps = self._config, self._inbox.env_steps
        if self._begun:
            return
        self._begun = True
        if online_updates:  # a checkpoint that does not say what was owed
            self.limiter.restore(self.steps_used, online_updates)
        else:
            # Steps that the warm-up took from training's share entitle to updates, for there will be no others.
            self.limiter.start(min(c.training_starts, steps) if self.steps_over else steps)

    def did_update(self) -> None:
        """Account for one call."""
        self.limiter.did_update(self._config.cta_ratio)

    def owed(self, env_steps: int) -> float | None:
        """What a checkpoint notes for `resume`."""
        return self.limiter.owed(env_steps)

    def resume(self, online_updates: int, owed: float | None) -> None:
        """Go on as an earlier life would have; `owed` None: it had not begun, or did not say."""
        # Not the steps themselves: under another ratio they would entitle to far more updates, or to none for long.
        if owed is not None:
            self.limiter.restore(self._inbox.env_steps, online_updates, owed)
            self._begun = True
