"""Losses of iterations on groups: the clipped surrogate of PPO (RIPT-VLA), and FlowIPO's velocities by preference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.agents.groups.rows import Episodes
from serl_chunk.agents.losses import imitation_sum
from serl_chunk.models.sums import Loss, Sum

# Of a deviation. While reference and policy are equal, deviations are rounding (1e-6 to 1e-5), which must not be scaled
# up to random weights.
EPSILON = 1e-3


def ppo_loss(log_prob: jax.Array, old: jax.Array, advantage: jax.Array, weight: jax.Array, clip: float) -> Loss:
    """Clipped surrogate of PPO (Schulman 2017).

    The mean under `weight` of max(-A r, -A clip(r, 1 - clip, 1 + clip)), r = exp(log_prob - old).

    Args:
        log_prob, old, weight: float32[B, R], of R ratios for each decision.
        advantage: float32[B].
        clip: above 0.
    """
    difference = log_prob - old
    ratio, gain = jnp.exp(difference), advantage[:, None]
    loss = jnp.maximum(-gain * ratio, -gain * jnp.clip(ratio, 1 - clip, 1 + clip))
    total = jnp.sum(weight)
    mean = lambda each: Sum(jnp.sum(weight * each), total)  # noqa: E731
    metrics = {
        "actor/ppo_loss": mean(loss),
        "actor/approx_kl": mean(ratio - 1 - difference),  # Schulman's k3 estimator
        "actor/clip_fraction": mean((jnp.abs(ratio - 1) > clip).astype(jnp.float32)),
        "actor/ratio": mean(ratio),
    }
    return Loss((mean(loss),), metrics)


def compute_flow_ipo_weights(deviation: np.ndarray, episodes: Episodes, alpha: float) -> np.ndarray:
    """w = sigmoid(alpha A), float32[n] in (0, 1), A = (2R - 1) (delta - mean) / (std + eps) within an episode.

    Args:
        deviation: float32[n], delta = |a - a_ref| of each executed decision.
        episodes: of these rows.
        alpha: sharpness.
    """
    of, count = episodes.of_rows, episodes.decisions
    mean = np.bincount(of, deviation) / count
    centred = deviation - mean[of]
    std = np.sqrt(np.bincount(of, centred**2) / count)
    advantage = (2 * episodes.reward[of] - 1) * centred / (std[of] + EPSILON)
    return (1 / (1 + np.exp(-alpha * advantage))).astype(np.float32)


def flow_ipo_loss(
    velocity: jax.Array, reference: jax.Array, straight: jax.Array, target: jax.Array, weight: jax.Array
) -> Loss:
    """The mean under `weight` of |v - (w u + (1 - w) v_ref)|^2 per number.

    Args:
        velocity, reference, straight: float32[B, H, D]: v, v_ref and u = a - z, all at x_t.
        target: float32[B], w.
        weight: float32[B, H].
    """
    w = target[:, None, None]
    wanted = jax.lax.stop_gradient(w * straight + (1 - w) * reference)
    loss = imitation_sum((velocity - wanted) ** 2, weight)
    plain = imitation_sum(jax.lax.stop_gradient(velocity - straight) ** 2, weight)
    return Loss((loss,), {"actor/flow_ipo_loss": loss, "actor/velocity_mse": plain})
