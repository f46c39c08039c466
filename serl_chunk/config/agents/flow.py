"""Settings of a flow policy."""

from __future__ import annotations

import dataclasses
from typing import Any

from serl_chunk.config.fields import Group, acting, widths


@dataclasses.dataclass(frozen=True)
class FlowConfig(Group, path="agent.flow."):
    """A flow-matching policy: velocity net(o, x_t, t) + k(t) x_t, integrated from noise (FQL, Park 2025)."""

    hidden: tuple[int, ...] = widths((256, 256), "widths of the hidden layers")
    steps: int = acting(5, "steps of integration", least=1)
    # docs/algorithms.md, "The flow": below the deviation of chunks the candidates are too alike.
    spread: float = acting(
        0.2, "deviation s of chunks, in model space, that the field's linear part k(t) x is made for", above=0, most=2
    )

    @property
    def as_published(self) -> dict[str, Any]:
        """As `AgentConfig.as_published`."""
        return {"actor_hidden_dims": self.hidden, "flow_steps": self.steps, "actor_type": "best-of-n"}
