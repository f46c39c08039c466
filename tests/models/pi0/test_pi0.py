"""pi0 and pi0.5 as a whole: the shared prefix, candidates, committed actions, the loss, and what is trained."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import naming
from pi0_agents import split
from pi0_models import CAMERAS, PlainPi0, Small, small

from serl_chunk.models import convolutions
from serl_chunk.models.pi0 import siglip
from serl_chunk.models.pi0.pi0 import Pi0, Prefix, time_features
from serl_chunk.models.pi0.tree import flat, nested, trains
from serl_chunk.types import ConfigError

N = 3
made = functools.cache(small)


@functools.cache
def program(model: Pi0, method: str, **options: Any) -> Callable[..., Any]:
    """Trace a method once for each shape, whatever the number of tests."""
    return jax.jit(functools.partial(getattr(model, method), **options), static_argnums=4 if method == "sample" else ())


def encoded(case: Small, observation: Any = None, model: Pi0 | None = None) -> Prefix:
    observation = case.observation if observation is None else observation
    return program(model or case.model, "encode")(case.params, observation)


def plain_observation(case: Small) -> dict[str, Any]:
    inputs = {k.removeprefix("obs/"): jnp.asarray(v) for k, v in case.inputs.items() if k.startswith("obs/")}
    out: dict[str, Any] = {k: v for k, v in inputs.items() if "/" not in k}
    for group in ("image", "image_mask"):
        out[group] = {k.partition("/")[2]: v for k, v in inputs.items() if k.startswith(f"{group}/")}
    return out


def noises(case: Small, n: int = N) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (2, n, *case.inputs["noise"].shape[1:]))


def velocity(case: Small, prefix: Prefix, *args: Any) -> jax.Array:
    return program(case.model, "velocity")(case.params, prefix, *args)


def sampled(
    case: Small, prefix: Prefix, noise: jax.Array, *args: Any, model: Pi0 | None = None, **options: Any
) -> jax.Array:
    return program(model or case.model, "sample", **options)(case.params, prefix, noise, *(args or (None, 3)))


@pytest.mark.parametrize("name", ["pi05", "key_heads"])
def test_a_shared_prefix_gives_the_joint_passes_velocity(name):
    case = made(name)
    plain = PlainPi0(case.meta, case.flat)
    x, t = case.inputs["x_t"], case.inputs["time"]
    joint, (keys, values) = jax.jit(lambda seen: (plain.joint(seen, x, t), plain.cache(seen)))(plain_observation(case))
    prefix = encoded(case)
    np.testing.assert_allclose(velocity(case, prefix, x, t), joint["v_t"], atol=2e-5)
    np.testing.assert_allclose(prefix.keys, keys, atol=2e-5)
    np.testing.assert_allclose(prefix.values, values, atol=2e-5)
    np.testing.assert_array_equal(prefix.mask, joint["prefix_mask"])
    np.testing.assert_array_equal(prefix.positions, joint["positions"][:, : prefix.mask.shape[1]])


def test_candidates_are_as_many_single_samples():
    case = made("pi05")
    prefix, noise = encoded(case), noises(case)
    together = sampled(case, prefix, noise)
    plain = jax.jit(PlainPi0(case.meta, case.flat).sample, static_argnums=2)
    for i in range(N):
        np.testing.assert_allclose(together[:, i], plain(plain_observation(case), noise[:, i], 3), atol=2e-5)


def test_blocks_of_candidates_are_the_same_candidates(monkeypatch):
    """Many candidates are integrated in blocks on a CPU: here two of three, and one that is left."""
    case = made("pi0")
    prefix, noise, actions = encoded(case), noises(case, 7), jnp.asarray(case.inputs["actions"])
    first = jnp.broadcast_to(jnp.arange(actions.shape[1]) < 1, actions.shape[:2]).astype(jnp.float32)
    whole = sampled(case, prefix, noise, (actions, first), 3, clean=True)
    monkeypatch.setattr(convolutions, "BLOCK_ROWS", 3 * 2 * 2 * 6)
    blocks = Pi0(dataclasses.replace(case.config, remat=not case.config.remat))  # else what was traced is used
    found = sampled(case, prefix, noise, (actions, first), 3, model=blocks, clean=True)
    np.testing.assert_allclose(found, whole, atol=1e-5)
    np.testing.assert_array_equal(found[:, :, 0], jnp.broadcast_to(actions[:, None, 0], found[:, :, 0].shape))


def test_a_missing_camera_and_empty_slots_are_the_same_as_masked_ones():
    case = made("pi0")
    observation = dict(case.observation)
    observation[f"image_masks/{CAMERAS[1]}"] = np.zeros(2, bool)
    observation["prompt"] = np.pad(observation["prompt"], ((0, 0), (0, 20)))
    observation["prompt_mask"] = np.pad(observation["prompt_mask"], ((0, 0), (0, 20)))
    less = {name: value for name, value in observation.items() if not name.endswith(CAMERAS[1])}
    less |= {name: observation[name][:, :16] for name in ("prompt", "prompt_mask")}
    assert not observation["prompt_mask"][:, 16:].any()
    whole, short = encoded(case, observation), encoded(case, less)
    left_out = case.config.camera_tokens + observation["prompt"].shape[1] - 16
    assert short.keys.shape[2] == whole.keys.shape[2] - left_out
    x, t = case.inputs["x_t"], case.inputs["time"]
    np.testing.assert_allclose(velocity(case, short, x, t), velocity(case, whole, x, t), atol=2e-5)


def test_one_observation_is_a_row_of_a_batch():
    case = made("pi0")
    whole = encoded(case)
    one = encoded(case, {k: v[0] for k, v in case.observation.items()})
    np.testing.assert_allclose(one.keys, whole.keys[:, 0], atol=1e-5)
    np.testing.assert_allclose(one.features, whole.features[0], atol=1e-5)
    x, t = jnp.asarray(case.inputs["x_t"]), jnp.asarray(case.inputs["time"])
    np.testing.assert_allclose(velocity(case, one, x[0], t[0]), velocity(case, whole, x, t)[0], atol=1e-5)
    two = encoded(case, {k: v[:, None] for k, v in case.observation.items()})
    assert two.keys.shape == (*whole.keys.shape[:1], 2, 1, *whole.keys.shape[2:])
    np.testing.assert_allclose(two.keys[:, :, 0], whole.keys, atol=1e-5)


def arrays_within(jaxpr: Any) -> Any:
    """Iterate over the shapes of all arrays of a program, those of its loops included."""
    for eqn in jaxpr.eqns:
        yield from (tuple(v.aval.shape) for v in eqn.outvars)
        for value in eqn.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from arrays_within(inner)


def test_no_array_holds_the_prefixs_keys_for_each_candidate():
    case = made("pi0")
    prefix, noise = encoded(case), noises(case, 7)
    tokens, size = prefix.keys.shape[2], case.config.head_dim
    program = jax.make_jaxpr(lambda p, f, z: case.model.sample(p, f, z, None, 2))(case.params, prefix, noise)
    shapes = list(arrays_within(program.jaxpr))
    assert any(tokens in shape for shape in shapes)  # of logits and weights
    assert not [shape for shape in shapes if 7 in shape and tokens in shape and size in shape]
    together = tokens + noise.shape[2] + 1
    assert not [shape for shape in shapes if together in shape]  # nor one behind the other


def mean_loss(case: Small, model: Pi0) -> Callable[[Any, Any], jax.Array]:
    actions, noise, t = (jnp.asarray(case.inputs[k]) for k in ("actions", "noise", "time"))

    def loss(trained: Any, base: Any) -> jax.Array:
        params = nested(flat(base) | flat(trained))
        prefix = model.encode(params, case.observation)
        weight = jnp.ones(actions.shape[:2])
        return model.flow_loss(params, prefix, actions, weight, None, noise[:, None], t[:, None]).mean()

    return loss


def test_every_trained_leaf_has_a_gradient_and_no_other_has_one():
    case = made("lora")
    config = dataclasses.replace(case.config, trainable="lora")
    trained, base = split(config, case.params)
    assert flat(trained).keys() == {path for path in case.flat if trains(config, path)}
    gradient = flat(jax.device_get(jax.jit(jax.grad(mean_loss(case, Pi0(config))))(trained, base)))
    assert gradient.keys() == flat(trained).keys()
    assert [path for path, leaf in gradient.items() if not np.any(leaf)] == []


def losses(case: Small, actions: Any, weight: Any, given: Any, noise: Any, t: Any) -> tuple[float, float]:
    prefix = encoded(case)
    total, count = program(case.model, "flow_loss")(case.params, prefix, actions, weight, given, noise, t)
    return float(total), float(count)


def test_the_loss_counts_the_dimensions_that_actions_have():
    case = made("pi0")
    actions, noise, t = jnp.asarray(case.inputs["actions"]).at[..., 14:].set(0.0), noises(case, 1), jnp.ones((2, 1)) / 3
    ones = jnp.ones(actions.shape[:2])
    real, padded = losses(case, actions[..., :14], ones, None, noise, t), losses(case, actions, ones, None, noise, t)
    dims = jnp.broadcast_to(jnp.arange(32) < 14, actions.shape).astype(jnp.float32)
    np.testing.assert_allclose(real, losses(case, actions, dims, None, noise, t), rtol=1e-5)
    assert padded[1] == pytest.approx(real[1] * 32 / 14)
    assert padded[0] > real[0]


def test_given_actions_are_final_and_have_no_weight():
    case = made("pi05")
    actions, noise, t = jnp.asarray(case.inputs["actions"]), noises(case, 2), jnp.full((2, 2), 0.4)
    given = (jnp.arange(actions.shape[1])[None] < jnp.array([[2], [0]])).astype(jnp.float32)
    ones = jnp.ones(actions.shape[:2])
    total, count = losses(case, actions, ones, given, noise, t)
    assert count == 2 * actions.shape[-1] * (2 * actions.shape[1] - 2)
    other = noise.at[0, :, :2].set(7.0)  # noise of given actions is not read
    assert losses(case, actions, ones, given, other, t)[0] == pytest.approx(total, rel=1e-5)
    free = losses(case, actions, ones, jnp.zeros_like(given), noise, t)
    assert free == pytest.approx(losses(case, actions, ones, None, noise, t), rel=1e-5)


@pytest.mark.parametrize(("name", "clean"), [("pi0", False), ("pi05", True)])
def test_committed_actions_are_kept_and_the_others_continue_them(name, clean):
    case = made(name)
    prefix, noise, actions = encoded(case), noises(case), jnp.asarray(case.inputs["actions"])
    mask = jnp.broadcast_to(jnp.arange(actions.shape[1]) < 2, actions.shape[:2]).astype(jnp.float32)
    chunks = sampled(case, prefix, noise, (actions, mask), 3, clean=clean)
    kept = jnp.broadcast_to(actions[:, None, :2], chunks[:, :, :2].shape)
    np.testing.assert_array_equal(chunks[:, :, :2], kept)
    free = sampled(case, prefix, noise)
    assert jnp.abs(chunks[:, :, 2:] - free[:, :, 2:]).max() > 1e-3
    nothing = sampled(case, prefix, noise, (actions, jnp.zeros_like(mask)), 3, clean=clean)
    np.testing.assert_allclose(nothing, free, atol=1e-5)


def test_time_is_added_up_in_float32(monkeypatch):
    case = made("pi0")
    seen: list[float] = []
    monkeypatch.setattr(Pi0, "velocity", lambda self, p, f, x, t, g: seen.append(float(t[0, 0])) or jnp.ones_like(x))
    prefix, noise = encoded(case), noises(case, 1)
    model = Pi0(
        dataclasses.replace(case.model.config, remat=False)
    )  # what is recomputed is traced, and shows no number
    with jax.disable_jit():
        out = model.sample(case.params, prefix, noise, None, 10)
    expected = np.cumsum(np.array([1.0] + [-0.1] * 9, np.float32), dtype=np.float32)
    np.testing.assert_array_equal(np.float32(seen), expected)
    np.testing.assert_allclose(out, noises(case, 1) - 1.0, atol=1e-6)


def test_times_features_are_sines_and_cosines_of_periods_from_four_thousandths_to_four_in_every_program():
    t = jnp.array([0.25, 0.767, 1.0])
    found = time_features(t, 8)
    periods = 4e-3 * 1000 ** (np.arange(4) / 3)
    angles = 2 * np.pi * np.asarray(t)[:, None] / periods
    np.testing.assert_allclose(found, np.concatenate([np.sin(angles), np.cos(angles)], -1), atol=2e-4)
    whole, compiled = time_features(t, 1024), jax.jit(time_features, static_argnums=1)
    np.testing.assert_array_equal(compiled(t, 1024), whole)
    np.testing.assert_array_equal([compiled(t[i], 1024) for i in range(3)], whole)


def test_pixels_may_be_bytes_and_robots_with_fewer_numbers_have_zeros_behind_them():
    case = made("pi0")
    images = {k: v for k, v in case.observation.items() if k.startswith("images/")}
    pixels = {k: np.round((v + 1) * 127.5).astype(np.uint8) for k, v in images.items()}
    floats = {k: (v / np.float32(255.0) * 2 - 1).astype(np.float32) for k, v in pixels.items()}
    state = case.observation["state"] * (np.arange(32) < 14)
    short, whole = (
        encoded(case, {**case.observation, **shown, "state": s})
        for shown, s in ((pixels, state[:, :14]), (floats, state.astype(np.float32)))
    )
    np.testing.assert_allclose(short.keys, whole.keys, atol=1e-6)
    np.testing.assert_array_equal(short.state, whole.state)


def test_features_are_means_of_normalised_tokens():
    case = made("pi0")
    model = Pi0(dataclasses.replace(case.config, image_size=(28, 28), feature_grid=2))
    observation = {k: v[:, :28, :28] if k.startswith("images/") else v for k, v in case.observation.items()}
    params = dict(case.flat)
    params["PaliGemma/img/pos_embedding"] = params["PaliGemma/img/pos_embedding"][:, :4]
    prefix = jax.jit(model.encode)(nested(params), observation)
    width = case.config.vlm.width
    features = np.asarray(prefix.features)
    assert features.shape == (2, (3 * 4 + 1) * width)
    fields = features[:, : 12 * width].reshape(2, 12, width)  # one token each
    np.testing.assert_allclose(np.sqrt((fields[0] ** 2).mean(-1)), 1.0, rtol=1e-3)
    np.testing.assert_array_equal(fields[1, 8:], 0.0)  # the camera that the second row lacks
    assert 0 < np.abs(features[:, 12 * width :]).max() < 10


def test_numbers_are_computed_in_the_configured_dtype():
    case = made("pi0")
    model = Pi0(dataclasses.replace(case.config, dtype="bfloat16"))
    x, t = jnp.asarray(case.inputs["x_t"]), jnp.asarray(case.inputs["time"])

    def computed(params: Any) -> tuple[Prefix, jax.Array]:
        prefix = model.encode(params, case.observation)
        return prefix, model.velocity(params, prefix, x, t)

    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), case.params)
    for params, dtype in ((case.params, "float32"), (half, "bfloat16")):
        prefix, v = jax.eval_shape(computed, params)
        assert {x.dtype.name for x in (prefix.keys, prefix.values)} == {"bfloat16"}
        assert {x.dtype.name for x in (prefix.features, prefix.state)} == {"float32"}
        assert v.dtype.name == dtype  # as openpi's, whose served parameters are all bfloat16
    exact, found = velocity(case, encoded(case), x, t), jax.jit(computed)(half)[1]
    assert jnp.abs(found - exact).max() < 0.05 * jnp.abs(exact).max()
    chunk = jax.eval_shape(lambda p, f, z: model.sample(p, f, z, None, 2), half, prefix, noises(case))
    assert chunk.dtype == jnp.float32


def test_observations_that_the_model_cannot_read_are_refused():
    case = made("pi0")
    image = f"images/{CAMERAS[0]}"
    cut, wide = case.observation[image][:, :14], np.zeros((2, 33), np.float32)
    for wrong, named in (
        ({**case.observation, image: cut}, (image, "14x42", "28x42", "agent.pi0.image_size")),
        ({**case.observation, "state": wide}, ("state", 33, "agent.pi0.action_dim")),
        ({"state": case.observation["state"]}, (CAMERAS[0], "prompt")),
    ):
        with pytest.raises(ConfigError, match=naming(*named)):
            jax.eval_shape(case.model.encode, case.params, wrong)


def test_remat_and_unrolling_of_the_image_tower_change_no_number():
    case = small("widths")

    def gradient(remat: bool, unroll: bool) -> jax.Array:
        config = dataclasses.replace(case.config, remat=remat)
        image = jnp.asarray(case.observation[f"images/{CAMERAS[0]}"])
        total = lambda p: jnp.sum(siglip.stages(config, p, image, unroll).tokens ** 2)  # noqa: E731
        return jax.jit(jax.grad(total))(case.params["PaliGemma"]["img"])["embedding"]["kernel"]

    np.testing.assert_allclose(gradient(True, False), gradient(False, True), rtol=1e-4, atol=1e-5)
