"""Chunks against recorded actions: what is named of a policy, and where that is shown."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from serl_chunk.cli import check_policy as command
from serl_chunk.cli import serve
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.data.demos import load_demos
from serl_chunk.evaluation import open_loop
from serl_chunk.evaluation.open_loop import Played, compare, demonstrations_of
from serl_chunk.main import main
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.episodes import DEMOS, note_of
from serl_chunk.runs.folder import open_run, write_json
from serl_chunk.types import STATE, RobotSpec

H = 5
CONFIG = load("fake_aloha", [("agent.flow.hidden", "24"), ("chunk.horizon", str(H)), ("agent.candidates", "3")])
SPEC = spec_of(CONFIG)
LEFT, RIGHT = SPEC.grippers


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with its demonstrations, and nothing trained."""
    folder = tmp_path_factory.mktemp("check")
    assert run_record(CONFIG, 3, str(folder / "demos"), policy="scripted", noise=None, cameras=()) == 0
    demos = load_demos([folder / "demos"], SPEC)
    opened = open_run(CONFIG, SPEC, str(folder / "run"))
    with opened.locked():
        opened.write_config()
    write_json(opened.path / DEMOS, note_of(demos, None))
    return opened.path


class Replayed:
    """A policy that gives what was recorded after the observation, as `plant` changes it."""

    image_keys, version = (), 0
    agent = SimpleNamespace(has_critic=False)

    def __init__(self, episodes, plant):
        self.plant, self.known, self.batches = plant, {}, set()
        for e in episodes:
            padded = np.concatenate([e.steps.action, np.repeat(e.steps.action[-1:], H, 0)])
            self.known |= {s.tobytes(): padded[t : t + H] for t, s in enumerate(e.steps.observation[STATE])}

    def prepare(self, request):
        assert request.task == CONFIG.robot.task
        return request.observation[STATE]

    def decide_each(self, rows, explore):
        self.batches.add(len(rows))
        noise = np.random.default_rng(0)
        chunks = [self.known[row.tobytes()] + noise.normal(0, 0.002, (H, SPEC.action_dim)) for row in rows]
        low, high = SPEC.action_low, SPEC.action_high
        return [
            SimpleNamespace(actions=np.clip(self.plant(c.copy(), s), low, high))
            for c, s in zip(chunks, rows, strict=True)
        ]


def changed(d, value):
    def plant(chunk, state):
        chunk[:, d] = value
        return chunk

    return plant


def still(chunk, state):
    chunk[:, :6], chunk[:, 7:13] = state[:6], state[7:13]
    return chunk


def inverted(chunk, state):
    chunk[:, SPEC.grippers] = 1 - chunk[:, SPEC.grippers]
    return chunk


def chattering(chunk, state):
    chunk[:, RIGHT] = np.arange(H) % 2
    return chunk


ONE_LINE = ("passed", "3 training demonstrations", "gripper events (recorded: 9)", "0 stalled")
PLANTED = {
    "healthy": (lambda chunk, state: chunk, [ONE_LINE]),
    "a gripper that never closes": (changed(RIGHT, 1.0), [("action 13 (arm 1, gripper)", "never close")]),
    "one that never opens": (changed(LEFT, 0.0), [(f"action {LEFT} (arm 0, gripper)", "goes to about 1 in 0 of its")]),
    "both in between": (changed([LEFT, RIGHT], 0.5), [(f"action {g} ", "never close or open") for g in SPEC.grippers]),
    "the wrong way round": (inverted, [(f"action {g} ", "or the wrong way round") for g in SPEC.grippers]),
    "a gripper that chatters": (chattering, [("other times",), ("opens and closes", "drop what")]),
    "arms that stand still": (still, [("stands still in", "learner.pretrain_steps")]),
    "a joint at its limit": (changed(1, 9.0), [("at a limit", "action 1 (arm 0) on 100%", "normaliser.actions")]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_what_a_robot_would_suffer_is_named(run, name):
    plant, expected = PLANTED[name]
    episodes = [*demonstrations_of(run, CONFIG)]
    policy = Replayed(episodes, plant)
    check = open_loop.check_policy(policy, CONFIG, SPEC, episodes, checkpoint=0, batch=4)
    lines = check.lines()
    assert [[part for part in parts if part not in line] for parts, line in zip(expected, lines, strict=True)] == [
        [] for _ in expected
    ]
    assert bool(check.findings) == (name != "healthy")
    assert policy.batches == {4}  # a number that is compiled
    assert json.loads(json.dumps(check.to_json()))["chunks"] == check.chunks


PUSHES = RobotSpec("pushes", 10.0, 2, (-1.0,) * 3, (1.0,) * 3, (-1,) * 3, (2,), (), 100)


def pushed(*, gripper=lambda value: value, arm=lambda value: value, **more):
    """Velocities of two dimensions, and a gripper that is pushed shut and open for one tick each; 0 leaves it."""
    recorded = np.zeros((4, 60, 3), np.float32)
    recorded[:, :, :2] = 0.5 * np.sin(np.arange(60) / 4)[:, None]
    recorded[:, 22, 2], recorded[:, 47, 2] = -1.0, 1.0
    predicted = np.stack([arm(recorded[..., 0]), arm(recorded[..., 1]), gripper(recorded[..., 2])], -1)
    played = [Played(r, p, np.zeros_like(r)) for r, p in zip(recorded, predicted, strict=True)]
    return compare(played, PUSHES, H, **more)


@pytest.mark.parametrize(("changes", "named"), [
    ({}, []),
    ({"gripper": lambda v: np.zeros_like(v)}, ["goes to about -1 and 1 in 0 and 0 of"]),
    ({"gripper": lambda v: np.roll(v, 2, -1)}, []),  # a little later
    ({"gripper": lambda v: np.minimum(v, 0)}, ["goes to about 1 in 0 of"]),
    ({"arm": lambda v: np.zeros_like(v)}, ["stands still", "no nearer"]),
    ({"arm": lambda v: 2.0 * np.sign(v)}, ["no nearer", "at a limit"]),
    ({"arm": lambda v: 2.0 * np.sign(v), "imitates": False}, []),  # what was learnt by reward may be faster
])  # fmt: skip
def test_pushes_and_velocities(changes, named):
    check = pushed(**{"arm": lambda v: v, **changes})
    assert [text for text, found in zip(named, check.findings, strict=True) if text not in found] == []


def test_a_number_that_demonstrations_use_like_a_gripper_is_one_where_no_specification_says_so():
    unnamed = dataclasses.replace(PUSHES, grippers=())
    recorded = np.stack([np.sin(np.arange(60) / 4), np.cos(np.arange(60) / 4), np.arange(60) % 30 < 12], -1)
    for predicted, named in ((recorded, 0), (recorded * (1, 1, 0), 1)):
        check = compare([Played(recorded, predicted, 0 * recorded)] * 3, unnamed, H)
        assert ["action 2 goes to about 1 in 0 of its chunks" in text for text in check.findings] == [True] * named
        assert all("never go there, which demonstrations use as a gripper" in text for text in check.findings)


def test_an_end_that_few_demonstrations_reach_and_a_gripper_that_none_moves_are_not_part_of_the_task():
    check = pushed()
    [gripper] = check.grippers
    assert (gripper.recorded, gripper.recorded_events, gripper.ends) == ((4, 4), 4, (-1.0, 1.0))
    still = np.zeros((40, 3), np.float32)
    odd = still.copy()
    odd[7, 2] = 1.0
    for first, ends in ((still, None), (odd, (0.0, 1.0))):
        check = compare([Played(first, still, still), *[Played(still, still, still)] * 3], PUSHES, H)
        assert ([g.ends for g in check.grippers], check.findings) == ([] if ends is None else [ends], ())


def test_the_command_reads_the_runs_settings_writes_the_check_and_its_status_is_for_scripts(run, monkeypatch, capsys):
    seen = []

    def checked(where, config, spec, episodes, *, step, held_out):
        seen.append((where, config, len([*episodes]), step, held_out))
        return dataclasses.replace(pushed(**changes), held_out=held_out)

    monkeypatch.setattr(command, "check_run", checked)
    changes = {}
    assert main(["check-policy", str(run)]) == 0
    changes = {"gripper": lambda value: np.zeros_like(value)}
    assert main(["check-policy", str(run), "--step", "best", "--demo_path", str(run.parent / "demos")]) == 1
    assert [(where, config, *rest) for where, config, *rest in seen] == [
        (run, CONFIG, 3, "latest", False), (run, CONFIG, 3, "best", False)
    ]  # fmt: skip
    assert "never close" in capsys.readouterr().out
    assert json.loads((run / "policy_checks" / "0.json").read_text())["findings"]
    noted = json.loads((run / DEMOS).read_text())
    write_json(run / DEMOS, noted | {"episodes": noted["episodes"][:1]})
    assert main(["check-policy", str(run), "--demo_path", str(run.parent / "demos")]) == 1
    assert seen[-1][2:] == (2, "latest", True)  # those that it was not trained on
    write_json(run / DEMOS, noted)


def test_a_server_names_it_at_its_start_and_says_so_where_there_are_no_demonstrations(run, tmp_path, caplog):
    policy = Replayed(demonstrations_of(run, CONFIG), changed(RIGHT, 1.0))
    for folder in (run, tmp_path):
        serve._check(CONFIG, SPEC, policy, folder, 8)
    named, unchecked = caplog.records
    assert (named.levelname, unchecked.levelname) == ("WARNING", "INFO")
    assert "never close" in named.message
    assert "no demonstrations of its own" in unchecked.message
