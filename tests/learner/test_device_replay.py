"""Windows gathered on the device are those of the replay, and several calls of updates are as many single ones."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from coded_episodes import config, feed, make
from coded_replay import build
from errors import naming
from learner_tools import by_kind, journal_of, learner_of, let_go, until
from learner_tools import feed as hand_over
from point_robot import experiment

from serl_chunk.agents.base import Agent
from serl_chunk.agents.spec import BatchSpec
from serl_chunk.learner import device_replay
from serl_chunk.learner.device_replay import DeviceReplay
from serl_chunk.learner.schedule import Phase
from serl_chunk.replay.replay import Request
from serl_chunk.runs.checkpoints import host_leaves
from serl_chunk.types import Amend, ConfigError, Outcome

RNG = np.random.default_rng
REQUESTS = Request("critic", 2, 64), Request("policy", 1, 32, next_observations=False)


def mirrored(replay, cfg, rng):
    """A device's replay, and what its updates would have of a call."""
    gatherer = SimpleNamespace(
        wants=lambda: {r.name: BatchSpec(next_observations=r.next_observations) for r in REQUESTS},
        updates_of=lambda gather: gather,
    )
    device = DeviceReplay(replay, gatherer, cfg, replay._preprocess, rng, threaded=False)
    gather = jax.jit(device._gathered)

    def sample():
        drawn = device.draw(1, REQUESTS, None)
        batches, counts = gather(device._mirror, jax.tree.map(lambda x: x[0], drawn))
        replay.count_outside(counts["replay/outside"])
        return batches

    return sample


@pytest.mark.parametrize("moves", [0.0, 0.5])
def test_windows_are_the_replays_bit_for_bit_through_evictions_corrections_and_returns(moves):
    cfg = config(capacity=500, human_capacity=300)
    cfg = dataclasses.replace(cfg, agent=dataclasses.replace(cfg.agent, bc_joint_noise=moves))
    rng, replay = RNG(3), build(cfg)
    episodes = [make(rng, i, session=f"s{i % 3}", gaps=True, shared=i > 40) for i in range(80)]
    own, others = RNG(5), RNG(5)
    sample = mirrored(replay, cfg, own)
    for turn, part in enumerate(np.split(np.array(episodes, object), 8)):
        feed(replay, list(part), rng)
        if turn % 2:
            session, episode_id = replay.episodes()[1]
            replay.insert(session, Amend(episode_id, Outcome.SUCCESS, "operator", True, 16.0))
            replay.insert(session, Amend(replay.episodes()[0][1], discard=True))
        elif turn:  # within an episode an actor falls silent, and comes back
            begin, steps, end = make(rng, 900 + turn, session="s9").episode()
            replay.insert("s9", begin)
            replay.insert("s9", steps)
            replay.close_session("s9")
            compare(replay, sample, others)
            replay.insert("s9", end)
        compare(replay, sample, others)
    assert own.bit_generator.state == others.bit_generator.state
    assert replay.stats()["replay/evicted_episodes"] > 10


def compare(replay, sample, rng):
    for name, batch in sample().items():
        of = next(r for r in REQUESTS if r.name == name)
        host = replay.sample(rng, of.size, of.updates, next_observations=of.next_observations)
        for field, ours, theirs in zip(batch._fields, batch, host, strict=True):
            assert jax.tree.structure(ours) == jax.tree.structure(theirs), field
            for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype), field
                if "shift" not in field:  # drawn on the device, of a seed
                    np.testing.assert_array_equal(a, b, err_msg=field)
                elif b.any():
                    assert 0.5 < np.std(a) / np.std(b) < 2


def on_device(**learner):
    config = experiment(pretrain_steps=0, warmup_episodes=0, **learner)
    return dataclasses.replace(config, replay=dataclasses.replace(config.replay, on_device="on"))


def trained(config, demos, run):
    """Train on what comes in 1, 2, .. steps at a time; returns the learner and, of each dispatch, its calls."""
    learner = learner_of(config, demos, run, lambda snapshot, info: published.append(info["step"]))
    published, calls, rows = [], [], journal_of(config, demos, 400)
    until(learner, Phase.WARMUP)
    for row in rows:
        hand_over(learner, [row])
        while learner.trainer.phase is not Phase.DONE:
            before = learner.updates
            if not learner.work():
                break
            if learner.updates > before:
                calls.append(learner.updates - before)
        if learner.trainer.phase is Phase.DONE:
            break
    let_go(learner)
    return learner, calls, published


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_several_calls_keep_every_period_and_the_result(demos, tmp_path, monkeypatch):
    config = on_device(max_steps=110, steps_per_update=13, checkpoint_period=40, log_period=11)
    programs, compiled = {}, Agent.updates_of  # learners of one configuration may share them
    monkeypatch.setattr(Agent, "updates_of", lambda self, of: programs.setdefault(self, compiled(self, of)))
    several = trained(config, demos, tmp_path / "several")
    monkeypatch.setattr(device_replay, "CALLS", ())
    single = trained(config, demos, tmp_path / "single")
    assert set(single[1]) == {1}
    assert set(several[1]) == {1, 4, 8}
    assert single[2] == several[2]  # publications
    assert len(several[0].trainer._device._programs) == 2  # one for each length
    assert single[0].checkpoints.steps() == several[0].checkpoints.steps()
    for a, b in zip(by_kind(tmp_path / "single")["train"], by_kind(tmp_path / "several")["train"], strict=True):
        assert a.keys() == b.keys()
        assert a["step"] == b["step"]
        np.testing.assert_allclose(
            [v for v in a.values() if isinstance(v, float)],
            [v for v in b.values() if isinstance(v, float)],
            rtol=1e-2,
            atol=1e-3,
        )
    one, other = host_leaves(single[0].state), host_leaves(several[0].state)
    for path in one:  # one call is compiled without its loop, and fused otherwise
        np.testing.assert_allclose(one[path], other[path], rtol=1e-3, atol=1e-4, err_msg=path)


def test_on_is_refused_where_windows_need_more_than_steps(demos, tmp_path):
    config = on_device()
    config = dataclasses.replace(
        config, replay=dataclasses.replace(config.replay, windows="qc", terminal_windows="drop")
    )
    with pytest.raises(ConfigError, match=naming("replay.on_device", "replay.windows=episode", "auto")):
        learner_of(config, demos, tmp_path / "run")


def test_a_program_that_cannot_be_compiled_leaves_fewer_calls(caplog):
    device, update = object.__new__(DeviceReplay), Mock()
    update.lower.side_effect = RuntimeError("RESOURCE_EXHAUSTED")
    device._mirror, device._update, device._programs, device._threaded = (), update, {}, False
    device._thread = ThreadPoolExecutor(1)
    for _ in range(2):
        assert device.program(8, {}, {}, ()).calls == 1
    device.close()
    assert caplog.messages == [
        f"no program of {n} calls of updates: RuntimeError: RESOURCE_EXHAUSTED" for n in device_replay.CALLS
    ]
