"""The state of an agent, what its functions take and return, and its parameters as flat maps of named arrays."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from serl_chunk.agents.compilation import Place
from serl_chunk.models.sums import Metrics as Metrics
from serl_chunk.types import Array, ConfigError

Params = Any  # a nested dict of arrays
Observation = Mapping[str, jax.Array]  # state, prompt, and frames or features of cameras by name
Noise = Any  # random numbers: an array, or a dict of arrays by what they are for
Alone = Array | bool  # bool[]: the policy's first candidate acts, whatever the critic's values are
Acted = tuple[jax.Array, Metrics]  # a chunk float32[H, A] in model space, and the decision's record


class Committed(NamedTuple):
    """What is settled before a decision."""

    actions: Array  # float32[..., H, A], in model space
    mask: Array  # float32[..., H]: 1 where the action is given
    alone: Alone = False


class AgentState(flax.struct.PyTreeNode):
    """Everything an update changes. Trees an agent does not use are empty dicts.

    What no update changes is the *base*, a tree beside the state: an argument of updates and decisions, never donated.
    """

    rng: jax.Array
    critic_updates: jax.Array  # int32 scalar
    policy_updates: jax.Array  # int32 scalar
    policy: Params
    policy_average: Params  # exponential average of `policy`, which acts; empty with `policy_ema` 0
    policy_opt: Any
    critic: Params
    critic_opt: Any
    target: Params
    temperature: Params = flax.struct.field(default_factory=dict)
    temperature_opt: Any = flax.struct.field(default_factory=dict)
    grasp: Params = flax.struct.field(default_factory=dict)  # of a grasp critic, see agents/discrete_gripper.py
    reference: Params = flax.struct.field(default_factory=dict)  # a second `policy`, of rules that compare with one


class Context(NamedTuple):
    """One observation, or a batch of them, as one encoder's parameters show it."""

    features: jax.Array  # float32[..., F]: what critics and small heads read
    cache: Any = ()  # what a large policy alone reads


Updated = tuple[AgentState, Metrics]


def key_of(key: jax.Array, name: str) -> jax.Array:
    """A key for what `name` says, of a key that is used for nothing else."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


def flatten_params(params: Params) -> dict[str, np.ndarray]:
    """`path -> array` on the host; a path's names are joined by "/"."""
    return {k: np.asarray(v) for k, v in flatten_dict(params, sep="/").items()}


def unflatten_params(flat: Mapping[str, np.ndarray], expected: Params, place: Place = jnp.array) -> Params:
    """The inverse of `flatten_params`, copied to the device by `place`; `expected` has the shapes and dtypes.

    Raises ConfigError with the first path that is missing, unknown, or of another shape or dtype.
    """
    leaves = flatten_dict(expected, sep="/")
    for path, leaf in leaves.items():
        if path not in flat:
            raise ConfigError(f"the snapshot lacks {path!r}; it comes from another agent or network shape")
        if flat[path].shape != leaf.shape:
            raise ConfigError(
                f"snapshot parameter {path!r} has shape {flat[path].shape}, this agent's is {leaf.shape}: use the same "
                "--exp_name and settings on both sides"
            )
        if flat[path].dtype != leaf.dtype:  # converting it would hide that the other side computes otherwise
            raise ConfigError(
                f"snapshot parameter {path!r} is {flat[path].dtype}, this agent's is {leaf.dtype}: install the same "
                "version of serl-chunk on both sides"
            )
    unknown = sorted(set(flat) - set(leaves))
    if unknown:
        raise ConfigError(
            f"the snapshot carries {unknown[0]!r}, which this agent does not have: use the same --exp_name and "
            "settings on both sides, and in a run that begins with another's policy those of what is trained"
        )
    return unflatten_dict({k: place(v) for k, v in flat.items()}, sep="/")
