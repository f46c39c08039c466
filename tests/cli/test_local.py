"""The link inside one process, and agents beyond the demo's that train in it."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from errors import naming

from serl_chunk.actor.service import ActorService
from serl_chunk.cli import local
from serl_chunk.cli.local import SESSION, LocalLink, train_local
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.schedule import Phase
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.checkpoints import host_leaves
from serl_chunk.runs.folder import open_run
from serl_chunk.types import Amend, Begin, ConfigError, End, Outcome, Snapshot, Source, Step, StepBlock


class Recorder:
    def __init__(self) -> None:
        self.records: list = []
        self.router = self
        self.trainer = SimpleNamespace(done=False)

    def insert(self, session: str, record) -> None:
        assert session == SESSION
        self.records.append(record)


@pytest.fixture
def link() -> LocalLink:
    link = LocalLink()
    link.learner = Recorder()  # type: ignore[assignment]
    return link


def step(tick: int) -> Step:
    return Step(
        tick, {"state": np.full(2, tick, np.float32)}, np.zeros(1, np.float32), 0.0, Source.POLICY, tick, 0, 0.0
    )


def test_steps_are_handed_on_in_blocks_and_before_the_end(link):
    link.begin(Begin("e"))
    for tick in range(3):
        link.step(step(tick))
    link.hand_on()
    link.hand_on()  # nothing new: no empty block
    link.step(step(3))
    link.end(End("e", 4, None, True, False, Outcome.SUCCESS))
    link.amend(Amend("e", discard=True))
    assert [type(r) for r in link.learner.records] == [Begin, StepBlock, StepBlock, End, Amend]
    blocks = link.learner.records[1:3]
    assert [(b.first_tick, b.n) for b in blocks] == [(0, 3), (3, 1)]
    assert link.steps_recorded == 4


def test_the_newest_snapshot_and_the_end_of_training(link):
    assert link.latest() is None
    for version in (1, 2):
        link.publish(Snapshot(version, {}), {})
    assert link.latest() == Snapshot(2, {})
    assert link.finished is None
    link.learner.trainer.done = True
    assert link.finished == "training is complete"
    assert (link.allowance, link.can_begin(), link.flush(0)) == (None, (True, ""), True)


@pytest.mark.parametrize(
    ("setting", "named"),
    [(("actor.clock", "realtime"), ("--config.actor.clock", "lockstep")), (("learner.utd_ratio", "none"), ())],
)
def test_what_needs_two_processes_is_refused_before_anything_is_written(tmp_path, setting, named):
    with pytest.raises(ConfigError, match=naming("--local", "--learner", "--actor", *named)):
        train_local(load("fake_aloha", [setting]), RunOptions([], str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_stop_before_the_start_ends_cleanly_and_a_resumed_run_goes_on_counting(tmp_path, monkeypatch, capsys):
    overrides = [("learner.pretrain_steps", "0"), ("actor.intervention", "none")]
    config = dataclasses.replace(load("fake_aloha", overrides), agent=BcConfig(flow=FlowConfig(hidden=(8,))))
    stop, build, act, handed_over = threading.Event(), local.make_learner, ActorService.run, []
    stop.set()

    def resumed(*args, **kwargs):
        learner = build(*args, **kwargs)
        learner.human_ticks, learner.episodes = 27, 3
        return learner

    def run(self, preprocess, begun):
        handed_over.append((begun.human_ticks, begun.episodes, begun.env_steps))
        return act(self, preprocess, begun)

    monkeypatch.setattr(local, "make_learner", resumed)
    monkeypatch.setattr(ActorService, "run", run)
    learner, summary = train_local(config, RunOptions([], str(tmp_path / "run")), stop=stop)
    assert handed_over == [(27, 3, 0)]
    assert (learner.updates, summary.reason) == (0, "stopped by the operator")
    assert learner.trainer.phase is Phase.PRETRAIN
    open_run(config, spec_of(config), str(tmp_path / "run")).lock.close()  # no process holds it any more
    capsys.readouterr()


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
