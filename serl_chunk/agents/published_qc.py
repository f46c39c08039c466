"""The agents of Q-chunking's published code as it computes them (Li, Zhou and Levine 2025).

o and a are a window's first observation and flat chunk of D numbers, o' the observation that it ends on, v_h whether
step h is of the window's episode and v whether the last one is. There are K critics; agg is their mean or least
(`q_agg`). z and eps are normal noise, clip(a) is within [-1, 1].

    y = R + gamma^n mask agg_k Q'_k(o', a')                   L_critic = mean_{k,rows} v (Q_k(o, a) - y)^2

acfql: x_t = (1 - t) z + t a, and the flow f is integrated by Euler's method,

    L_flow = mean_{rows,h,numbers} v_h |f(o, x_t, t) - (a - z)|^2

    best-of-n (QC)          a' and what acts: of N samples clip flow(o, z) that of the greatest agg_k Q_k
    distill-ddpg (QC-FQL)   a' and what acts: clip mu(o, z)
                            L_actor = L_flow + alpha mean (mu(o, z) - clip flow(o, z))^2 - mean_k Q_k(o, clip mu(o, z))

acrlpd: a' and what acts: tanh(u), u ~ N(m(o), s(o)), with pi's density

    L_actor = mean [alpha log pi(a~|o) - mean_k Q_k(o, a~)] - bc_alpha mean log pi(a|o),  a~ ~ pi
    L_alpha = alpha (entropy + `target_entropy_multiplier` D)

One step on each batch is taken of everything, by gradients at the parameters before it. The critics' average moves
towards the critics before the step. What acrlpd imitates are all rows, also beyond an episode's end.
`benchmarks/parity_qc.py` compares with numbers recorded of that code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from serl_chunk.agents.acfql import FlowActor
from serl_chunk.agents.acrlpd import GaussianActor
from serl_chunk.agents.actor_critic import ActorCritic
from serl_chunk.agents.losses import soft_actor_loss
from serl_chunk.agents.perception import Perception
from serl_chunk.agents.policies.base import ChunkNetwork
from serl_chunk.agents.policies.flow import FlowPolicy
from serl_chunk.agents.policies.heads import GaussianPolicy
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState, Committed, Context, Noise, Observation, Params, key_of
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.models.convolutions import map_blocks
from serl_chunk.models.flow import interpolate
from serl_chunk.models.mlp import Mlp
from serl_chunk.models.sums import Loss, mean_of
from serl_chunk.types import ChunkBatch

_FLOW_LAYERS: dict[str, Any] = {"activation": "gelu", "kernel_init": "xavier_uniform"}
EDGE = 1e-5  # imitated actions are moved to within 1 - this, where log pi is finite
_LOG_STD_MIN = -20.0


class OneStepPolicy(ChunkNetwork):
    """Chunks mu(o, z) by one pass from noise z (FQL, Park 2025); the parameters are the network's."""

    def __init__(self, hidden: Sequence[int], perception: Perception, **layers: Any) -> None:
        super().__init__(perception)
        self.net: Any = Mlp(hidden, self.chunk_dim, **layers)

    def init_network(self, key: jax.Array, features: jax.Array) -> Params:
        noise = jnp.zeros((*features.shape[:-1], self.chunk_dim), jnp.float32)
        return self.net.init(key, jnp.concatenate([features, noise], -1))["params"]

    def sample(self, params: Params, context: Context, noise: jax.Array) -> jax.Array:
        """Chunks float32[..., N, H, A] before any clip, from noise float32[..., N, H*A]."""
        features = context.features[..., None, :]
        features = jnp.broadcast_to(features, (*noise.shape[:-1], features.shape[-1]))
        return self.chunks(self.net.apply({"params": params}, jnp.concatenate([features, noise], -1)))


class PublishedQc(ActorCritic):
    """What both agents have in common: the critics' loss, and one step of everything at once."""

    config: PublishedQcConfig
    together = True

    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """ "next" float32[B, N, D], standard normal; N is 1 but for best-of-n."""
        shape = (batch.actions.shape[0], self.config.candidates, self.chunk_dim)
        return {"next": jax.random.normal(key_of(key, "next"), shape)}

    def next_chunk(self, state: AgentState, base: Params, observations: Observation, noise: jax.Array) -> jax.Array:
        """a', flat float32[B, Hc*A], from noise float32[B, N, D]."""
        raise NotImplementedError

    def critic_target(self, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise) -> jax.Array:
        chunk = self.next_chunk(state, base, batch.next_observations, draws["next"])
        return self.bootstrapped(state, base, batch, draws, chunk)

    def _apply_critic_gradient(self, state: AgentState, grads: Params) -> AgentState:
        before = {name: state.critic[name] for name in state.target}
        target = optax.incremental_update(before, state.target, self.config.tau)
        return super()._apply_critic_gradient(state, grads).replace(target=target)


class PublishedAcfql(PublishedQc, FlowActor):
    """QC and QC-FQL."""

    def __init__(self, config: PublishedQcConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec, norm="after" if config.layer_norm else "none", **_FLOW_LAYERS)
        layers: dict[str, Any] = {"norm": "after" if config.actor_layer_norm else "none", **_FLOW_LAYERS}
        hidden = config.actor_hidden_dims
        self.one_step = None if config.best_of_n else OneStepPolicy(hidden, self.perception, **layers)
        layers["time"] = "fourier" if config.use_fourier_features else "raw"
        flow = FlowConfig(hidden=hidden, steps=config.flow_steps)
        self.flow = FlowPolicy(flow, self.perception, published=True, fourier_dim=config.fourier_feature_dim, **layers)
        self.act_by(self.flow)

    def init(self, rng: jax.Array) -> AgentState:
        policy = self.flow.init(key_of(rng, "flow"))
        if self.one_step is not None:
            policy["onestep"] = self.one_step.init(key_of(rng, "one step"))
        return self.initial_state(rng, policy)

    def shown(self, policy: Params, critic: Params, base: Params, observation: Observation) -> Context:
        if self.one_step is None:
            return super().shown(policy, critic, base, observation)
        return self.perception.policy_context(policy["onestep"], critic, base, observation)

    def samples(
        self, policy: Params, base: Params, context: Context, noise: Any, committed: Committed | None = None
    ) -> jax.Array:
        if self.one_step is None:
            return super().samples(policy, base, context, noise, committed)
        return self.bounded(self.one_step.sample(policy["onestep"]["net"], context, noise))

    def next_chunk(self, state: AgentState, base: Params, observations: Observation, noise: jax.Array) -> jax.Array:
        """The best of N chunks by the online critic (QC, equation 7), in blocks of rows."""

        def choose(observations: Observation, noise: jax.Array) -> jax.Array:
            chunks, seen = self.candidates(state.policy, state.critic, base, observations, noise)
            return self.best_candidate(state.critic, seen, self.acting_critic.truncate_flatten(chunks))

        return map_blocks(choose, (observations, noise), rows=noise.shape[1])

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """The flow's; for distill-ddpg "distill" float32[B, D], standard normal."""
        draws = self.flow.draws(key, len(batch.actions))
        if self.one_step is not None:
            draws["distill"] = jax.random.normal(key_of(key, "distill"), draws["x0"].shape)
        return draws

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        params = super().policy_params(state, pretrained=pretrained)
        if self.one_step is not None:  # the teacher does not travel
            params["policy"] = {"onestep": params["policy"]["onestep"]}
        return params

    def policy_loss(
        self, policy: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, *, bc_only: bool
    ) -> Loss:
        """L_flow, or L_actor of distill-ddpg."""
        context = self.perception.policy_context(policy, state.critic, base, batch.observations)
        x, velocity = interpolate(draws["x0"], draws["t"], batch.actions.reshape(len(batch.actions), -1))
        given = self.flow.given(batch, draws)  # nothing
        error = self.flow.velocity(policy["flow"], context, x, draws["t"], given) - velocity
        imitation = mean_of(error.reshape(batch.actions.shape) ** 2 * batch.valid[..., None])
        metrics = {"actor/bc_loss": imitation}
        if self.one_step is None:
            return Loss((imitation,), metrics)
        noise, student = draws["distill"][:, None], policy["onestep"]
        teacher = jax.lax.stop_gradient(self.bounded(self.flow.sample(policy["flow"], context, noise)))
        seen = self.perception.policy_context(student, state.critic, base, batch.observations)
        chunk = self.one_step.sample(student["net"], seen, noise)
        metrics["actor/distill_loss"] = distance = mean_of((chunk - teacher) ** 2)
        terms = imitation, distance.times(self.config.alpha)
        if bc_only:
            return Loss(terms, metrics)
        q = self.climbed(state, base, batch.observations, self.bounded(chunk[:, 0]))
        return Loss((*terms, q.times(-1.0)), metrics | {"actor/q": q})


class PublishedAcrlpd(PublishedQc, GaussianActor):
    """RLPD on chunks, and QC-RLPD."""

    net: GaussianPolicy

    def __init__(self, config: PublishedQcConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec, norm="before" if config.layer_norm else "none")
        self.imitates = config.bc_alpha > 0
        self.act_by(GaussianPolicy(
            config.actor_hidden_dims, self.perception, layer_norm=False, log_std_min=_LOG_STD_MIN,
            kernel_init="xavier_uniform",
        ))  # fmt: skip
        self.initial_temperature = config.init_temp
        self.target_entropy = -config.target_entropy_multiplier * self.chunk_dim

    def next_chunk(self, state: AgentState, base: Params, observations: Observation, noise: jax.Array) -> jax.Array:
        context = self.perception.policy_context(state.policy, state.critic, base, observations)
        return self.critic.truncate_flatten(self.net.sample(state.policy["net"], context, noise)[:, 0])

    def policy_loss(
        self, policy: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, *, bc_only: bool
    ) -> Loss:
        """L_actor; densities are of whole chunks."""
        pi = self.distribution(policy, state.critic, base, batch.observations)
        taught = pi.log_prob(batch.actions.reshape(len(batch.actions), -1), EDGE)
        imitation = mean_of(-jnp.sum(taught, axis=-1))
        if bc_only:
            return Loss((imitation,), {"actor/bc_loss": imitation})
        chunk, log_prob = pi.sample_and_log_prob(draws["pi"])
        q = self.climbed(state, base, batch.observations, self.net.chunks(chunk))
        loss = soft_actor_loss(jnp.sum(log_prob, axis=-1), state.temperature["log_alpha"], q)
        terms = (*loss.terms, imitation.times(self.config.bc_alpha))
        return Loss(terms, {"actor/bc_loss": imitation, **loss.metrics})


def published_qc(config: PublishedQcConfig, spec: AgentSpec) -> PublishedQc:
    """Build the agent that `config.agent_name` names."""
    return PublishedAcfql(config, spec) if config.agent_name == "acfql" else PublishedAcrlpd(config, spec)
