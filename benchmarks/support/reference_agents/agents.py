"""Q-chunking's agents, written straight from the paper: the contestant of updates.py.

One jitted call per update, which donates nothing; one Adam over all parameters, the target's among them; candidates by
repeating the observation. Losses take their random numbers as an argument, so that they can be compared with ours.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax

from support.reference_agents.batches import ACTION, DISCOUNT, HORIZON, STATE
from support.reference_agents.networks import Critic, Field, Gaussian, Modules, Temperature

DIM = HORIZON * ACTION
TAU, RATE = 0.005, 3e-4

Batch = dict[str, jax.Array]
Draws = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One algorithm at one size."""

    preset: str  # qc, qc-fql or qc-rlpd
    hidden: tuple[int, ...]
    heads: int
    candidates: int = 1
    steps: int = 10  # of the flow
    alpha: float = 100.0
    bc_alpha: float = 0.01


class Plain(flax.struct.PyTreeNode):
    """What all agents share: parameters, their optimiser, and one update."""

    rng: jax.Array
    params: Any
    opt_state: Any
    modules: Modules = flax.struct.field(pytree_node=False)
    optimiser: optax.GradientTransformation = flax.struct.field(pytree_node=False)
    setting: Setting = flax.struct.field(pytree_node=False)

    def call(self, name: str, *inputs: jax.Array, params: Any = None) -> Any:
        """One network; with its stored parameters, which no gradient reaches, where `params` are not given."""
        return self.modules.apply({"params": self.params if params is None else params}, *inputs, name=name)

    def draws(self, key: jax.Array, batch: int) -> Draws:
        raise NotImplementedError

    def next_chunk(self, observations: jax.Array, draws: Draws) -> jax.Array:
        """The policy's chunk in the target, float32[B, D]."""
        raise NotImplementedError

    def policy_loss(self, params: Any, batch: Batch, draws: Draws) -> tuple[jax.Array, dict[str, jax.Array]]:
        raise NotImplementedError

    def critic_loss(self, params: Any, batch: Batch, draws: Draws) -> jax.Array:
        """Squared error of all heads to R + gamma^H mask mean_k Q'_k, invalid windows counted as 0."""
        following = batch["next_observations"]
        next_q = self.call("target", following, self.next_chunk(following, draws)).mean(0)
        target = batch["returns"][:, -1] + DISCOUNT**HORIZON * batch["mask"] * next_q
        q = self.call("critic", batch["observations"], batch["actions"].reshape(-1, DIM), params=params)
        return ((q - target) ** 2 * batch["valid"][:, -1]).mean()

    def loss(self, params: Any, batch: Batch, draws: Draws) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The sum of both, and the parts."""
        critic = self.critic_loss(params, batch, draws)
        policy, parts = self.policy_loss(params, batch, draws)
        return critic + policy, {"critic": critic, **parts}

    def step(self, batch: Batch, draws: Draws) -> tuple[Plain, dict[str, jax.Array]]:
        """The agent of after one update with these random numbers, and the parts of the loss."""
        grads, parts = jax.grad(self.loss, has_aux=True)(self.params, batch, draws)
        updates, opt_state = self.optimiser.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        average = jax.tree.map(
            lambda c, t: TAU * c + (1 - TAU) * t, self.params["modules_critic"], self.params["modules_target"]
        )
        params = {**params, "modules_target": average}
        parts["norm"] = optax.tree.norm(grads)
        return self.replace(params=params, opt_state=opt_state), parts

    @jax.jit
    def update(self, batch: Batch) -> tuple[Plain, dict[str, jax.Array]]:
        rng, key = jax.random.split(self.rng)
        return self.replace(rng=rng).step(batch, self.draws(key, len(batch["mask"])))

    @jax.jit
    def sample(self, observations: jax.Array, key: jax.Array) -> jax.Array:
        """Chunks float32[B, D] to be executed."""
        return self.next_chunk(observations, self.draws(key, len(observations)))


class PlainFlow(Plain):
    """QC (best of N) and QC-FQL (a one-step policy)."""

    def draws(self, key: jax.Array, batch: int) -> Draws:
        keys = jax.random.split(key, 4)
        lead = (batch, self.setting.candidates) if self.setting.preset == "qc" else (batch,)
        return {
            "next": jax.random.normal(keys[0], (*lead, DIM)),
            "x0": jax.random.normal(keys[1], (batch, DIM)),
            "t": jax.random.uniform(keys[2], (batch,)),
            "distill": jax.random.normal(keys[3], (batch, DIM)),
        }

    def flow(self, observations: jax.Array, noise: jax.Array) -> jax.Array:
        """Euler steps from noise float32[..., D]; observations have its leading axes."""
        x = noise
        for i in range(self.setting.steps):
            t = jnp.full((*x.shape[:-1], 1), i / self.setting.steps)
            x = x + self.call("flow", observations, x, t) / self.setting.steps
        return jnp.clip(x, -1.0, 1.0)

    def next_chunk(self, observations: jax.Array, draws: Draws) -> jax.Array:
        noise = draws["next"]
        if self.setting.preset == "qc-fql":
            return jnp.clip(self.call("onestep", observations, noise), -1.0, 1.0)
        repeated = jnp.repeat(observations[:, None], noise.shape[1], axis=1)
        chunks = self.flow(repeated, noise)
        best = self.call("critic", repeated, chunks).mean(0).argmax(-1)
        return chunks[jnp.arange(len(chunks)), best]

    def policy_loss(self, params: Any, batch: Batch, draws: Draws) -> tuple[jax.Array, dict[str, jax.Array]]:
        observations, chunk = batch["observations"], batch["actions"].reshape(-1, DIM)
        t = draws["t"][:, None]
        x = (1 - t) * draws["x0"] + t * chunk
        velocity = self.call("flow", observations, x, t, params=params)
        error = ((velocity - (chunk - draws["x0"])) ** 2).reshape(-1, HORIZON, ACTION)
        imitation = (error * batch["valid"][..., None]).mean()
        if self.setting.preset == "qc":
            return imitation, {"imitation": imitation}
        student = self.call("onestep", observations, draws["distill"], params=params)
        distance = ((student - self.flow(observations, draws["distill"])) ** 2).mean()
        q = self.call("critic", observations, jnp.clip(student, -1.0, 1.0)).mean()
        return imitation + self.setting.alpha * distance - q, {"imitation": imitation, "distance": distance, "q": q}


class PlainGaussian(Plain):
    """RLPD on chunks, with imitation."""

    def draws(self, key: jax.Array, batch: int) -> Draws:
        following, now = jax.random.split(key)
        return {"next": jax.random.normal(following, (batch, DIM)), "pi": jax.random.normal(now, (batch, DIM))}

    def next_chunk(self, observations: jax.Array, draws: Draws) -> jax.Array:
        mean, log_std = self.call("policy", observations)
        return jnp.tanh(mean + jnp.exp(log_std) * draws["next"])

    def policy_loss(self, params: Any, batch: Batch, draws: Draws) -> tuple[jax.Array, dict[str, jax.Array]]:
        mean, log_std = self.call("policy", batch["observations"], params=params)

        def log_prob(u: jax.Array) -> jax.Array:
            gaussian = -0.5 * ((u - mean) / jnp.exp(log_std)) ** 2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
            return (gaussian - 2 * (jnp.log(2.0) - u - jax.nn.softplus(-2 * u))).sum(-1)

        u = mean + jnp.exp(log_std) * draws["pi"]
        entropy = -log_prob(u).mean()
        q = self.call("critic", batch["observations"], jnp.tanh(u)).mean()
        alpha = self.call("temperature", params=params)
        gap = jax.lax.stop_gradient(entropy) + 0.5 * DIM
        edge = 1 - 1e-5
        imitation = -log_prob(jnp.arctanh(jnp.clip(batch["actions"].reshape(-1, DIM), -edge, edge))).mean()
        loss = -self.call("temperature") * entropy - q + alpha * gap + self.setting.bc_alpha * imitation
        return loss, {"entropy": entropy, "q": q, "imitation": imitation}


def create(setting: Setting, seed: int = 0) -> Plain:
    """A fresh agent; the target's parameters are the critic's."""
    rng, key = jax.random.split(jax.random.key(seed))
    gaussian = setting.preset == "qc-rlpd"
    observation, chunk, time = jnp.zeros((1, STATE)), jnp.zeros((1, DIM)), jnp.zeros((1, 1))
    networks: dict[str, tuple[Any, ...]] = {
        name: (Critic(setting.hidden, setting.heads, fql=not gaussian), observation, chunk)
        for name in ("critic", "target")
    }
    if gaussian:
        networks["policy"] = (Gaussian(setting.hidden, DIM), observation)
        networks["temperature"] = (Temperature(),)
    else:
        # The one-step policy is there for best-of-n as well, in the published code.
        networks["flow"] = (Field(setting.hidden, DIM), observation, chunk, time)
        networks["onestep"] = (Field(setting.hidden, DIM), observation, chunk)
    modules = Modules({k: v[0] for k, v in networks.items()})
    optimiser = optax.adam(RATE)

    @jax.jit  # operation by operation it takes a minute on a busy machine
    def initialise(key: jax.Array) -> tuple[Any, Any]:
        params = modules.init(key, **{k: v[1:] for k, v in networks.items()})["params"]
        params["modules_target"] = params["modules_critic"]
        return params, optimiser.init(params)

    kind = PlainGaussian if gaussian else PlainFlow
    return kind(rng, *initialise(key), modules, optimiser, setting)
