"""Our agents and the plain ones as contestants: objects that a process of their own serves to updates.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import builder_of
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.config.robots import OgbenchConfig
from serl_chunk.types import ChunkBatch
from support.reference_agents.agents import Plain, Setting, create
from support.reference_agents.batches import (
    ACTION,
    BATCH,
    DISCOUNT,
    HIDDEN,
    HORIZON,
    LAYERS,
    STATE,
    Batch,
    random_batch,
    random_draws,
    random_observations,
    returns,
)
from support.reference_agents.stopwatch import Contestant

CHECKED_UPDATES = 3
BATCHES = 4  # different ones that go round
# Parts of the loss: the plain agents' names, and ours.
PARTS = {
    "critic": "critic/critic_loss",
    "imitation": "actor/bc_loss",
    "distance": "actor/distill_loss",
    "q": "actor/q",
    "entropy": "actor/entropy",
}


def experiment_agent(
    preset: str, hidden: int, layers: int = LAYERS, compat: str | None = "qc", **changes: Any
) -> AgentConfig:
    """The agent of a preset, the published one or ours, of that size; dotted `changes` as on the command line."""
    config = configured(ExperimentConfig("updates", OgbenchConfig(), AcfqlConfig()), preset=preset, compat=compat).agent
    widths = (hidden,) * layers
    if isinstance(config, PublishedQcConfig):
        changes |= {"value_hidden_dims": widths, "actor_hidden_dims": widths}
    else:
        changes |= {"critic.hidden": widths, ("flow.hidden" if isinstance(config, AcfqlConfig) else "hidden"): widths}
    for name, value in changes.items():
        group, _, field = name.rpartition(".")
        if group:
            config = dataclasses.replace(
                config, **{group: dataclasses.replace(getattr(config, group), **{field: value})}
            )
        else:
            config = dataclasses.replace(config, **{name: value})
    return config


def plain_setting(preset: str, config: AgentConfig) -> Setting:
    """What the plain agent is told of the same algorithm."""
    assert isinstance(config, PublishedQcConfig)
    c = config
    if c.agent_name == "acrlpd":
        return Setting(preset, c.actor_hidden_dims, c.num_qs, bc_alpha=c.bc_alpha)
    return Setting(preset, c.actor_hidden_dims, c.num_qs, c.candidates, c.flow_steps, c.alpha)


class _Contestant(Contestant):
    """Counts compilations."""

    def __init__(self) -> None:
        self.compiled = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **_: Any) -> None:
        self.compiled += event == "/jax/core/compile/backend_compile_duration"

    def settled(self) -> None:
        """From here on a compilation counts as one too many."""
        self.compiled = 0

    def recompiled(self) -> int:
        """Compilations since `settled`."""
        return self.compiled


class PlainContestant(_Contestant):
    """reference_agents/agents.py, one update a call."""

    agent: Plain

    def open(
        self,
        preset: str,
        hidden: int = HIDDEN,
        layers: int = LAYERS,
        batch: int = BATCH,
        changes: dict[str, Any] | None = None,
    ) -> None:
        setting = plain_setting(preset, experiment_agent(preset, hidden, layers, **(changes or {})))
        self.setting = setting
        self.agent = create(setting)
        self.batches = [_published_layout(random_batch(i, batch)) for i in range(BATCHES)]
        self.observations = random_observations(64)
        self.compile()

    def losses(self) -> list[dict[str, float]]:
        """Parts of the loss over the first updates of a fresh agent, with injected draws."""
        agent, out = create(self.setting), []
        one = self.setting.preset != "qc"
        step = jax.jit(type(agent).step)
        for i in range(CHECKED_UPDATES):
            batch = self.batches[i]
            draws = random_draws(i, len(batch["mask"]), self.setting.candidates)
            draws["next"] = draws["next"][:, 0] if one else draws["next"]
            agent, parts = step(agent, batch, draws)
            out.append({k: float(v) for k, v in parts.items() if k in PARTS})
        return out

    def _update(self, i: int) -> int:
        self.agent, parts = self.agent.update(self.batches[i % BATCHES])
        jax.block_until_ready((self.agent.params, parts))
        return 1

    def _decide(self, i: int) -> None:
        np.asarray(self.agent.sample(self.observations[i % 64][None], jax.random.key(i)))


class OurContestant(_Contestant):
    """serl_chunk's agent, `per_call` updates a call."""

    agent: Agent
    state: AgentState
    plain: Plain | None = None

    def open(
        self,
        preset: str,
        hidden: int = HIDDEN,
        layers: int = LAYERS,
        batch: int = BATCH,
        changes: dict[str, Any] | None = None,
        per_call: int = 4,
        compat: str | None = "qc",
    ) -> None:
        """Build the agent, the published one with the plain one's parameters, and compile."""
        config = experiment_agent(preset, hidden, layers, compat, **(changes or {}))
        self.plain = create(plain_setting(preset, config)) if compat else None
        self._open(config, batch, per_call)

    def _open(self, config: AgentConfig, batch: int, per_call: int) -> None:
        self.config = config
        self.agent = builder_of(config)(config, AgentSpec(STATE, ACTION, HORIZON, HORIZON, (), DISCOUNT))
        self.raw = [random_batch(i, batch) for i in range(BATCHES)]
        windows = [_windows(b) for b in self.raw]
        self.per_call = per_call
        turns = [[windows[(i + j) % BATCHES] for j in range(per_call)] for i in range(BATCHES)]
        self.batches = [jax.tree.map(lambda *x: np.stack(x), *turn) for turn in turns]
        self.observations = random_observations(64)
        self.state = self._fresh()
        # A snapshot of its own: updates donate the state.
        self.acting = jax.jit(self.agent.policy_params)(self.state)
        self.compile(1)

    def _fresh(self) -> AgentState:
        state = jax.jit(self.agent.init)(jax.random.key(0))
        if self.plain is not None:
            state = jax.jit(with_parameters)(state, self.plain)
        return state

    def losses(self) -> list[dict[str, float]]:
        state, out = self._fresh(), []
        step = jax.jit(self.agent.step)
        for i in range(CHECKED_UPDATES):
            batch = _windows(self.raw[i])
            draws = random_draws(i, len(batch.mask), self.config.candidates)
            state, metrics = step(state, {}, batch, {"critic": {"next": draws["next"]}, "policy": draws})
            out.append({k: float(metrics[v]) for k, v in PARTS.items() if v in metrics})
        return out

    def _update(self, i: int) -> int:
        self.state, metrics = self.agent.update(self.state, {}, {"critic": self.batches[i % BATCHES]})
        jax.block_until_ready((self.state, metrics))
        return self.per_call

    def _decide(self, i: int) -> None:
        observation = {"state": self.observations[i % 64]}
        np.asarray(self.agent.sample(self.acting, observation, jax.random.key(i), explore=True)[0])


class RecipeContestant(OurContestant):
    """The experiment `ogbench` as it is: our own recipe, at sizes of its own."""

    def open(self, batch: int = BATCH, per_call: int = 4) -> None:  # type: ignore[override]
        self._open(load_experiment("ogbench").agent, batch, per_call)


def with_parameters(state: AgentState, plain: Plain) -> AgentState:
    """Our state with the parameters of the plain agent."""

    def mlp(tree: dict[str, Any], *out: str) -> dict[str, Any]:
        trunk = dict(tree["trunk"])
        layers = sum(name.startswith("Dense") for name in trunk)
        last = [tree[name] for name in out or ("out",)]
        joined = {k: jnp.concatenate([layer[k] for layer in last], -1) for k in ("kernel", "bias")}
        return {**trunk, f"Dense_{layers}": joined}

    params = plain.params
    heads = {"encoder": {}, "q": {"VmapMlp_0": mlp(params["modules_critic"]["heads"])}}
    policy: dict[str, Any] = {"encoder": {}}
    if "modules_policy" in params:
        policy["net"] = mlp(params["modules_policy"], "mean", "log_std")
    else:
        policy["flow"] = {"Mlp_0": mlp(params["modules_flow"])}
        if "onestep" in state.policy:
            policy["onestep"] = {"encoder": {}, "net": mlp(params["modules_onestep"])}
    return state.replace(
        **{
            name: jax.tree.map(lambda old, new: jnp.copy(new.reshape(old.shape)), getattr(state, name), tree)
            for name, tree in {"critic": heads, "target": heads, "policy": policy}.items()
        }
    )


def _published_layout(batch: Batch) -> Batch:
    return {**batch, "returns": returns(batch["rewards"])}


def _windows(b: Batch) -> ChunkBatch:
    size = len(b["mask"])
    return ChunkBatch(
        observations={"state": b["observations"]},
        actions=b["actions"],
        valid=b["valid"],
        rewards=b["rewards"],
        mask=b["mask"],
        discount_n=np.full(size, DISCOUNT**HORIZON, np.float32),
        next_observations={"state": b["next_observations"]},
        bc_weight=b["valid"],
        delay=np.zeros(size, np.int32),
        weight=b["valid"][:, -1],
    )
