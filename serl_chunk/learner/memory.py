"""The memory that a learner needs, from its experiment alone: no array is made.

Sizes of states are exact (`jax.eval_shape`). That of activations is estimated from the traced program of a gradient,
and that of the replay is `replay.memory`'s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import make_agent
from serl_chunk.agents.spec import BatchSpec
from serl_chunk.agents.state import AgentState, Params
from serl_chunk.config.agents.pi0 import Trainable
from serl_chunk.config.agents.policy import PolicyConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.io import format_bytes
from serl_chunk.learner.devices import Shards, rows_of_device
from serl_chunk.learner.trainers.pretraining import updates_at_once
from serl_chunk.replay.memory import available_bytes, estimate_bytes
from serl_chunk.types import IMAGE_PREFIX, PROMPT, PROMPT_MASK, STATE, ChunkBatch, ConfigError, RobotSpec

_DRAWN = 2 * 4  # bytes of a number that a random base is drawn by: before and after it is scaled, in float32
_UNSURE = 0.25  # of the activations, by which the estimate may be too high
# Operations whose output is no array of its own.
_VIEWS = {"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "stop_gradient", "optimization_barrier"}


class DeviceMemory(NamedTuple):
    """Bytes on each device. All but the activations are exact."""

    parameters: int  # of the policy, and of one that it is compared with
    optimiser: int
    average: int
    critic: int  # its networks and targets with their optimiser; the state's counters
    base: int
    gradients: int
    activations: int  # an estimate: what a gradient step holds in addition to the gradients
    batches: int  # of a compiled call, and those that are prepared
    start: int  # all of it while a random base is drawn, before the first update; 0 where a base is read
    copy: int  # of the policy, on its way to the actors

    @property
    def state(self) -> int:
        """Bytes of the agent's state, exact on one device."""
        return self.parameters + self.optimiser + self.average + self.critic

    @property
    def peak(self) -> int:
        """Bytes at the peak of the initialisation or an update, whichever is more."""
        held = self.state + self.base
        return max(held + self.gradients + self.activations + self.batches, self.start)

    @property
    def total(self) -> int:
        return self.peak + self.copy

    @property
    def least(self) -> int:
        """Bytes without which no learner runs: the total, with as few activations as the estimate may stand for."""
        surely = self.activations - math.ceil(_UNSURE * self.activations)
        return self._replace(activations=surely).total


class LearnerMemory(NamedTuple):
    """Bytes that a learner needs."""

    device: DeviceMemory
    replay: int  # of the host, when it is full
    snapshot: int  # one, on its way to an actor
    checkpoint: int  # one, on disk


def learner_memory(config: ExperimentConfig, spec: RobotSpec, devices: int = 1) -> LearnerMemory:
    """Return the memory of an experiment's learner on `devices` devices.

    Each computes its part of a batch's rows, and `learner.fsdp_devices` of them share large arrays. A gradient step of
    an agent that trains in iterations on groups is counted as imitation of as many rows. Raises ConfigError for rows
    and parts that devices cannot share, and as `make_agent`.
    """
    require(devices >= 1, "devices", f"must be at least 1, got {devices}")
    shards = Shards.of(config, devices)
    rows_of_device(config, devices)
    if config.agent.iterates:
        rows = max(config.learner.batch_size, config.group.minibatch)
        config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, batch_size=rows))
    agent, c = make_agent(config, spec), config.learner

    def made() -> tuple[AgentState, Params]:
        key = jax.random.key(0)
        return agent.init(key), agent.with_base.random(key)

    state, base = jax.eval_shape(made)
    if getattr(agent, "refers", False) and config.group.reference_on == "device":
        state = state.replace(reference=state.policy)
    published = jax.eval_shape(agent.published, state, base)
    gradients, activations = _gradients(config, agent, state, base, devices, shards)
    parts = {
        "parameters": _bytes((state.policy, state.reference), shards),
        "optimiser": _bytes(state.policy_opt, shards),
        "average": _bytes(state.policy_average, shards),
    }
    whole = _bytes(state, shards)
    device = DeviceMemory(
        **parts,
        critic=whole - sum(parts.values()),
        base=_bytes(base, shards),
        gradients=gradients,
        activations=activations,
        batches=(1 + config.replay.prefetch) * sum(
            (_updates(config, agent) if each.each else 1)
            * _bytes(batch_shapes(config, agent, (each.size or c.batch_size) // devices, each))
            for each in agent.wants().values()
        ),
        start=0 if agent.source else whole + _drawing(base, shards),
        copy=_bytes(published, shards),
    )  # fmt: skip
    cameras, features = agent.spec.cameras, agent.cached_features()
    narrow = config.transport.snapshot_dtype == "bfloat16"
    halved = sum(leaf.size * 2 for leaf in jax.tree.leaves(published) if narrow and leaf.dtype == jnp.float32)
    return LearnerMemory(
        device,
        replay=estimate_bytes(spec, config.replay, cameras, features, language=config.agent.language.reads),
        snapshot=_bytes(published) - halved,
        checkpoint=_bytes((state, {} if agent.source else base)),
    )


def ways(config: ExperimentConfig) -> Iterator[tuple[str, ExperimentConfig]]:
    """Iterate over (`agent.pi0.trainable`, experiment): itself, then with each other value that it can have.

    Of an experiment without a pi0: over (its agent, itself).
    """
    agent = config.agent
    if not isinstance(agent, PolicyConfig) or agent.as_pi0 is None:
        yield agent.kind, config
        return
    yield agent.pi0.trainable, config
    for trainable in get_args(Trainable):
        if trainable != agent.pi0.trainable:
            try:
                changed = dataclasses.replace(agent, pi0=dataclasses.replace(agent.pi0, trainable=trainable))
                other = dataclasses.replace(config, agent=changed)
            except ConfigError:  # it has no LoRA, or nothing would be trained
                continue
            yield trainable, other


def memory_limit(replay: int) -> int | None:
    """Return the bytes that this process may take of each device; None where that is not known.

    A device that reports none is the host, which keeps a full `replay` of so many bytes too.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    available = available_bytes()
    return None if available is None else available - replay


def check_fits(
    config: ExperimentConfig, spec: RobotSpec, memory: LearnerMemory, limit: int | None, devices: int = 1
) -> None:
    """Raise ConfigError where a learner of `memory` cannot fit into `limit` bytes of each of `devices`.

    It names the nearest `learner.accumulate` and `learner.fsdp_devices` and the first `agent.pi0.trainable` that fit.
    """
    if limit is None or memory.device.least <= limit:
        return
    remedies = [*_fitting_parts(config, spec, memory.device, limit, devices)]
    for parts in range(config.learner.fsdp_devices + 1, devices + 1):
        cut = dataclasses.replace(config, learner=dataclasses.replace(config.learner, fsdp_devices=parts))
        if devices % parts == 0 and (total := learner_memory(cut, spec, devices).device.total) <= limit:
            remedies.append(f"learner.fsdp_devices={parts} ({format_bytes(total)})")
            break
    for trainable, other in ways(config):
        if other is not config and (total := learner_memory(other, spec, devices).device.total) <= limit:
            remedies.append(f"agent.pi0.trainable={trainable} ({format_bytes(total)})")
            break
    advice = f"Set {' or '.join(remedies)}" if remedies else "Give a device with more, or lower learner.batch_size"
    raise ConfigError(
        f"a learner of {config.name} takes {format_bytes(memory.device.total)} of each device, and "
        f"{format_bytes(limit)} are there. {advice} (serl-chunk memory lists its parts)"
    )


def _fitting_parts(
    config: ExperimentConfig, spec: RobotSpec, device: DeviceMemory, limit: int, devices: int
) -> Iterator[str]:
    """Yield the least `learner.accumulate` that fits, if there is one: more parts have smaller activations."""
    learner = config.learner
    if device._replace(activations=0).total > limit:
        return
    rows = math.gcd(learner.batch_size, learner.policy_batch_size or 0) // devices
    if config.agent.iterates:
        rows = math.gcd(rows, config.group.minibatch)
    parts = [n for n in range(learner.accumulate + 1, rows + 1) if rows % n == 0]
    best = ""
    while parts:
        middle = len(parts) // 2
        n = parts[middle]
        changed = dataclasses.replace(config, learner=dataclasses.replace(learner, accumulate=n))
        total = learner_memory(changed, spec, devices).device.total
        if total <= limit:
            best, parts = f"learner.accumulate={n} ({format_bytes(total)})", parts[:middle]
        else:
            parts = parts[middle + 1 :]
    if best:
        yield best


def _gradients(
    config: ExperimentConfig, agent: Agent, state: AgentState, base: Params, devices: int, shards: Shards
) -> tuple[int, int]:
    """Return the bytes of a step's gradients, and of what else it holds, both the most of any of the agent's steps."""
    batches = agent.wants()
    if agent.trains_policy and "policy" not in batches:  # a batch that the trainer relabels, or the critic's
        batches["policy"] = agent.batch_spec("policy") if agent.config.relabels else batches["critic"]
    steps = [tuple(batches)] if agent.together else [(name,) for name in batches]
    sizes, held = [], []
    for step in steps:
        trained, batch = [getattr(state, name) for name in step], batches[step[0]]
        sizes.append(_bytes(trained, shards))
        shapes = batch_shapes(config, agent, (batch.size or config.learner.batch_size) // devices, batch)
        held.append(_held(agent, state, base, step, shapes) - _bytes(trained))
    return max(sizes), max(held)


def _updates(config: ExperimentConfig, agent: Agent) -> int:
    """Return the updates of one compiled call, at most."""
    c = config.learner
    before = updates_at_once(c.batch_size, agent.spec.cameras) if c.pretrain_steps or c.critic_pretrain_steps else 1
    return max(c.cta_ratio, before)


def batch_shapes(config: ExperimentConfig, agent: Agent, rows: int, wanted: BatchSpec) -> ChunkBatch:
    """Return the shapes of a batch of `rows` windows as `Replay.sample` returns it to those who want such a one."""
    spec, of, chunk, frames = agent.spec, jax.ShapeDtypeStruct, config.chunk, wanted.frames
    features = {} if frames else agent.cached_features()
    replaced = {name for feature in features.values() for name in feature.reads}
    images = {} if frames is False else {IMAGE_PREFIX + c.name: (c.height, c.width, 3) for c in spec.cameras}
    seen = {STATE: of((rows, spec.state_dim), jnp.float32)}
    seen |= {name: of((rows, *shape), jnp.uint8) for name, shape in images.items() if name not in replaced}
    seen |= {name: of((rows, *feature.shape), jnp.float16) for name, feature in features.items()}
    if config.agent.language.reads and PROMPT not in replaced:
        length = config.agent.language.length
        seen |= {PROMPT: of((rows, length), jnp.int32), PROMPT_MASK: of((rows, length), jnp.bool_)}
    number, steps = of((rows,), jnp.float32), of((rows, chunk.carried), jnp.float32)
    actions = of((rows, chunk.carried, spec.action_dim), jnp.float32)
    return ChunkBatch(
        observations=seen, actions=actions, valid=steps, rewards=of((rows, chunk.returned), jnp.float32), mask=number,
        discount_n=number, next_observations=seen if wanted.next_observations else {}, bc_weight=steps,
        delay=of((rows,), jnp.int32), weight=number,
        prev_action=of((rows, spec.action_dim), jnp.float32) if config.agent.gripper.reads_before else None,
    )  # fmt: skip


def _held(agent: Agent, state: AgentState, base: Params, networks: Sequence[str], batch: ChunkBatch) -> int:
    """Return the bytes that a gradient step of `networks` on a batch allocates, gradients included.

    A new state takes the old one's place, array by array, so that the step is traced up to the gradients. Compilers
    allocate these before the forward pass, which alone may hold the most.
    """
    # No optimiser: its state is the gradient. The agent is this estimate's alone.
    agent.policy_optimiser = agent.critic_optimiser = optax.GradientTransformation(
        lambda params: (), lambda gradients, *_: (gradients, gradients)
    )

    def step(state: AgentState, base: Params, batch: ChunkBatch) -> Any:
        batch = (agent.seen if "critic" in networks else agent.seen_by_policy)(state, base, batch)
        draws = {"policy": agent.policy_draws, "critic": agent.critic_draws}
        after, metrics = agent.step(state, base, batch, {name: draws[name](state.rng, batch) for name in networks})
        losses = [value for name, value in metrics.items() if not name.endswith("grad_norm")]
        return losses, [getattr(after, f"{name}_opt") for name in networks]

    program, made = jax.make_jaxpr(step, return_shape=True)(state, base, batch)
    forward = program.jaxpr.replace(outvars=program.jaxpr.outvars[: len(made[0])])
    gradients = _bytes([getattr(state, name) for name in networks])
    return max(peak_bytes(program.jaxpr), gradients + peak_bytes(forward))


def _bytes(tree: Any, shards: Shards = Shards()) -> int:  # noqa: B008 - it is immutable
    """Return the bytes of a tree's arrays on each device over which it is sharded."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        cut = shards.axis(leaf.shape, leaf.dtype) is not None
        total += leaf.size * leaf.dtype.itemsize // (shards.parts if cut else 1)
    return total


def _drawing(base: Params, shards: Shards) -> int:
    """Return the bytes at the peak of drawing a random base, leaf by leaf."""
    held = most = 0
    for leaf in jax.tree.leaves(base):
        own = _bytes(leaf, shards)
        held += own
        most = max(most, held + own // leaf.dtype.itemsize * _DRAWN)
    return most


# -- what a program holds: the liveness of its arrays, in the order in which it was traced ---------------------


def peak_bytes(program: Jaxpr, own: Iterable[Any] = ()) -> int:
    """Return the bytes that a program allocates at its peak, its outputs included and its inputs not.

    Every operation's output is an array until its last use, except for views; a compiler that fuses operations holds
    fewer, one that copies operands more. `own`: inputs that are allocated for it, such as a loop's slices.
    """
    steps, views = _needed(program), dict[Any, Any]()

    def arrays(variables: Iterable[Any]) -> set[Any]:
        return {views.get(v, v) for v in variables if not isinstance(v, Literal)}

    for step in steps:
        if step.primitive.name in _VIEWS:
            views.update((v, *arrays([of])) for v, of in zip(step.outvars, step.invars, strict=False) if arrays([of]))
    steps = [step for step in steps if step.primitive.name not in _VIEWS]
    last = {array: i for i, step in enumerate(steps) for array in arrays(step.invars)}
    last |= dict.fromkeys(arrays(program.outvars), len(steps))
    held = {array: _size(array) for array in own if array in last}
    now = most = sum(held.values())
    for i, step in enumerate(steps):
        ends = {array for array in arrays(step.invars) if last[array] == i}
        made = {array: _size(array) for array in step.outvars if step.primitive.name != "iota"}
        most = max(most, now + sum(made.values()))
        for inner in _programs(step):
            if step.primitive.name == "scan":
                first = step.params["num_consts"]
                behind = first + step.params["num_carry"]
                # Its outputs are there all the time; what it carries takes the place of its inputs that end here.
                taken = sum(held.get(array, 0) for array in arrays(step.invars[first:behind]) & ends)
                most = max(most, now - taken + sum(made.values()) + peak_bytes(inner, inner.invars[behind:]))
            else:
                given = zip(reversed(inner.invars), reversed(step.invars), strict=False)  # behind a branch's number
                moved = [ours for ours, theirs in given if arrays([theirs]) & ends & held.keys()]
                most = max(most, now - sum(map(_size, moved)) + peak_bytes(inner, moved))
        for array in made.keys() & last.keys():
            held[array] = made[array]
            now += made[array]
        now -= sum(held.pop(array, 0) for array in ends)
    return most


def _needed(program: Jaxpr) -> list[Any]:
    """Return the operations that outputs depend on."""
    wanted, steps = {v for v in program.outvars if not isinstance(v, Literal)}, []
    for step in reversed(program.eqns):
        if wanted.intersection(step.outvars):
            steps.append(step)
            wanted.update(v for v in step.invars if not isinstance(v, Literal))
    return steps[::-1]


def _programs(step: Any) -> Iterator[Jaxpr]:
    """Iterate over the programs within an operation, such as a loop's body."""
    for value in step.params.values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Jaxpr | ClosedJaxpr):
                yield each.jaxpr if isinstance(each, ClosedJaxpr) else each


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape) * getattr(variable.aval.dtype, "itemsize", 8)
