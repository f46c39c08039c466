"""What an experiment sends, beside what a link carries."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from ports import free_port

from serl_chunk.cli.doctor.checks import Bandwidth, check_bandwidth, check_snapshots, expected
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.types import Begin, End, Outcome, Source, Step
from serl_chunk_robot.wire.codec import Limits, size_of

HERE = "127.0.0.1"


def camera_config(**transport: Any) -> ExperimentConfig:
    config = load_experiment("fake_aloha")
    cameras = tuple(c.name for c in spec_of(config).cameras)
    return dataclasses.replace(
        config,
        agent=dataclasses.replace(config.agent, image_keys=cameras),
        transport=dataclasses.replace(config.transport, **transport),
    )


@pytest.mark.parametrize("images", [False, True])
def test_the_expected_bandwidth_is_what_an_actor_sends(tmp_path, images):
    """One second of an actor, recorded live, against the figure."""
    config = camera_config() if images else load_experiment("fake_aloha")
    spec, every = spec_of(config), config.chunk.executed
    ticks = round(spec.control_hz)
    spool = Spool(tmp_path / "spool", Limits(1 << 30, 64))
    link = LearnerLink(
        config.transport, host=HERE, port=free_port(), actor_id="a", contract={}, spools=lambda run: spool
    )
    out = link._out
    out.attach("run")
    try:
        link.begin(Begin("actor-01234567-000000"))
        for tick in range(ticks):
            observation = {"state": np.zeros(spec.state_dim, np.float32)}
            decision = None
            if tick % every == 0:
                decision = {"chunk": np.zeros((config.chunk.horizon, spec.action_dim), np.float32)}
                decision |= dict.fromkeys(("q", "q_std"), np.zeros((), np.float32))
                decision |= {"values": np.zeros(config.agent.candidates)}
                for c in map(spec.camera, config.agent.image_keys):
                    observation[f"images/{c.name}"] = np.zeros((c.height, c.width, 3), np.uint8)
            action = np.zeros(spec.action_dim, np.float32)
            link.step(Step(tick, observation, action, 0.0, Source.POLICY, tick, 1, 0.0, decision))
            out.pack()
        link.end(End("actor-01234567-000000", ticks, None, False, True, Outcome.UNKNOWN))
        sent, seq = 0, 0
        while (kept := spool.at(seq)) is not None:
            sent, seq = sent + size_of(kept.frames), kept.item.end
        assert sent == pytest.approx(expected(config, spec).mean, rel=0.03)
    finally:
        link.close()
    if images:
        need = expected(config, spec)
        assert need.images > 0.9
        assert need.human > 4 * need.mean  # frames on every tick instead of every fifth
        jpeg = expected(camera_config(jpeg_quality=90), spec)
        assert 0.05 < jpeg.mean / need.mean < 0.2


def test_frames_on_every_tick_are_expected_where_they_are_recorded():
    config = camera_config()
    often = dataclasses.replace(config, actor=dataclasses.replace(config.actor, frames="every_tick"))
    spec = spec_of(config)
    sparse, need = expected(config, spec), expected(often, spec)
    assert need.mean > 4.5 * sparse.mean  # on every tick instead of every fifth
    assert need.mean == pytest.approx(sparse.human, rel=0.01)
    assert need.human == need.mean
    check = check_bandwidth(need, 0.5 * need.mean, often)
    assert "frames on every tick (actor.frames)" in check.said
    assert "while a human acts" not in check.said
    assert "actor.frames=decisions" in check.remedy
    assert "actor.frames" not in check_bandwidth(sparse, 0.5 * sparse.mean, config).remedy


NEED = Bandwidth(mean=10e6, human=40e6, images=0.9, episode_seconds=10.0)


@pytest.mark.parametrize(
    ("measured", "status", "words"),
    [
        (50e6, "ok", "records 10.0 MB/s (40.0 MB/s while a human acts); measured 50.0 MB/s"),
        (20e6, "warning", "is sent between episodes"),
        (5e6, "warning", "an episode of 10.0 s needs 10.0 s more to arrive"),
        (2e6, "FAIL", "would mostly wait"),
    ],
)
def test_a_link_against_its_experiment(measured, status, words):
    check = check_bandwidth(NEED, measured, camera_config())
    assert (check.status, words in check.said) == (status, True)
    assert ("jpeg_quality=90" in check.remedy) == (status != "ok")
    assert "jpeg_quality" not in check_bandwidth(NEED, measured, camera_config(jpeg_quality=80)).remedy
    assert "jpeg_quality" not in check_bandwidth(NEED._replace(images=0.0), measured, camera_config()).remedy


def test_snapshots_against_a_link():
    config = load_experiment("fake_aloha")
    assert check_snapshots(-1, 0, 1e6, config).status == "ok"
    check = check_snapshots(4, 10 << 20, 100e6, config)
    assert (check.status, check.said) == ("ok", "version 4 has 10 MiB, 105 ms if the way back is as fast")
    assert check_snapshots(4, 10 << 20, 1e6, config).status == "warning"
