"""Lengths of chunks, in ticks."""

from __future__ import annotations

import dataclasses

from serl_chunk.config.validation import require


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Lengths in ticks. Default: all equal `horizon`. What an agent makes of them is checked by the experiment."""

    horizon: int = 5  # actions the policy outputs
    critic_horizon: int | None = None  # actions the critic scores; agent.prefix_critic: more than execute_steps
    execute_steps: int | None = None  # a chunk is followed by the next one at this index (delay included)
    return_steps: int | None = None  # rewards in the critic's target before it bootstraps; n-step returns where larger

    def __post_init__(self) -> None:
        require(self.horizon >= 1, f"chunk.horizon must be at least 1, got {self.horizon}")
        require(self.critic_steps >= 1, f"chunk.critic_horizon must be at least 1, got {self.critic_horizon}")
        require(
            1 <= self.executed <= self.horizon,
            f"chunk.execute_steps must be 1..{self.horizon} (horizon), got {self.execute_steps}",
        )
        require(
            self.returned >= self.critic_steps,
            f"chunk.return_steps={self.return_steps} is below chunk.critic_horizon={self.critic_steps}: the target "
            "would bootstrap in the middle of the actions the critic scores. Set it to at least critic_horizon, or "
            "leave it out.",
        )

    def check_scored(self, *, prefix_critic: bool) -> None:
        """Whether the actions a critic scores are those that are executed; raises ConfigError where not.

        A critic of more actions than are executed needs a second one, of those (`prefix_critic`), and that one a
        longer critic to learn from.
        """
        if prefix_critic:
            require(
                self.critic_steps > self.executed,
                f"agent.prefix_critic=True learns the value of the {self.executed} executed actions "
                f"(chunk.execute_steps) from a critic of more, and chunk.critic_horizon is {self.critic_steps}: raise "
                "chunk.critic_horizon, lower chunk.execute_steps, or set agent.prefix_critic=False",
            )
            return
        require(
            self.critic_steps <= self.horizon,
            f"chunk.critic_horizon must be 1..{self.horizon} (horizon), got {self.critic_horizon}: the policy outputs "
            "no more actions than that, and could not be scored. Lower it, or set agent.prefix_critic=True (acfql, "
            "acrlpd), which scores the executed ones",
        )
        require(
            self.executed >= self.critic_steps,
            f"chunk.execute_steps={self.executed} is below chunk.critic_horizon={self.critic_steps}: the critic would "
            "score actions that are never executed, so nothing ever corrects the tail's value. Lower critic_horizon to "
            "execute_steps, execute the whole chunk, or set agent.prefix_critic=True (acfql, acrlpd)",
        )

    @property
    def carried(self) -> int:
        """Actions of a training window: as many as the policy outputs, or the critic scores where that is more."""
        return max(self.horizon, self.critic_steps)

    @property
    def critic_steps(self) -> int:
        """`critic_horizon`, or `horizon` where it is not given."""
        return self.horizon if self.critic_horizon is None else self.critic_horizon

    @property
    def executed(self) -> int:
        """`execute_steps`, or `horizon` where it is not given."""
        return self.horizon if self.execute_steps is None else self.execute_steps

    @property
    def returned(self) -> int:
        """`return_steps`, or `critic_steps` where it is not given."""
        return self.critic_steps if self.return_steps is None else self.return_steps
