"""The grasp critic: Q of a few values of the grippers, for each part of a chunk that one value is held for.

HIL-SERL (Luo et al. 2024) learns a gripper by double DQN (van Hasselt et al. 2016) over close, hold and open. Here a
decision is for a chunk: every part j of `hold_steps` ticks has its own branches, and the target is averaged over them
(branching Q-networks, Tavakoli et al. 2018). A classifier imitates the humans' choices, and the maximum is over choices
that it finds likely enough (discrete BCQ, Fujimoto et al. 2019).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.agents.losses import bootstrap_target, imitation_sum
from serl_chunk.agents.state import Observation, Params, key_of
from serl_chunk.config.agents.base import ActorCriticConfig, AgentConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.models.encoder import ObservationEncoder
from serl_chunk.models.mlp import Mlp
from serl_chunk.models.sums import Sum
from serl_chunk.models.value_heads import Range, critic_values, initial_bias, regression_loss
from serl_chunk.types import ChunkBatch

# Shares of the smallest gap between values: least motion of a moving gripper in a tick, largest distance at a value.
_SPEED, _AT = 0.1, 0.25


class GripperActions:
    """The options of G grippers in H ticks of a chunk: J parts, P branches each, O options a branch.

    Jointly P is 1 and an option is a value for every gripper, O = C**G of C values; else P is G and O is C. `neutral`
    is the value that leaves a gripper as it is, where commands are pushes (HIL-SERL); None where they are openings.
    """

    def __init__(
        self, values: tuple[float, ...], grippers: int, steps: int, held: int, joint: bool, neutral: float | None = None
    ) -> None:
        self.steps, self.held, self.parts, self.grippers = steps, held, steps // held, grippers
        self.values = np.array(values, np.float32)  # C
        self.joint = joint
        self.neutral = None if neutral is None else values.index(neutral)
        c = len(values)
        self.options: int = c**grippers if joint else c
        self.shape = self.parts, 1 if joint else grippers, self.options  # J, P, O
        self.place = c ** np.arange(grippers)[::-1]  # an option's number is the values' indices read as digits
        self.table = self.values[(np.arange(c**grippers)[:, None] // self.place) % c]  # float32[C**G, G]

    def nearest(self, actions: jax.Array) -> jax.Array:
        """Index of the value nearest to each number of `actions` float32[...], int32[...]; the first of two."""
        distance = jnp.abs(actions[..., None] - self.values.reshape((1,) * actions.ndim + (-1,)))
        return jnp.argmin(distance, axis=-1).astype(jnp.int32)

    def heading(self, actions: jax.Array, valid: jax.Array, before: jax.Array | None) -> jax.Array:
        """Index of the value that each tick's command moves to, int32[B, H, G], of actions float32[B, H, G].

        A driver that limits a gripper's speed records intermediate commands, and an episode may end there. So a command
        between two values that moves (by more than `_SPEED`) is on its way to the one in that direction; any other is
        at the nearest. `before` float32[B, G] is the tick before the window; without it the first tick moves as the
        second does, where that one exists.
        """
        if before is not None:
            first = before[:, None]
        else:
            second = min(1, actions.shape[1] - 1)
            exists = valid[:, second].reshape(-1, 1, 1) > 0
            first = jnp.where(exists, 2 * actions[:, :1] - actions[:, second][:, None], actions[:, :1])
        moved = actions - jnp.concatenate([first, actions[:, :-1]], axis=1)
        order = np.argsort(self.values).astype(np.int32)
        values = self.values[order]
        gap = float(np.min(np.diff(values), initial=np.inf))
        least = jnp.sum(actions[..., None] > values.reshape(1, 1, 1, -1), axis=-1)  # place of the next value above
        up, down = jnp.minimum(least, len(values) - 1), jnp.maximum(least - 1, 0)
        nearest = self.nearest(actions)
        between = jnp.abs(actions - jnp.asarray(self.values)[nearest]) > _AT * gap
        way = jnp.asarray(order)[jnp.where(moved > 0, up, down)]
        return jnp.where(between & (jnp.abs(moved) > _SPEED * gap), way, nearest).astype(jnp.int32)

    def label(self, actions: jax.Array, valid: jax.Array, before: jax.Array | None = None) -> jax.Array:
        """The executed options, int32[B, J, P], for gripper actions float32[B, H, G].

        The value of a part is the one that most of its existing steps (`valid` float32[B, H]; all where none exists)
        move to (`heading`), the later one of two. With a neutral value it is the last push, however short: a human taps
        a button.
        """
        if self.neutral is None:
            index = self._most(self.heading(actions, valid, before), valid)
        else:
            index = self._last_push(self.nearest(actions), valid, self.neutral)
        if not self.joint:
            return index
        return jnp.sum(index * self.place.astype(np.int32).reshape(1, 1, -1), axis=-1, keepdims=True)

    def _last_push(self, index: jax.Array, valid: jax.Array, neutral: int) -> jax.Array:
        """Each part's last index that is not the neutral one, int32[B, J, G], of int32[B, H, G]."""
        parts = index.reshape(-1, self.parts, self.held, self.grippers)
        pushes = (parts != neutral) & (valid.reshape(-1, self.parts, self.held, 1) > 0)
        last = jnp.max(jnp.where(pushes, jnp.arange(self.held).reshape(1, 1, -1, 1), -1), axis=2)
        at = jnp.take_along_axis(parts, jnp.maximum(last, 0)[:, :, None], axis=2)[:, :, 0]
        return jnp.where(last < 0, neutral, at).astype(jnp.int32)

    def _most(self, index: jax.Array, valid: jax.Array) -> jax.Array:
        """Each part's most frequent index, int32[B, J, G], of int32[B, H, G]."""
        b, count = index.shape[0], len(self.values)
        part = jax.nn.one_hot(index, count).reshape(b, self.parts, self.held, self.grippers, count)
        weight = valid.reshape(b, self.parts, self.held, 1, 1)
        weight = jnp.where(jnp.sum(weight, axis=2, keepdims=True) > 0, weight, 1.0)
        later = 1 + 0.1 * jnp.arange(1, self.held + 1, dtype=jnp.float32) / self.held**2  # less than a vote in total
        return jnp.argmax(jnp.sum(part * weight * later.reshape(1, 1, -1, 1, 1), axis=2), axis=-1).astype(jnp.int32)

    def decode(self, option: jax.Array) -> jax.Array:
        """Each part's values in model space, float32[..., J, G], of options int32[..., J, P]."""
        if self.joint:
            return jnp.asarray(self.table)[option[..., 0]]
        return jnp.asarray(self.values)[option]

    def chunk(self, option: jax.Array, horizon: int) -> jax.Array:
        """The grippers' actions float32[..., H, G] of options int32[..., J, P]; the last choice lasts to the end."""
        part = np.minimum(np.arange(horizon) // self.held, self.parts - 1)
        return self.decode(option)[..., part, :]

    def changes(self, actions: jax.Array, before: jax.Array, valid: jax.Array) -> jax.Array:
        """Number of grippers that change their choice on each tick, float32[B, H], for actions float32[B, H, G].

        `before` float32[B, G] is the tick before the window; ticks that are not `valid` float32[B, H] change nothing.
        With a neutral value a push counts where the last one, as far back as `before`, was another or is unknown;
        releasing does not count.
        """
        index = self.nearest(jnp.concatenate([before[:, None], actions], axis=1))
        if self.neutral is None:
            changed = index[:, 1:] != index[:, :-1]
        else:
            pushes = index != self.neutral
            ticks = jnp.where(pushes, jnp.arange(index.shape[1]).reshape(1, -1, 1), -1)
            last = jax.lax.cummax(ticks, axis=1)[:, :-1]  # of each tick, the last push before it
            other = (last < 0) | (jnp.take_along_axis(index, jnp.maximum(last, 0), axis=1) != index[:, 1:])
            changed = pushes[:, 1:] & other
        return jnp.sum(changed, axis=-1).astype(jnp.float32) * valid


def reachable_actions(logits: jax.Array, share: jax.Array | float) -> jax.Array:
    """bool[..., O]: options of at least `share` (0: all, 1: one) of the likeliest one's probability (discrete BCQ)."""
    return logits - jnp.max(logits, axis=-1, keepdims=True) >= jnp.log(jnp.asarray(share, jnp.float32))


def best_option(values: jax.Array, allowed: jax.Array) -> jax.Array:
    """The allowed option of the highest value, int32[...], of values float32[..., O]."""
    return jnp.argmax(jnp.where(allowed, values, -jnp.inf), axis=-1).astype(jnp.int32)


def select_action(values: jax.Array, option: jax.Array) -> jax.Array:
    """values float32[..., O] at options int32[...]: float32[...]."""
    return jnp.take_along_axis(values, option[..., None], axis=-1)[..., 0]


def grasp_target(batch: ChunkBatch, discount: float, penalties: jax.Array, chosen: jax.Array) -> jax.Array:
    """y = R + penalties + gamma^n mask mean_{j,p} Q'_{jp}(o', c*_{jp}), without a gradient: float32[B].

    `chosen` float32[B, J, P] are the target network's values of the options c* that the online network prefers;
    `penalties` is float32[B].
    """
    y = bootstrap_target(batch, discount, jnp.mean(chosen, axis=(1, 2)))
    return jax.lax.stop_gradient(y + penalties)


def grasp_loss(outputs: jax.Array, option: jax.Array, target: jax.Array, bounds: Range, weight: jax.Array) -> Sum:
    """Mean over windows, parts and branches of the regression of Q_{jp}(o, c_{jp}) to y (Tavakoli 2018).

    Raw outputs float32[B, J, P, O], executed options int32[B, J, P], y float32[B], weights float32[B, J].
    """
    chosen = jnp.moveaxis(select_action(outputs, option), 0, -1)  # [J, P, B]
    return regression_loss(chosen, target, bounds, jnp.broadcast_to(weight.T[:, None], chosen.shape))


def choice_imitation(logits: jax.Array, option: jax.Array, bc: jax.Array) -> Sum:
    """Mean under weights `bc` float32[B, J] or [B, J, P] of -log p(c_{jp} | o), for logits float32[B, J, P, O]."""
    return imitation_sum(-select_action(jax.nn.log_softmax(logits), option), bc)


class GraspCritic:
    """Q_{jp}(o, c) and the imitated probabilities of the same options, float32[..., J, P, O].

    Parameters of either: {"encoder", "net"}. Each has an encoder of its own, trained by its own loss alone.
    """

    def __init__(self, config: AgentConfig, choices: GripperActions, value_range: Range) -> None:
        self.encoder: Any = ObservationEncoder(config.image_keys, config.use_state, config.encoder, config.language)
        g, self.choices = config.gripper, choices
        # One number an option. A penalty adds to returns, whose range is that of the others.
        self.bounds = None if g.penalty else value_range
        c = config.critic if isinstance(config, ActorCriticConfig) else CriticConfig()  # bc has none
        bias = initial_bias(self.bounds)
        self.q: Any = Mlp(c.hidden, math.prod(choices.shape), "before", bias, c.activation, config.kernel_init)
        self.classifier: Any = self.q.clone(out_bias=0.0)

    def init(self, key: jax.Array, observation: Observation) -> tuple[Params, Params]:

        def fresh(key: jax.Array, net: Any) -> Params:
            encoder = self.encoder.init(key_of(key, "encoder"), observation).get("params", {})
            features = self.encoder.apply({"params": encoder}, observation)
            return {"encoder": encoder, "net": net.init(key_of(key, "net"), features)["params"]}

        return fresh(key_of(key, "critic"), self.q), fresh(key_of(key, "policy"), self.classifier)

    def outputs(self, critic: Params, observation: Observation) -> jax.Array:
        return self._apply(self.q, critic, observation)

    def values(self, critic: Params, observation: Observation) -> jax.Array:
        return self.expected_value(self.outputs(critic, observation))

    def expected_value(self, outputs: jax.Array) -> jax.Array:
        return critic_values(outputs, self.bounds)

    def logits(self, policy: Params, observation: Observation) -> jax.Array:
        return self._apply(self.classifier, policy, observation)

    def _apply(self, net: Any, params: Params, observation: Observation) -> jax.Array:
        features = self.encoder.apply({"params": params.get("encoder", {})}, observation)
        out = net.apply({"params": params["net"]}, features)
        return out.reshape(*out.shape[:-1], *self.choices.shape)
