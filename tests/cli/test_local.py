"""The link inside one process: records in order, in blocks, and only lockstep."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from errors import naming

from serl_chunk.actor.service import ActorService
from serl_chunk.cli import local
from serl_chunk.cli.local import SESSION, LocalLink, train_local
from serl_chunk.cli.process import load
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.schedule import Phase
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.folder import open_run
from serl_chunk.types import Amend, Begin, ConfigError, End, Outcome, Snapshot, Source, Step, StepBlock


class Recorder:
    """A learner that keeps what it is given."""

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
