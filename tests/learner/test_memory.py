"""The memory of a learner by its experiment: exact states, what a traced program holds, sharded arrays, batches."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noise import noise_episode

from serl_chunk.agents.compilation import compiled
from serl_chunk.agents.registry import make_agent
from serl_chunk.agents.spec import BatchSpec
from serl_chunk.cli.process import load
from serl_chunk.config.agents.pi0 import PI0_PRESETS, ExpertConfig, SiglipConfig, VlmConfig
from serl_chunk.data.preprocess import fit_preprocess
from serl_chunk.learner import memory
from serl_chunk.learner.memory import batch_shapes, learner_memory, peak_bytes
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.replay.replay import Replay
from serl_chunk.types import ConfigError

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import pi0_device  # noqa: E402

ARRAY, ROWS = 4 * 64 * 64, 64


def loop(x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c), jnp.sin(c)), x, length=3)


@pytest.mark.parametrize(
    ("function", "arrays"),
    [  # how many arrays as large as its input a program holds at its peak
        (lambda x: jnp.tanh(jnp.tanh(jnp.tanh(x))), 2),  # one is read, one written
        (lambda x: (jnp.tanh(x), jnp.sin(x), jnp.cos(x)), 3),
        (lambda x: (jnp.exp(x), jnp.tanh(x))[1], 1),  # no output depends on the other
        (lambda x: jnp.tanh(x.reshape(-1))[None], 1),
        (lambda x: jax.jit(jnp.tanh)(jnp.sin(x)), 2),
        (lambda x: jax.jit(lambda y: jnp.tanh(jnp.tanh(jnp.tanh(y))))(jnp.sin(x)), 2),  # sin(x) ends within
        (loop, 1 + 3 + 2),  # what is carried, all outputs, and those of a turn
        (lambda x: loop(jnp.tanh(x)), 1 + 3 + 2),  # carried in tanh(x)'s place
        (lambda x: jax.lax.scan(lambda c, y: (c + y.sum(), None), 0.0, jnp.stack([x, x]))[0], 2 + 1),  # and a slice
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: jnp.tanh(jnp.tanh(y)), jnp.sin, x), 2),
    ],
)
def test_a_program_holds_each_array_until_its_last_use(function, arrays):
    program = jax.make_jaxpr(function)(jnp.ones((ROWS, ROWS)))
    assert peak_bytes(program.jaxpr) == pytest.approx(arrays * ARRAY, abs=64)


def nbytes(tree):
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


@pytest.fixture
def lenient():
    """Promotion of types and ranks, which pi0 needs."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fake_aloha", []),
        ("fake_aloha_pi0_rl", [("agent.pi0.trainable", "expert"), ("transport.snapshot_dtype", "bfloat16")]),
    ],
)
def test_all_but_activations_is_exact(name, settings):
    config = load(name, settings)
    spec = spec_of(config)
    agent = make_agent(config, spec)
    state, base = jax.eval_shape(lambda key: (agent.init(key), agent.with_base.random(key)), jax.random.key(0))
    published = jax.eval_shape(agent.published, state, base)
    found = learner_memory(config, spec)
    device = found.device
    assert device.state == nbytes(state.replace(rng=())) + 8  # a key is two numbers
    assert (device.parameters, device.optimiser) == (nbytes(state.policy), nbytes(state.policy_opt))
    assert (device.average, device.base) == (nbytes(state.policy_average), nbytes(base))
    assert device.gradients == max(nbytes(state.policy), nbytes(state.critic))
    assert device.copy == nbytes(published)
    assert found.snapshot == pytest.approx(nbytes(published) / (2 if settings else 1), abs=1)  # a flag is no float
    assert found.checkpoint == device.state + nbytes(base)


def test_a_batchs_shapes_are_the_replays():
    reading = [("agent.language.tokenizer", "bytes"), ("robot.task", "place it"), ("agent.image_keys", "top")]
    config = load("fake_aloha_images", reading)
    spec = spec_of(config)
    replay = Replay(spec, config, fit_preprocess(config, spec, []), bc_on="all")
    replay.add_demo(noise_episode("a", spec, 30, np.random.default_rng(0), image_every=1))
    agent = make_agent(config, spec)

    def plain(batch):
        return jax.tree.map(lambda x: (x.shape, str(x.dtype)), batch)

    for frames, later in ((None, True), (False, True), (True, False)):
        sampled = replay.sample(np.random.default_rng(0), 4, frames=frames, next_observations=later)
        shapes = batch_shapes(config, agent, 4, BatchSpec(frames=frames, next_observations=later))
        assert plain(sampled) == plain(shapes)


@pytest.mark.parametrize(
    ("gigabytes", "devices", "said"),
    [  # a learner of 72, of which 32 are activations, surely 24
        (None, 1, ""),
        (64, 1, ""),
        (63, 1, "Set learner.accumulate=2 (52 GiB) or agent.pi0.trainable=expert (39 GiB)"),
        (63, 8, "accumulate=2 (52 GiB) or learner.fsdp_devices=2 (48 GiB) or agent.pi0.trainable=expert (39 GiB)"),
        (41, 1, "Set learner.accumulate=32 (38 GiB)"),  # the expert has 42 with whole batches
        (41, 8, "Set learner.fsdp_devices=8 (34 GiB)"),
        (9, 1, "Give a device with more, or lower learner.batch_size"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_nearest_that_does(gigabytes, devices, said, monkeypatch):
    def estimated(config, spec, devices=1):
        sizes = dict.fromkeys(memory.DeviceMemory._fields, 0)
        whole = {"full": 40, "expert": 10}[config.agent.pi0.trainable] * 10**9
        sizes["parameters"] = whole // config.learner.fsdp_devices
        sizes["activations"] = 32 * 10**9 // config.learner.accumulate
        return memory.LearnerMemory(memory.DeviceMemory(**sizes), 0, 0, 0)

    monkeypatch.setattr(memory, "learner_memory", estimated)
    config = load("fake_aloha_pi0", [])
    limit = gigabytes and gigabytes * 10**9
    with pytest.raises(ConfigError, match=re.escape(said)) if said else contextlib.nullcontext():
        memory.check_fits(config, spec_of(config), estimated(config, None), limit, devices)


def test_the_limit_is_the_devices_or_what_the_host_has_beside_the_replay(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 100)
    assert memory.memory_limit(replay=30) == 70
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 60, "bytes_in_use": 1})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert memory.memory_limit(replay=30) == 60


# -- estimates against compiled programs, and against what a GPU measured -----------------------------------------

SIZES = {  # million parameters -> a model, and the windows of a batch
    0.5: (PI0_PRESETS["tiny"], 32),
    27: (
        replace(
            PI0_PRESETS["tiny"], depth=6, head_dim=64, vocabulary=8192, image_size=(112, 112),
            siglip=SiglipConfig(width=256, depth=6, mlp=1024, heads=4, patch=14),
            vlm=VlmConfig(width=384, mlp=1536), expert=ExpertConfig(width=256, mlp=1024),
        ), 16,
    ),
    309: (
        replace(
            PI0_PRESETS["tiny"], depth=12, heads=8, head_dim=128, vocabulary=32768, image_size=(224, 224),
            siglip=SiglipConfig(width=512, depth=12, mlp=2048, heads=8, patch=14),
            vlm=VlmConfig(width=1024, mlp=4096), expert=ExpertConfig(width=512, mlp=2048),
        ), 8,
    ),
}  # fmt: skip


def measured(model, batch):
    """The experiment of benchmarks/pi0_device.py, which draws one batch at a time and does not pretrain."""
    config = pi0_device.config_of(model, batch)
    learner = replace(config.learner, pretrain_steps=0)
    return replace(config, learner=learner, replay=replace(config.replay, prefetch=0))


def assert_near_plan(config):
    """Compare the memory of an experiment that makes one update a call with the plan of its compiled program."""
    spec = spec_of(config)
    agent, device = make_agent(config, spec), learner_memory(config, spec).device
    state, base = jax.eval_shape(lambda key: (agent.init(key), agent.with_base.random(key)), jax.random.key(0))
    batches = {}
    for name, wanted in agent.wants().items():
        shapes = batch_shapes(config, agent, wanted.size or config.learner.batch_size, wanted)
        batches[name] = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), shapes)
    planned = compiled(agent._update, updates=True).lower(state, base, batches).compile().memory_analysis()
    assert planned.argument_size_in_bytes == device.state + device.base + device.batches
    assert device.gradients + device.activations == pytest.approx(planned.temp_size_in_bytes, rel=0.25)


@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("millions", SIZES)
@pytest.mark.parametrize("trainable", ["full", "expert", "lora", "lora_expert"])
def test_estimates_are_near_what_the_compiler_plans(millions, trainable):
    """Within 25 % on a CPU, in float32; all that an update gets exactly."""
    model, batch = SIZES[millions]
    ranks = {"attention_rank": 8, "mlp_rank": 8}
    model = replace(model, vlm=replace(model.vlm, **ranks), expert=replace(model.expert, **ranks), trainable=trainable)
    assert_near_plan(measured(model, batch))


@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("trainable", ["expert", "none"])
def test_estimates_with_a_critic_are_near_what_the_compiler_plans(trainable):
    """As above, of an update of the critic and pi0."""
    assert_near_plan(load("fake_aloha_pi0_rl", [("agent.pi0.trainable", trainable), ("replay.prefetch", "0")]))


@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("case", ["lora_expert", "expert", "lora", "full"])
def test_estimates_are_near_what_a_gpu_measured(case):
    """Within 15 %: those of `lora_expert` and `expert` are of drawing the base, the others of an update."""
    figures = json.loads((ROOT / "docs" / "figures" / "h200" / "pi0_device.json").read_text())
    config = measured(pi0_device.CASES[case], figures["batch"])
    assert learner_memory(config, spec_of(config)).device.peak / 1e9 == pytest.approx(
        figures[case]["peak_gb"], rel=0.15
    )
