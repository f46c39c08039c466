"""The devices that train: which arrays are cut over them, where each lies, and programs that are compiled for them.

The rows of a batch are divided among all devices. Large arrays of states and bases are cut over `learner.fsdp_devices`
of them (fully sharded data parallelism, Rajbhandari et al. 2020, arXiv:1910.02054), the others are whole on each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from serl_chunk.agents.base import Agent
from serl_chunk.agents.compilation import compiled
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.runs.checkpoints import device_checksums, numbers_of

if TYPE_CHECKING:
    from serl_chunk.learner.processes import Together

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
        together: the processes that they are of, where there are several.
    """

    def __init__(
        self, config: ExperimentConfig, devices: Sequence[Any] | None = None, together: Together | None = None
    ) -> None:
        found = np.array(jax.devices() if devices is None else devices)
        self.count = found.size
        self.shards = Shards.of(config, self.count)
        self._rows = rows_of_device(config, self.count)
        types = (AxisType.Auto, AxisType.Auto)
        self.mesh = Mesh(found.reshape(-1, self.shards.parts), AXES, axis_types=types)
        self._whole = NamedSharding(self.mesh, PartitionSpec())
        self._adopted: Agent | None = None
        self.together = together
        if together is not None:
            together.devices = self
            self.copied = self.compiled(lambda flat: {name: jnp.copy(numbers_of(x)) for name, x in flat.items()})
            self._sums = together.program(jax.jit(device_checksums, out_shardings=self._whole), "checksums")
            self._gather = together.program(jax.jit(lambda x: x, out_shardings=self._whole), "gather")

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
        if self.together is not None:
            return self.together.leaf(array)
        return jax.device_put(array, self._sharding(array))

    def placed(self, value: np.ndarray, *, key: bool = False) -> jax.Array:
        """Make one array of a state or a base of what each process has of it; `key`: a random key of that data."""
        if key:
            return jax.random.wrap_key_data(self._spread(value, self._whole))
        return self._spread(value, self._sharding(value))

    @staticmethod
    def _spread(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
        return jax.make_array_from_callback(value.shape, sharding, lambda part: value[part])

    def place(self, tree: Any) -> Any:
        """Place a state or a base, array by array; those of the host stay there, and what lies right is not copied."""
        if not self.several:
            return tree
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, np.ndarray) else self.leaf(leaf), tree)

    def put(self, batches: Any, axis: int = 1) -> Any:
        """Place batches whose rows are on `axis`, divided among the devices where they can be.

        Of several processes they stay on the host: an instruction takes them along.
        """
        if not self.several:
            return jax.device_put(batches)
        return batches if self.together is not None else self._divided(batches, axis)

    def _divided(self, batches: Any, axis: int) -> Any:
        divided = NamedSharding(self.mesh, PartitionSpec(*[None] * axis, AXES))

        def placed(x: Any) -> jax.Array:
            sharding = self._whole if x.shape[axis] % self.count else divided
            if self.together is None:
                return jax.device_put(x, sharding)
            return x if isinstance(x, jax.Array) else self._spread(x, sharding)

        return jax.tree.map(placed, batches)

    def gathered(self, tree: Any) -> Any:
        """Return arrays that this process can read: copies on the host, one at a time, where several have them."""
        if self.together is None:
            return tree

        def host(leaf: Any) -> np.ndarray:
            readable = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
            return np.array(leaf if readable else self._gather(leaf))

        return jax.tree.map(host, tree)

    def checksums(self, flat: dict[str, Any]) -> dict[str, int]:
        """Return the checksum of each array, as files of checkpoints have it."""
        return {name: int(total) for name, total in jax.device_get(self._sums(flat)).items()}

    # -- programs --------------------------------------------------------------------------------------------

    def adopt(self, agent: Agent) -> None:
        """Compile an agent's functions for these devices, once."""
        if not self.several or self._adopted is agent:
            return
        agent.compile(self.compiled, shares=self.count, place=self.leaf)
        agent.gathered = self.gathered
        self._adopted, self._new_state = agent, self.compiled(agent.init)

    def new_state(self, agent: Agent, key: jax.Array) -> Any:
        """Return the agent's fresh state, made where it is to lie."""
        return self._new_state(key) if self._adopted is agent else agent.new_state(key)

    def compiled(
        self, function: Callable[..., Any], *, batch: int | None = None, axis: int = 0, updates: bool = False
    ) -> Callable[..., Any]:
        """Return `function` compiled for these devices; see `agents.compilation.Compile`."""
        programs: dict[Any, Callable[..., Any]] = {}

        def call(*args: Any) -> Any:
            placed = [self._divided(arg, axis) if i == batch else self._placed(arg) for i, arg in enumerate(args)]
            of_batch = None if batch is None else jax.tree.map(lambda x: x.sharding, placed[batch])
            key = jax.tree.structure(placed), tuple(jax.tree.leaves(of_batch))
            if key not in programs:
                inputs = [of_batch if i == batch else self.shardings(arg) for i, arg in enumerate(placed)]
                shardings: dict[str, Any] = {"in_shardings": tuple(inputs)}
                if updates:
                    shardings["out_shardings"] = inputs[0], self._whole
                elif batch is None:  # of states alone
                    shardings["out_shardings"] = self.shardings(jax.eval_shape(function, *placed))
                elif self.together is not None:
                    shardings["out_shardings"] = self._whole  # process 0 reads it
                programs[key] = compiled(function, batch=batch, updates=updates, **shardings)
            return programs[key](*placed)

        return call if self.together is None else self.together.program(call, function.__qualname__)

    def _placed(self, tree: Any) -> Any:
        if self.together is None:
            return tree
        return jax.tree.map(lambda leaf: self.placed(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)
