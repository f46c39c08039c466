"""Agents beyond the demo's, from demonstrations through learner, replay and actor, in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from serl_chunk.cli.local import train_local
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.schedule import Phase
from serl_chunk.runs.checkpoints import host_leaves

TINY = (
    "learner.max_steps=40", "learner.pretrain_steps=20", "learner.warmup_episodes=2",
    "learner.batch_size=8", "learner.steps_per_update=10", "learner.checkpoint_period=0", "learner.log_period=10",
    "agent.flow.hidden=16",
)  # fmt: skip
CRITIC = ("agent.critic.hidden=16", "agent.candidates=4")
IMAGES = ("robot.image_size=24", "replay.image_capacity=2000", "agent.encoder.features=4,4", "agent.encoder.latent=8")
ALONE = (*IMAGES, "actor.intervention=none")  # a human's windows have frames on every tick
CASES = {
    "grasp critic": ("fake_aloha_discrete_gripper", None, CRITIC),
    "HG-DAgger, images": ("fake_aloha_images", "hg-dagger", IMAGES),
    "images, a delay": ("fake_aloha_images", None, (*CRITIC, *ALONE, "actor.delay_ticks=2")),
    "images, long returns": ("fake_aloha_images", None, (*CRITIC, *ALONE, "chunk.return_steps=8")),
    "decoupled, adaptive": (
        "fake_aloha",
        "decoupled",
        (*CRITIC, "chunk.critic_horizon=10", "agent.prefix_lengths=5",
         "agent.replan_spread=0.001", "actor.adaptive_execution=True"),
    ),
    "trained delay": (
        "fake_aloha",
        None,
        (*CRITIC, "actor.delay_ticks=2", "agent.flow.train_delay=sampled"),
    ),
}  # fmt: skip


@pytest.mark.slow  # compiles whole agents
@pytest.mark.parametrize("case", CASES)
def test_it_trains_on_what_it_did_itself(tmp_path: Path, case: str) -> None:
    name, preset, settings = CASES[case]
    texts = [tuple(s.split("=", 1)) for s in (*TINY, *settings)]
    config = configured(load_experiment(name), texts, preset=preset)
    cameras = config.agent.image_keys
    run_record(load(name, [t for t in texts if t[0].startswith("robot")]), 2, str(tmp_path / "demos"),
               policy="scripted", noise=None, cameras=cameras)  # fmt: skip
    learner, actor = train_local(config, RunOptions([str(tmp_path / "demos")], str(tmp_path / "run")))
    assert (learner.trainer.phase, learner.updates) == (Phase.DONE, 40)
    # Of an image agent those that begin at decisions, three to five ticks apart.
    assert learner.replay.ready.online > 0.1 * learner.env_steps
    assert all(np.isfinite(leaf).all() for leaf in host_leaves(learner.state).values() if leaf.dtype.kind == "f")
    assert actor.steps == learner.env_steps
