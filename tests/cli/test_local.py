"""The link inside one process, and agents beyond the demo's that train in it."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from errors import naming

from serl_chunk.actor import service
from serl_chunk.actor.service import ActorService
from serl_chunk.cli import local
from serl_chunk.cli.learner import train_offline
from serl_chunk.cli.local import SESSION, LocalLink, train_local
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats import ogbench
from serl_chunk.data.source import ReadOptions
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.offline_data import DemoOptions, read_demos
from serl_chunk.learner.schedule import Phase
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.checkpoints import host_leaves
from serl_chunk.runs.folder import open_run
from serl_chunk.types import Amend, Begin, ConfigError, DataError, End, Outcome, Source, Step, StepBlock


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
    assert ([(b.first_tick, b.n) for b in blocks], link.steps_recorded) == ([(0, 3), (3, 1)], 4)


@pytest.mark.parametrize(("setting", "named"), [
    (("actor.clock", "realtime"), ("--config.actor.clock", "lockstep")), (("learner.utd_ratio", "none"), ()),
])  # fmt: skip
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
    assert (handed_over, learner.updates, summary.reason) == ([(27, 3, 0)], 0, "stopped by the operator")
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
        (*CRITIC, "actor.delay_ticks=2", "agent.train_delay=sampled"),
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


OGBENCH = load("ogbench", [])
FAKE = load("fake_aloha", [("learner.offline_steps", "1"), ("normaliser.actions", "absolute_range")])
SPEC = spec_of(FAKE)


def write(path: Path, *, labels: bool = True, value: float = 0.0) -> Path:
    """A trajectory of eight rows in the robot's dimensions, solved in the last two; without qpos."""
    arrays = {
        "observations": np.full((8, SPEC.state_dim), value, np.float32) + np.arange(8, dtype=np.float32)[:, None],
        "actions": np.zeros((8, SPEC.action_dim), np.float32),
        "terminals": np.arange(8) == 7,
    }
    if labels:
        arrays["rewards"] = np.where(np.arange(8) >= 6, 0.0, -1.0).astype(np.float32)
    np.savez(path, **arrays)
    return path


def test_a_relabelled_file_keeps_its_labels_unless_a_task_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "cube.npz")
    demo_options = DemoOptions().of_robot(OGBENCH.robot)
    demos = read_demos(OGBENCH, SPEC, [str(path)], demo_options)
    assert [(e.steps.n, e.end.outcome) for e in demos.episodes] == [(6, Outcome.SUCCESS), (1, Outcome.SUCCESS)]
    assert any("by the file's own labels (it has no qpos to judge cube-single" in line for line in caplog.messages)
    asked: list[str] = []

    def judge(where: str, task: str, *rest: object) -> None:
        asked.append(task)
        raise DataError("asked")

    monkeypatch.setattr(ogbench, "relabel_for_task", judge)
    by_flag = DemoOptions(ReadOptions(env="other-task")).of_robot(OGBENCH.robot)
    for options, file in ((by_flag.options, path), (demo_options.options, write(tmp_path / "bare.npz", labels=False))):
        with pytest.raises(DataError, match="asked"):
            load_demos([file], SPEC, cameras=(), options=options)
    assert asked == ["other-task", demo_options.options.env]


def test_a_task_whose_rewards_nothing_can_be_given_is_refused(tmp_path: Path) -> None:
    """Else the user believes that the rewards are the task's, and they are the files' own."""
    run_record(FAKE, 1, str(tmp_path / "demos"), policy="scripted", noise=None, cameras=())
    asked = DemoOptions(ReadOptions(env="cube-single-play-singletask-task1-v0"))
    with pytest.raises(ConfigError, match=naming("--demo_env", "cube-single-play-singletask-task1-v0", "episodes")):
        read_demos(FAKE, SPEC, [str(tmp_path / "demos")], asked)
    with_shards = asked._replace(dataset=str(tmp_path))  # it may be meant for them
    assert len(read_demos(FAKE, SPEC, [str(tmp_path / "demos")], with_shards).episodes) == 1
    of_robot = DemoOptions().of_robot(OGBENCH.robot)  # not asked for
    assert len(read_demos(FAKE, SPEC, [str(tmp_path / "demos")], of_robot).episodes) == 1


@pytest.mark.parametrize("train", [train_local, train_offline], ids=["local", "offline"])
def test_a_refused_start_leaves_no_run_and_no_open_robot_behind(
    tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing to pretrain on, a mistyped path, data that cannot be read; a folder with a run in it stays."""
    opened, closed, make = [], [], service.make_env

    def open_env(*args: Any, **more: Any) -> Any:
        opened.append(env := make(*args, **more))
        monkeypatch.setattr(env, "close", lambda: closed.append(env))
        return env

    monkeypatch.setattr(service, "make_env", open_env)
    bad, absent = str(tmp_path / "bad.npz"), str(tmp_path / "absent")
    Path(bad).write_bytes(b"nothing")
    pretrained = dataclasses.replace(FAKE, learner=dataclasses.replace(FAKE.learner, pretrain_steps=1))
    for config, paths, dataset, said in ((pretrained, [], None, "demo_path"), (FAKE, [bad], None, "bad.npz"),
                                         (FAKE, [absent], None, absent), (FAKE, [], absent, absent)):  # fmt: skip
        with pytest.raises((ConfigError, DataError), match=naming(said)):
            train(config, RunOptions(paths, str(tmp_path / "run"), demo_options=DemoOptions(dataset=dataset)))
        assert not (tmp_path / "run").exists()
    old = open_run(FAKE, SPEC, str(tmp_path / "old"))
    with old.locked():
        old.write_config()
    with pytest.raises((ConfigError, DataError), match=naming("bad.npz")):
        train(FAKE, RunOptions([bad], str(tmp_path / "old")))
    assert (tmp_path / "old" / "config.json").exists()
    assert (closed, bool(opened)) == (opened, train is train_local)
