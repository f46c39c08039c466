"""What the benchmarks of humans and of options compute from their runs; each of their rows is an experiment."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errors import naming

from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import to_dict
from serl_chunk.config.presets import configured
from serl_chunk.types import ConfigError

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import ablations
import calibration
import cube_single
import device_latency
import human_in_the_loop
import learn_fake_aloha
from support import cli_args, learning
from support.mouse_cell import Answer, Braking, answer_of, braking_of, ways_of
from support.result_tables import Count, difference_interval
from support.results import Checkpoint, Run

pytestmark = pytest.mark.system
TICKS = 0.02 * np.arange(6)


def test_newcombes_example():
    """Newcombe 1998, table II, (a) method 10: 56/70 - 48/80."""
    assert difference_interval(Count(56, 70), Count(48, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    low, high = difference_interval(Count(10, 10), Count(0, 20))
    assert (round(low, 4), high) == (0.6791, 1.0)


def test_the_table_compares_the_seeds_that_both_have():
    found = [
        ("default", 0, 50), ("default", 1, 60), ("expectile_0.9", 0, 90), ("imitate_all", 0, 52),
        ("imitate_all", 1, 58), ("delay_2", 0, 20), ("delay_2_trained", 0, 20),
    ]  # fmt: skip
    runs = [Run(name, seed, "fake_aloha", [], [Checkpoint(0, n, 100)]) for name, seed, n in found]
    runs.append(Run("expectile_0.9", 0, "ogbench", [], [Checkpoint(0, 1, 2)]))
    lines = [line.split(" | ") for line in ablations.table(runs).splitlines()[2:]]
    table = {(task.strip("| "), option): cells for task, option, *cells in lines}
    assert table["fake_aloha", "default"][0].startswith("0.55 [")
    assert table["fake_aloha", "default"][-1] == table["cube_single", "expectile_0.9"][-1] == " |"  # nothing to compare
    assert table["fake_aloha", "expectile_0.9"][-1].startswith("+0.40 [")  # 0.9 - 0.5: seed 1 is not there yet
    assert table["fake_aloha", "imitate_all"][-1].startswith("+0.00 [")
    assert [option for (_, option), cells in table.items() if "*" in cells[-1]] == ["expectile_0.9", "delay_2"]
    assert table["fake_aloha", "delay_2"][-1].startswith("-0.30 [")
    assert table["fake_aloha", "delay_2_trained"][-1] == "+0.00 [-0.11, +0.11] beside delay_2 |"


@pytest.mark.parametrize(("task", "experiment"), ablations.EXPERIMENTS.items())
def test_every_option_is_an_experiment_of_its_own(task, experiment):
    made = {
        option: str(to_dict(ablations.configuration(experiment, settings)))
        for option, settings in ablations.OPTIONS.items()
        if not ablations.says_nothing(option, experiment, [])
    }
    assert len({*made.values()}) == len(made) > 15
    assert ("helper_errs" in made) is (task == "fake_aloha")  # where a human intervenes
    offline = {option for option in made if not ablations.says_nothing(option, experiment, [], online=False)}
    assert made.keys() - offline == ablations.ONLINE & made.keys()
    assert set(ablations.BESIDE) | set(ablations.BESIDE.values()) <= set(ablations.OPTIONS)


def test_every_method_on_cube_single_is_a_configuration_of_its_own():
    made = {
        str(to_dict(configured(load_experiment("ogbench"), [*map(cli_args.split, m.settings)], preset=m.preset)))
        for m in cube_single.EVERY.values()
    }
    assert len(made) == len(cube_single.EVERY) == len(cube_single.METHODS) + len(cube_single.SAVINGS)


def rows(run) -> list[tuple]:
    return [(c.updates, c.successes, c.starts, c.best) for c in run.checkpoints]


def test_the_best_checkpoint_is_chosen_on_validation_starts_and_marked(monkeypatch):
    """Validation of every checkpoint comes first, then the chosen and the last one on reported starts."""
    successes = {("a", 0): 1, ("a", 20): 7, ("a", 40): 5, (200, 0): 3, (400, 0): 2}

    class Trained:
        def __init__(self, name: Any, steps: list[int]) -> None:
            self.name, self.steps = name, steps

        def evaluate(self, step: int, n: int, starts: str = "reported", **more: Any) -> Checkpoint:
            found = successes[self.name, step] - (starts == "reported")
            return Checkpoint(**{"updates": step, "successes": found, "episodes": n, "starts": starts, **more})

    def train(config, run, demos):
        updates = run.name.rpartition("_")[2]
        return Trained(int(updates), [0]) if run.name.startswith("bc") else Trained("a", [0, 20, 40])

    monkeypatch.setattr(learning, "train", train)
    monkeypatch.setattr(learn_fake_aloha, "BC_NORMALISERS", ("relative",))
    monkeypatch.setattr(learn_fake_aloha, "BC_UPDATES", (200, 400))
    args = argparse.Namespace(out=Path(), episodes=10, set=["agent.lr=0.1"], overrides=[])
    run = learn_fake_aloha.online("qc", 4, Path(), args)
    assert (run.name, run.seed, run.experiment, run.settings) == ("qc", 4, "fake_aloha", ["agent.lr=0.1"])
    assert rows(run) == [
        (0, 1, "validation", False), (20, 7, "validation", False), (40, 5, "validation", False),
        (20, 6, "reported", True), (40, 4, "reported", False),
    ]  # fmt: skip
    successes["a", 40] = 9
    assert rows(learn_fake_aloha.online("qc", 4, Path(), args))[3:] == [(40, 8, "reported", True)]
    # Clones are counted by their updates of imitation.
    assert rows(learn_fake_aloha.cloned(0, Path(), args)) == [
        (200, 3, "validation", False), (200, 2, "reported", True),
        (400, 2, "validation", False), (400, 1, "reported", False),
    ]  # fmt: skip


def test_the_humans_share_of_the_last_episodes_and_of_the_second_half_are_kept():
    people = [
        {"env_steps": 50, "human_ticks": 45, "share": 0.9, "low": 0.8, "high": 1.0},
        {"env_steps": 100, "human_ticks": 50, "share": 0.2, "low": 0.1, "high": 0.3},
    ]
    shares = {"human_share": 0.2, "human_share_low": 0.1, "human_share_high": 0.3, "later_share": pytest.approx(0.1)}
    assert human_in_the_loop.figures(people) == shares
    assert human_in_the_loop.later_share(people[:1]) == pytest.approx(0.9)


def test_runs_made_another_way_are_not_mixed(tmp_path):
    args, folder = argparse.Namespace(out=tmp_path, episodes=3, set=[]), tmp_path / "fake_aloha" / "expectile_0.9"
    for _ in range(2):
        assert ablations.folder("fake_aloha", "expectile_0.9", args, [7]) == folder
    with pytest.raises(SystemExit, match=naming(folder, 7, 8, "--out")):
        ablations.folder("fake_aloha", "expectile_0.9", args, [8])
    config, run = load_experiment("fake_aloha"), tmp_path / "ours"
    run.with_name("ours.plan").write_text('["learner.max_steps: 12000 -> 7"]')
    with pytest.raises(SystemExit, match=naming(run, "learner.max_steps", "[]", "--out")):
        learning.train(config, run, [])


def test_methods_are_what_they_are_called():
    of = {name: human_in_the_loop.configuration(name, 3, 6) for name in human_in_the_loop.METHODS}
    assert {(c.seed, c.actor.intervention) for c in of.values()} == {(3, "scripted")}  # the same scripted human
    assert len({str(c.robot) for c in of.values()}) == 1
    free, dagger, clone = of.pop("hil-serl"), of["hg-dagger"].agent, of["bc"].agent
    assert (free.agent.init_temperature, free.learner.utd_ratio) == (0.01, 4.0)
    (paces,) = {(c.learner.max_steps, c.learner.utd_ratio) for c in of.values()}
    assert paces[0] / paces[1] == free.learner.max_steps / free.learner.utd_ratio  # as many online steps
    assert {c.agent.critic.hidden for n, c in of.items() if "rlpd" in n} == {(256, 256)}
    assert (of["rlpd-qc"].chunk.horizon, of["rlpd-qc"].learner.pretrain_steps) == (1, 0)
    assert isinstance(dagger, BcConfig)
    assert isinstance(clone, BcConfig)
    assert (dagger.bc_on, clone.bc_on) == ("demo+interventions", "demo")
    assert (dagger.flow, dagger.policy_updates) == (clone.flow, clone.policy_updates)
    assert of["hg-dagger"].learner.pretrain_steps == of["ours"].learner.pretrain_steps  # the experiment's own
    assert human_in_the_loop.configuration("ours", 0, 6, ["learner.max_steps=60"]).learner.checkpoint_period == 10
    with pytest.raises(ConfigError, match=naming("learner.max_step", "'max_steps'")):
        human_in_the_loop.configuration("ours", 0, 6, ["learner.max_step=60"])


def test_the_share_moves_over_the_last_episodes_and_its_interval_over_them():
    def episode(i, human, length=100):
        return {"intervention_steps": human, "episode/l": length, "env_steps": 100 * (i + 1), "human_ticks": 7 * i}

    points = human_in_the_loop.human_share([episode(i, 50 if i < 30 else 10) for i in range(60)])
    share = np.array([p["share"] for p in points])
    np.testing.assert_allclose(share[[*range(30), 39, *range(49, 60)]], [0.5] * 30 + [0.3] + [0.1] * 11)  # of twenty
    assert points[29]["low"] == points[29]["high"] == 0.5  # all alike: nothing to doubt
    assert points[39]["low"] < 0.3 < points[39]["high"]
    assert [(p["env_steps"], p["human_ticks"]) for p in points[:2]] == [(100, 0), (200, 7)]
    ratio = human_in_the_loop.human_share([episode(0, 10, 10), episode(1, 0, 90)])[1]
    assert ratio["share"] == pytest.approx(0.1)  # of the ticks, not of the episodes


def test_what_is_asked_for_is_checked_before_anything_runs(capsys):
    parser = argparse.ArgumentParser()
    cli_args.add_settings(parser, "for every row")
    args = parser.parse_args(["--set", "a.b=c=d", "--set", "e="])
    assert cli_args.settings(parser, args.set) == [("a.b", "c=d"), ("e", "")]
    assert cli_args.chosen(parser, "all", {"x": 1, "y": 2}, "row") == ["x", "y"]
    assert cli_args.chosen(parser, "y,x", ["x", "y"], "row") == ["y", "x"]
    for check, given, named in (
        (cli_args.settings, (["agent.lr"],), ("--set", "agent.lr", "FIELD=VALUE")),
        (cli_args.chosen, ("x,z", ["x", "y"], "row"), ("z", "x, y", "all")),
    ):
        with pytest.raises(SystemExit):
            check(parser, *given)
        assert re.search(naming(*named), capsys.readouterr().err)


@pytest.mark.parametrize(("online", "updates", "env_steps", "done"), [
    (0, 30, 0, True), (0, 20, 0, False), (20, 49, 21, True), (20, 40, 11, False),
])  # fmt: skip
def test_a_run_that_was_told_to_stop_is_not_finished(online, updates, env_steps, done):
    plan = argparse.Namespace(offline_steps=30, online_steps=online)
    points = [Checkpoint(10, 0, 1, env_steps=0), Checkpoint(updates, 0, 1, env_steps=env_steps)]
    assert cube_single.finished(points, plan) is done
    assert not cube_single.finished([], plan)


def test_a_critics_bias_is_of_the_decisions_that_were_not_corrected(tmp_path):
    def episode(q: float, g: float | None, **more) -> str:
        row = {"kind": "episode", "step": 1, "env_steps": 1, "human_ticks": 0, "wall": 1.0, "intervention_count": 0}
        return json.dumps({**row, "q": [q, q], "g": [g, None], **more})

    early, truncated = [episode(0.9, 0.0)] * 8, episode(0.9, None)
    late = [episode(0.6, 0.5)] * 6 + [episode(0.9, 0.1, intervention_count=1)] * 2 + [truncated]
    (tmp_path / "metrics.jsonl").write_text("\n".join(early + late) + "\n")
    reward = {"scale": 1.0, "offset": 0.0, "failure_reward": 0.0}
    (tmp_path / "config.json").write_text(json.dumps({"agent": {"kind": "acfql"}, "reward": reward, "discount": 0.98}))
    found = calibration.figures(tmp_path)
    assert found == {"decisions": 6, "bias": pytest.approx(0.1), "error": pytest.approx(0.1)}
    calibration.plot({"one": tmp_path, "two": tmp_path}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_reports_answer_is_the_first_command_and_set_point_that_change():
    """Ticks at 0, 20, 40 ms ...; the report comes at 23 ms, is seen at 40, and the driver moves at 45."""
    targets = np.repeat([0.0, 0.01], [2, 4])[:, None] * np.ones(14)
    commands = [(k, t, 0.0, t + 0.001, row.tolist()) for k, (t, row) in enumerate(zip(TICKS, targets, strict=True))]
    moments = 0.005 * np.arange(100)
    points = np.maximum(moments - 0.040, 0)[:, None] * 0.1 * np.ones(14)
    answer = answer_of(0.023, commands, moments, points)
    assert answer[:4] == pytest.approx((0.017, 0, 0.018, 0.022))
    slow = [(k, t, r, s, [0.01 * (t > 0.07)] * 14) for k, t, r, s, _ in commands]
    assert answer_of(0.023, slow, moments, points).late == 2


def test_braking_is_timed_by_the_joint_that_was_fastest():
    """200 passes a second at 0.4 rad/s; unplugged at 0.5 s, braked from 0.52 to 0.56, back by 2 mrad until 0.6."""
    moments = 0.005 * np.arange(400)
    speed = np.interp(moments, [0.52, 0.56], [-0.4, 0.0]) + np.where((moments > 0.56) & (moments <= 0.6), 0.05, 0.0)
    points = np.zeros((400, 14))
    points[:, 1] = np.cumsum(speed) * 0.005
    points[:, 0] = points[:, 1] / 4
    points[:, 9] = moments  # the other arm moves on
    braking = braking_of(0.5, moments, points)
    assert (braking.speed, braking.returned) == pytest.approx((0.4, 0.002))
    assert 0.02 < braking.began <= 0.03
    assert 0.055 <= braking.stopped <= 0.065
    assert 0.095 <= braking.settled <= 0.106


def test_a_report_is_as_old_as_the_server_receives_the_command_that_is_made_of_it():
    """Reports every 8 ms from 20 ms on, ticks every 20 ms; each command is at the server 2 ms after its tick."""
    commands = [(k, t, 0.02 + 0.008 * ((t - 0.02) // 0.008), t + 0.001, []) for k, t in enumerate(TICKS)]
    received = {k: t + 0.002 for k, t in enumerate(TICKS) if k != 3}  # one is overtaken
    ways = ways_of(0.019, commands, received, held=0.07)
    assert ways["received"] == pytest.approx(0.022 - 0.019)
    assert ways["ages"] == pytest.approx((0.002, 0.002 + 0.004, 0.002 + 0.004), abs=1e-9)
    assert ways["on_its_way"] == pytest.approx((0.002,) * 3)


@pytest.mark.parametrize(("kind", "age", "brakes", "holds"), [
    ("full", 0.019, 0.09, True), ("full", 0.021, 0.09, False), ("plain", 0.021, 0.09, False),
    ("full", 0.019, 0.11, False),
])  # fmt: skip
def test_a_device_is_in_time_within_a_tick_of_a_report_and_100_ms_of_the_plug(kind, age, brakes, holds):
    good = Answer(0.019, 0, 0.02, 0.025, 0.021, (0.01,), (0.002,))
    answers = {"plain": [good] * 50, "full": [good] * 50}
    answers[kind] = [good] * 40 + [good._replace(ages=(age,))] * 10
    brakings = [Braking(0.4, 0.02, 0.05, 0.001, 0.2)] * 9 + [Braking(0.4, brakes, 0.12, 0.001, 0.2)]
    assert device_latency.figures(answers, brakings)["holds"] is holds


def test_the_published_latency_of_a_device_is_in_time():
    file = Path(__file__).resolve().parents[1] / "docs" / "figures" / "device_latency.json"
    published = json.loads(file.read_text())
    answers = {kind: [Answer(**row) for row in published["each"][kind]] for kind in device_latency.KINDS}
    brakings = [Braking(**row) for row in published["each"]["unplugs"]]
    assert sum(map(len, answers.values())) >= 200
    assert len(brakings) >= 25
    again = device_latency.figures(answers, brakings)
    assert again["holds"]
    assert again == {name: published[name] for name in again}
