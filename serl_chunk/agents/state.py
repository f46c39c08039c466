"""The state of an agent: everything its updates change, and the names of what goes into them and comes out."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax

from serl_chunk.types import Array

Params = Any  # a nested dict of arrays
Metrics = dict[str, jax.Array]
Draws = dict[str, jax.Array]  # the random numbers of one loss, by what they are for
Noise = Any  # an array, or a dict of them: what `acting_noise` gives and `act` takes
Prefix = tuple[Array, Array]  # committed actions float32[H, A] in model space, mask float32[H]


class AgentState(flax.struct.PyTreeNode):
    """Everything an update changes. Trees an agent does not use are empty dicts."""

    rng: jax.Array
    critic_updates: jax.Array  # int32 scalar
    policy_updates: jax.Array  # int32 scalar
    policy: Params
    policy_average: Params  # exponential average of `policy`: what acts
    policy_opt: Any
    critic: Params
    critic_opt: Any
    target: Params
    temperature: Params
    temperature_opt: Any
    frozen: Params = flax.struct.field(default_factory=dict)  # the frozen backbone, in no optimiser
    grasp: Params = flax.struct.field(default_factory=dict)  # of a grasp critic, see agents/learned_gripper.py
