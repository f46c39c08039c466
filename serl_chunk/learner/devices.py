"""The devices that train: which arrays are cut over them, where each lies, and programs that are compiled for them.

The rows of a batch are divided among all devices. Large arrays of states and bases are cut over `learner.fsdp_devices`
of them (fully sharded data parallelism, Rajbhandari et al. 2020, arXiv:1910.02054), the others are whole on each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from serl_chunk.agents.base import Agent
from serl_chunk.agents.compilation import compiled
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require

logger = logging.getLogger(__name__)

AXES = ("data", "fsdp")


class Shards(NamedTuple):
    """The rule by which arrays are cut: those of two axes and `least` bytes or more, into `parts`."""

    parts: int = 1
    least: float = 4 << 20

    @classmethod
    def of(cls, config: ExperimentConfig, devices: int) -> Shards:
        """That of an experiment on so many devices. Raises ConfigError where these or their parts do not fit."""
        parts, least = config.learner.fsdp_devices, config.learner.fsdp_least * 2**20
        valid = [n for n in range(1, devices + 1) if devices % n == 0]
        require(parts in valid, "learner.fsdp_devices",
            f"must divide the number of devices that train ({devices}), got {parts}. Set "
            f"{' or '.join(map(str, valid))}")  # fmt: skip
        return cls(parts, least)

    def axis(self, shape: Sequence[int], dtype: Any) -> int | None:
        """Return the axis over which an array is cut; None: each device has all of it.

        It is the largest one that `parts` divides, of several the last (openpi's rule).
        """
        if self.parts == 1 or len(shape) < 2 or math.prod(shape) * np.dtype(dtype).itemsize < self.least:
            return None
        divided = [(size, axis) for axis, size in enumerate(shape) if size % self.parts == 0]
        return max(divided)[1] if divided else None


def rows_of_device(config: ExperimentConfig, devices: int) -> int:
    """Return the rows of `learner.batch_size` that each device has.

    Raises ConfigError where devices and `learner.accumulate` do not divide a batch of the experiment.
    """
    c = config.learner
    sizes = {"learner.batch_size": c.batch_size, "learner.policy_batch_size": c.policy_batch_size}
    sizes |= {"group.minibatch": config.group.minibatch} if config.agent.iterates else {}
    parts = devices * c.accumulate
    for name, rows in sizes.items():
        step = parts if name.startswith("group") else math.lcm(parts, 2)  # of the replay half a batch each
        near = sorted({max((rows or step) // step, 1) * step, -(-(rows or step) // step) * step})
        require(rows is None or rows % parts == 0, name,
            f"{rows} rows do not divide by {devices} devices times learner.accumulate={c.accumulate}. Set "
            f"{' or '.join(map(str, near))}, or let the learner see fewer devices (CUDA_VISIBLE_DEVICES)")  # fmt: skip
    return c.batch_size // devices


class Devices:
    """The devices of a learner. On one, arrays and programs are what they are without this class.

    Args:
        config: of the run. ConfigError where its batches or settings do not fit the devices.
        devices: all that JAX sees, as a rule.
    """

    def __init__(self, config: ExperimentConfig, devices: Sequence[Any] | None = None) -> None:
        found = np.array(jax.devices() if devices is None else devices)
        self.count = found.size
        self.shards = Shards.of(config, self.count)
        self._rows = rows_of_device(config, self.count)
        types = (AxisType.Auto, AxisType.Auto)
        self.mesh = Mesh(found.reshape(-1, self.shards.parts), AXES, axis_types=types)
        self._whole = NamedSharding(self.mesh, PartitionSpec())

    @property
    def several(self) -> bool:
        return self.count > 1

    def log(self, held: Any) -> None:
        """Log the mesh, the rows of a device, and the share of numbers of the tree `held` that is cut."""
        cut = {True: 0, False: 0}
        for leaf in jax.tree.leaves(held):
            cut[not leaf.sharding.is_fully_replicated] += leaf.size
        share = cut[True] / max(1, sum(cut.values()))
        shape = " x ".join(f"{size} {name}" for name, size in self.mesh.shape.items())
        logger.info(
            f"{self.count} devices train ({shape}): {self._rows} rows of a batch each, {share:.2%} of state and base "
            "sharded"
        )

    # -- where arrays lie ------------------------------------------------------------------------------------

    def shardings(self, tree: Any) -> Any:
        """Return the sharding of each array of a state or a base."""
        return jax.tree.map(self._sharding, tree)

    def _sharding(self, leaf: Any) -> NamedSharding:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return self._whole
        axis = self.shards.axis(leaf.shape, leaf.dtype)
        return self._whole if axis is None else NamedSharding(self.mesh, PartitionSpec(*[None] * axis, AXES[1]))

    def leaf(self, array: Any) -> jax.Array:
        """Place one array of a state or a base."""
        return jax.device_put(array, self._sharding(array))

    def place(self, tree: Any) -> Any:
        """Place a state or a base, array by array; those of the host stay there, and what lies right is not copied."""
        if not self.several:
            return tree
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, np.ndarray) else self.leaf(leaf), tree)

    def put(self, batches: Any, axis: int = 1) -> Any:
        """Place batches whose rows are on `axis`, divided among the devices where they can be."""
        if not self.several:
            return jax.device_put(batches)
        divided = NamedSharding(self.mesh, PartitionSpec(*[None] * axis, AXES))

        def placed(x: Any) -> jax.Array:
            return jax.device_put(x, self._whole if x.shape[axis] % self.count else divided)

        return jax.tree.map(placed, batches)

    # -- programs --------------------------------------------------------------------------------------------

    def adopt(self, agent: Agent) -> None:
        """Compile an agent's functions for these devices."""
        if self.several:
            agent.compile(self.compiled, shares=self.count, place=self.leaf)

    def new_state(self, agent: Agent, key: jax.Array) -> Any:
        """Return the agent's fresh state, made where it is to lie."""
        if not self.several:
            return agent.new_state(key)
        return jax.jit(agent.init, out_shardings=self.shardings(jax.eval_shape(agent.init, key)))(key)

    def compiled(
        self, function: Callable[..., Any], *, batch: int, axis: int = 0, updates: bool = False
    ) -> Callable[..., Any]:
        """Return `function` compiled for these devices; see `agents.compilation.Compile`."""
        programs: dict[Any, Callable[..., Any]] = {}

        def call(*args: Any) -> Any:
            placed = [self.put(arg, axis) if i == batch else arg for i, arg in enumerate(args)]
            of_batch = jax.tree.map(lambda x: x.sharding, placed[batch])
            key = jax.tree.structure(placed), tuple(jax.tree.leaves(of_batch))
            if key not in programs:
                inputs = [of_batch if i == batch else self.shardings(arg) for i, arg in enumerate(placed)]
                shardings: dict[str, Any] = {"in_shardings": tuple(inputs)}
                if updates:
                    shardings["out_shardings"] = inputs[0], self._whole
                programs[key] = compiled(function, batch=batch, updates=updates, **shardings)
            return programs[key](*placed)

        return call
