"""Eight simulated devices against one: `python eight_devices.py FOLDER [CASE ...]` prints what differs as JSON.

`python eight_devices.py FOLDER CASE HOST:PORT I/N` is one of N processes that have them together; the first one prints.
In FOLDER/CASE it leaves a checkpoint of the eight, numbered by the case's updates.

It needs processes of its own, with XLA_FLAGS of `processes.SIMULATED`. Each case trains an agent from one state on the
same batches, by plain gradient descent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from agent_tools import drawn, made, make_batches, named
from group_agents import EPISODES, group_agent, sampled_rows
from pi0_agents import CONFIG, SMALL, SPEC, pi0_agent, shown, started
from point_robot import experiment

from serl_chunk.agents.base import Agent
from serl_chunk.agents.groups.agent import GroupAgent
from serl_chunk.agents.groups.rows import Episodes, uncredited
from serl_chunk.agents.state import AgentState
from serl_chunk.agents.vision import digest_of
from serl_chunk.config.agents.groups import GroupAgentConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.groups import GroupConfig
from serl_chunk.learner.devices import Devices
from serl_chunk.learner.processes import Follower, Leader, Processes
from serl_chunk.runs.checkpoints import CheckpointStore, Saves, read_item
from serl_chunk.runs.openpi_checkpoints import export

ROWS, UPDATES, LEAST = 16, 5, 256  # bytes from which an array is cut
RATE = 0.05
Hosted = tuple[AgentState, dict[str, float]]  # a state on the host, and metrics
Step = Callable[[AgentState], tuple[AgentState, dict[str, Any]]]


def config(fsdp: int, rows: int = ROWS, accumulate: int = 1) -> ExperimentConfig:
    base = experiment()
    own = {"batch_size": rows, "accumulate": accumulate, "fsdp_devices": fsdp, "fsdp_least": LEAST / 2**20}
    return dataclasses.replace(base, learner=dataclasses.replace(base.learner, **own))


def descent(rate: float) -> optax.GradientTransformation:
    """Gradient descent whose state is the last gradient."""
    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    return optax.GradientTransformation(zeros, lambda g, *_: (jax.tree.map(lambda x: -rate * x, g), g))


def optimised(agent: Agent, rate: float = RATE) -> Agent:
    agent.policy_optimiser = agent.critic_optimiser = agent.iteration_optimiser = descent(rate)
    return agent


def fresh(agent: Agent, state: AgentState) -> AgentState:
    """A copy on the host, with the optimiser's states of `descent`."""
    parts = {name: jax.device_get(getattr(state, name)) for name in ("policy", "critic")}
    zeros = {f"{name}_opt": jax.tree.map(np.zeros_like, part) for name, part in parts.items()}
    numbers = jax.tree.map(jnp.array, jax.device_get(state.replace(rng=(), **zeros)))
    return numbers.replace(rng=jax.random.key(0))


def pi0(accumulate: int) -> tuple[Agent, AgentState, Callable[[Agent, Devices], Step]]:
    spec = dataclasses.replace(SPEC, micro_batches=accumulate)
    agent = optimised(pi0_agent(spec, trainable="expert"))
    base, state = agent.new_base(jax.random.key(3)), started(agent)
    once = jax.device_get(shown(agent))
    batch = jax.tree.map(lambda x: np.stack([np.concatenate([x, x[::-1]])]), once)

    def steps(agent: Agent, devices: Devices) -> Step:
        here, put = devices.place(base), devices.put({"policy": batch})
        assert digest_of(here, agent.gathered) == digest_of(base)
        with tempfile.TemporaryDirectory() as folder:  # by process 0 alone
            trained, frozen = jax.device_get((state.policy, devices.gathered(here)))
            export(f"{folder}/pi0", agent.config.pi0, trained["pi0"], frozen["pi0"])
        return lambda state: agent.update(state, here, put)

    return agent, state, steps


def critic() -> tuple[Agent, AgentState, Callable[[Agent, Devices], Step]]:
    agent = optimised(made("decoupled-lengths"))
    batches = named(agent, make_batches(agent.spec, 2, ROWS))
    return agent, drawn(agent), lambda agent, devices: lambda state: agent.update(state, {}, devices.put(batches))


def groups() -> tuple[Agent, AgentState, Callable[[Agent, Devices], Step]]:
    """An iteration of `ript-flow-sde`: each call is a gradient step."""
    agent = optimised(group_agent(), 1e-3)  # less than what clips every ratio
    first = agent.begin_iterations(drawn(agent))
    sampled = sampled_rows(agent, first)

    def steps(agent: Any, devices: Devices) -> Step:
        state = devices.place(first)
        prepared = agent.prepare(state, {}, sampled)
        _, rows, _ = agent.credit(state, {}, sampled, EPISODES, prepared)
        return lambda state: agent.update_rows(state, {}, rows)

    return agent, first, steps


def pi0_groups() -> tuple[Agent, AgentState, Callable[[Agent, Devices], Step]]:
    """The same of a pi0, whose frozen part reads each row once."""
    own = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(CONFIG)}
    config = GroupAgentConfig(**own | {"pi0": dataclasses.replace(SMALL, trainable="expert")})
    agent = optimised(GroupAgent(config, dataclasses.replace(SPEC, group=GroupConfig(minibatch=8, sigma=1.0))), 1e-3)
    base, first = agent.new_base(jax.random.key(3)), agent.begin_iterations(started(agent))
    seen = jax.device_get(shown(agent, 8).observations)
    keys = jax.random.split(jax.random.key(0), 8)
    _, record = jax.device_get(agent.decide(agent.published(first, base), seen, keys, explore=True))
    sampled = uncredited(seen, record, np.ones((8, SPEC.horizon), np.float32))
    episodes = Episodes(np.array([1, 0, 0, 0], np.float32), np.zeros(4, int), np.full(4, 2))

    def steps(agent: Any, devices: Devices) -> Step:
        state, here = devices.place((first, base))
        read = agent.with_contexts(here, sampled, None, None)
        _, rows, _ = agent.credit(state, here, read, episodes, agent.prepare(state, here, read))
        return lambda state: agent.update_rows(state, here, rows)

    return agent, first, steps


CASES: dict[str, tuple[Callable[[], Any], int, int]] = {  # what trains, micro-batches, and parts of arrays
    "pi0": (lambda: pi0(1), 1, 8),
    "pi0, two micro-batches": (lambda: pi0(2), 2, 4),
    "critic": (critic, 1, 8),
    "groups": (groups, 1, 8),
    "groups of a pi0": (pi0_groups, 1, 8),
}


def prepared(agent: Agent, steps: Any, devices: Devices) -> Step:
    if devices.several:
        devices.adopt(agent)
    else:
        agent.compile()
    return steps(agent, devices)


def hosted(state: AgentState, metrics: dict[str, Any], devices: Devices) -> Hosted:
    numbers = devices.gathered(state.replace(rng=jax.random.key_data(state.rng)))
    return jax.device_get(numbers), {name: float(value) for name, value in metrics.items()}


def here(state: AgentState, devices: Devices) -> AgentState:
    """A hosted state on devices."""
    return devices.place(jax.tree.map(jnp.array, state).replace(rng=jax.random.wrap_key_data(jnp.array(state.rng))))


def leaves(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def apart(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> tuple[float, list[str]]:
    """The largest difference of a leaf by its norm, and leaves that are left out: all but zero."""
    norms = {path: float(np.linalg.norm(leaf)) for path, leaf in theirs.items()}
    small = [path for path, norm in norms.items() if norm <= 1e-6 * max(norms.values())]
    distance = [float(np.linalg.norm(ours[p] - theirs[p])) / norms[p] for p in theirs if p not in small]
    return max(distance, default=0.0), small


def saved_right(folder: Path, state: AgentState, step: Step, devices: Devices) -> bool:
    """Whether a checkpoint holds the state of its moment, though the next update has its memory."""
    was = jax.device_get(devices.gathered(state.replace(rng=())))
    store = CheckpointStore(folder, saves=devices.together.saves() if devices.together else Saves())
    store.save(UPDATES, state, {"policy": state.policy}, {"centre": np.zeros(2)}, {})
    step(state)
    assert store.wait()
    found, _ = read_item(folder / "checkpoints" / str(UPDATES), "state")
    return all(np.array_equal(found[path], leaf) for path, leaf in leaves(was).items())


def all_devices(agent: Agent, accumulate: int, fsdp: int, together: Leader | Follower | None) -> Devices:
    return Devices(config(fsdp, 8 if agent.config.iterates else ROWS, accumulate), together=together)


def compare(
    folder: Path, make: Callable[[], Any], accumulate: int, fsdp: int, leader: Leader | None = None
) -> dict[str, Any]:
    agent, first, steps = make()
    one = Devices(config(1, ROWS, accumulate), jax.devices()[:1])
    many = all_devices(agent, accumulate, fsdp, leader)
    found: dict[str, Any] = {"losses": [], "gradients": [], "left out": [], "parameters": []}
    start = hosted(fresh(agent, first), {}, one)[0]
    step, alone, states = prepared(agent, steps, one), here(start, one), [start]
    after: list[Hosted] = []
    for _ in range(UPDATES):
        alone, metrics = step(alone)
        after.append(hosted(alone, metrics, one))
        states.append(after[-1][0])
    step, state = prepared(agent, steps, many), here(start, many)
    for before, (reference, metrics) in zip(states[:-1], after, strict=True):
        state, _ = step(state)  # on its own; the gradient is that of the other's parameters
        of, ours = hosted(*step(here(before, many)), many)
        losses = [abs(ours[name] - value) / max(1.0, abs(value)) for name, value in metrics.items() if "loss" in name]
        found["losses"].append(max(losses))
        for part in ("policy", "critic"):
            if getattr(reference, part):
                gradient, small = apart(*(leaves(getattr(each, f"{part}_opt")) for each in (of, reference)))
                found["gradients"].append(gradient)
                found["left out"] += small
                found["parameters"].append(
                    apart(*(leaves(many.gathered(getattr(each, part))) for each in (state, reference)))[0]
                )
    every = [leaf for leaf in jax.tree.leaves(state.replace(rng=()))]
    large = [leaf for leaf in every if many.shards.axis(leaf.shape, leaf.dtype) is not None]
    found["large"] = len(large)
    found["whole"] = sum(leaf.sharding.is_fully_replicated for leaf in large)
    found["part"] = max(leaf.addressable_shards[0].data.size * fsdp / leaf.size for leaf in large)
    found["saved"] = saved_right(folder, state, step, many)
    return found


def one_of_several(folder: Path, case: str, coordinator: str, process: str) -> None:
    processes, started_with = Processes.parse(coordinator, process), config(1)
    processes.join()
    make, accumulate, fsdp = CASES[case]
    if processes.index == 0:
        with contextlib.closing(Leader(processes, started_with, os._exit)) as leader:
            print(json.dumps({case: compare(folder / case, make, accumulate, fsdp, leader)}))
    else:
        follower, agent = Follower(processes, started_with, os._exit), make()[0]
        follower.follow(lambda: all_devices(agent, accumulate, fsdp, follower).adopt(agent))


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    if len(sys.argv) > 4:
        one_of_several(Path(sys.argv[1]), *sys.argv[2:])
    else:
        chosen = sys.argv[2:] or CASES
        print(json.dumps({name: compare(Path(sys.argv[1]) / name, *CASES[name]) for name in chosen}))
