"""Selection among candidate chunks: best of N, and chunks that climb the critic (PA-RL: Mark et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from serl_chunk.agents.critic import ChunkCritic
from serl_chunk.agents.losses import aggregate_heads
from serl_chunk.agents.state import Observation, Params
from serl_chunk.config.agents import AcfqlConfig, AcrlpdConfig, ImproveConfig


def candidate_limit(config: AcfqlConfig | AcrlpdConfig, *, pretrained: bool) -> jax.Array:
    """Number of candidates that `best_of_n` compares when acting, int32 scalar; 0 for all.

    Above 0 the critic is not trusted: no chunk climbs it, and no actor replans on its advice. Where chunks would climb
    or replan, a limit of one is therefore published for one candidate too.
    """
    few, uses_critic = config.pretrain_candidates, config.improve.steps > 0 or config.replan_spread is not None
    limited = few < config.candidates or (uses_critic and few == 1)
    return jnp.asarray(few if pretrained and limited else 0, jnp.int32)


def best_of_n(values: jax.Array, chunks: jax.Array, published: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The chunk of the highest value among `published` candidates (`candidate_limit`), its value and its index."""
    limit = jnp.where(published == 0, len(values), published)
    masked = jnp.where(jnp.arange(len(values)) < limit, values, -jnp.inf)
    best = jnp.argmax(masked)
    return chunks[best], values[best], best


_FLAT = 1e-12  # a slope below this counts as 0


class Score(NamedTuple):
    """A critic's values of chunks."""

    mean: jax.Array  # over its heads, for climbing
    rank: jax.Array  # over its heads by `agent.choose_by` and `choose_std`, for comparing


ScoreOf = Callable[[jax.Array], Score]  # of chunks float32[..., H, A], each number float32[...]
Ranked = tuple[jax.Array, jax.Array]  # chunks float32[..., H, A] and their ranks float32[...]


def critic_score(critic: ChunkCritic, params: Params, observation: Observation) -> ScoreOf:
    """The critic's score of chunks float32[..., N, H, A] at observations with batch axes `...`, encoded once."""
    features = critic.features(params, observation)

    def score(chunks: jax.Array) -> Score:
        flat = critic.truncate_flatten(chunks)
        wide = jnp.broadcast_to(features[..., None, :], (*flat.shape[:-1], features.shape[-1]))
        heads = critic.values(params, wide, flat)
        return Score(jnp.mean(heads, axis=0), aggregate_heads(heads, critic.choose_by, critic.choose_std))

    return score


def gradient_ascent(
    score: ScoreOf, start: jax.Array, free: jax.Array, *, steps: int, rate: float, radius: float
) -> Ranked:
    """The best-ranked chunks on `steps` steps up the mean score from `start`, float32[..., H, A], and their ranks.

        x_{j+1} = clip(x_j + rate * g / max|g|),   g = d mean_k Q_k(o, x) / d x at x_j

    The clip is to [-1, 1] and, per dimension, to `radius` around the start. `rate` alone sets a step's length, as a
    critic's slope depends on the rewards' scale and vanishes where a sigmoid saturates. A step can pass a maximum, so
    the start and every chunk on the way count. Actions with `free` float32[..., H] of 0 do not move. Each chunk's
    score must depend on that chunk alone.
    """
    movable = jnp.broadcast_to(free[..., None] > 0, start.shape)
    low, high = jnp.clip(start - radius, -1.0, 1.0), jnp.clip(start + radius, -1.0, 1.0)

    def total(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scored = score(x)
        return jnp.sum(scored.mean), scored.rank

    def better(x: jax.Array, rank: jax.Array, best: Ranked) -> Ranked:
        higher = rank > best[1]
        return jnp.where(higher[..., None, None], x, best[0]), jnp.where(higher, rank, best[1])

    def step(carry: tuple[jax.Array, Ranked], _: None) -> tuple[tuple[jax.Array, Ranked], None]:
        x, best = carry
        (_, rank), slope = jax.value_and_grad(total, has_aux=True)(x)
        slope = jnp.where(movable, slope, 0.0)
        steepest = jnp.max(jnp.abs(slope), axis=(-2, -1), keepdims=True)
        moved = jnp.clip(x + rate * slope / jnp.maximum(steepest, _FLAT), low, high)
        return (jnp.where(movable, moved, start), better(x, rank, best)), None

    nothing = jnp.full(start.shape[:-2], -jnp.inf)
    (end, best), _ = jax.lax.scan(step, (start, (start, nothing)), None, length=steps)
    return better(end, score(end).rank, best)


def improve(score: ScoreOf, chunks: jax.Array, values: jax.Array, free: jax.Array, config: ImproveConfig) -> Ranked:
    """The best chunk after the k best, by `values` float32[..., N], of N have climbed (`gradient_ascent`); its rank."""
    _, index = jax.lax.top_k(values, min(config.top, values.shape[-1]))
    start = jnp.take_along_axis(chunks, index[..., None, None], axis=-3)
    free, rate = free[..., None, :], config.rate
    ends, ranks = gradient_ascent(score, start, free, steps=config.steps, rate=rate, radius=config.radius)
    best = jnp.argmax(ranks, axis=-1)[..., None]
    chunk = jnp.take_along_axis(ends, best[..., None, None], axis=-3)
    return chunk[..., 0, :, :], jnp.take_along_axis(ranks, best, axis=-1)[..., 0]
