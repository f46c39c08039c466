"""Grippers that stay as they are."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from serl_chunk.agents.arm_and_gripper import ArmAndGripper
from serl_chunk.agents.state import Metrics, Noise, Params, Prefix


class FixedGripper(ArmAndGripper):
    """Grippers are no part of what is learned.

    They get `fixed_value`; without one this agent gives 0, and the actor keeps what they have
    (`GripperConfig.kept`): the opening at reset is known in the robot's units alone.
    """

    def act(
        self, params: Params, observation: Mapping[str, jax.Array], noise: Noise, prefix: Prefix
    ) -> tuple[jax.Array, Metrics]:
        chunk, record = self.inner.act(params, observation, noise, self.arm_prefix(prefix))
        value = self.config.gripper.fixed_value or 0.0
        return self.merged(chunk, jnp.full((self.spec.horizon, len(self.grippers)), value), prefix), record
