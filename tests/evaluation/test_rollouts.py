"""Evaluation: intervals, held-out starts, videos, and several policies in turns."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from typing import Any, ClassVar
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
import rich.console
from actor_helpers import (
    DT,
    HumanOnTicks,
    LineEnv,
    LineOfTasks,
    NoisyAgent,
    SimClock,
    SimInference,
    make_config,
    make_policy,
)
from errors import naming

from serl_chunk.actor.policy import LocalPolicy
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.evaluation.results import EvalResult, paired_difference, results_table, summary_line, wilson_interval
from serl_chunk.evaluation.rollouts import Entry, evaluate, evaluate_in_turns
from serl_chunk.robots.base import RobotEnv
from serl_chunk.types import EVAL_SEED_BASE, STATE, ConfigError, Snapshot
from serl_chunk.viz import video
from serl_chunk.viz.video import MAX_FPS, WIDTH, EpisodeVideo, VideoError

NO_VIDEO = "the extra serl-chunk[video] is not installed"


class EverySecond(LineEnv):
    def reset(self, *, seed=None, options=None):
        self.success_at = 9 if seed % 2 else None
        return super().reset(seed=seed, options=options)


def evaluated(env=None, agent=None, config=None, *, n=2, **more) -> EvalResult:
    return evaluate(
        env or EverySecond(length=15), make_policy(agent or NoisyAgent(8)), config or make_config(), n=n, **more
    )


def table_of(results: list[EvalResult]) -> str:
    text = io.StringIO()
    rich.console.Console(file=text, width=120).print(results_table(results))
    return text.getvalue()


def ended(result: EvalResult) -> str:
    """What stands behind the figures in the line for machines."""
    line = summary_line(result, "r.html")
    assert line.startswith(f"evaluation: success_rate={result.success_rate:.2f} n={result.episodes} report=r.html")
    return line.partition("report=r.html")[2].strip()


def test_an_evaluation_and_its_figures():
    env, agent, seen = EverySecond(length=15), NoisyAgent(8), []
    result = evaluated(env, agent, n=5, progress=lambda r: seen.append((r.episodes, r.summaries[-1].success)))
    assert env.seeds == [EVAL_SEED_BASE] * 2 + [EVAL_SEED_BASE + i for i in range(5)]  # the first two are compared
    assert agent.explored == {False}
    assert seen == [(1, False), (2, True), (3, False), (4, True), (5, False)]
    assert (result.episodes, result.successes, result.success_rate) == (5, 2, 0.4)
    assert result.mean_time_s == pytest.approx(10 * DT)
    assert result.mean_length == pytest.approx((3 * 15 + 2 * 10) / 5)
    data = json.loads(json.dumps(result.to_json()))
    assert (data["mode"], data["n"], data["policy_version"]) == ("mean", 5, 3)
    assert data["low"] < 0.4 < data["high"]
    assert data["episodes"][1]["outcome"] == "success"
    assert math.isfinite(data["episodes"][1]["jerk"])
    for expected in ("no interventions", "mean (version 3)", "40.0 %", "0.20 s", "13.0 ticks"):
        assert expected in table_of([result])
    assert "starved" not in table_of([result])
    assert ended(result) == ""
    never = evaluated(LineEnv(length=5))
    assert (never.success_rate, never.mean_time_s) == (0.0, None)
    with pytest.raises(ConfigError, match=naming("n", 0, 1)):
        evaluated(n=0)


def test_several_tasks_come_in_turn_and_are_counted_apart():
    result = evaluated(LineOfTasks(length=5, success_at=3), n=3)
    assert [episode["task"] for episode in result.to_json()["episodes"]] == ["push", "lift", "push"]
    assert all(f"{line}: {n} of {n}" in table_of([result]) for line, n in (("push", 2), ("lift", 1)))


def test_a_stop_leaves_the_episode_it_cuts_short_out():
    env = LineEnv(length=10)
    stop = lambda: "operator" if len(env.seeds) == 5 and env.tick == 4 else None  # noqa: E731
    assert evaluated(env, n=5, stop=stop).episodes == 2


class Unseeded(EverySecond):
    """Draws its start from a generator of its own, whatever the seed, as gym-hil does from numpy's global one."""

    def __init__(self, **options):
        super().__init__(**options)
        self.drawn = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        observation[STATE][1] = self.drawn.uniform()
        return observation, info


class UnseededFrames(EverySecond):
    """The same of what only a camera sees."""

    def _frames(self, tick, cameras=None):
        shade = np.uint8(100 * (len(self.seeds) % 2))
        return {name: frame + shade for name, frame in super()._frames(tick, cameras).items()}


@pytest.mark.parametrize(
    ("env", "cameras", "differs"),
    [(Unseeded(length=15), (), "state[1]"), (UnseededFrames(length=15), ("wrist",), "camera 'wrist'")],
)
def test_starts_that_do_not_follow_the_seed_are_named(env, cameras, differs, caplog):
    policy = make_policy(NoisyAgent(8), image_keys=cameras)
    first, second = (evaluate(env, policy, make_config(), n=2) for _ in range(2))
    (warning,) = caplog.messages  # they are compared once
    for part in (repr(env.robot_spec.name), differs, "self.np_random", "held-out"):
        assert part in warning
    for result in (first, second):
        assert result.starts_repeat is result.to_json()["starts_repeat"] is False
        assert "starts that ignore the seed" in table_of([result])
        assert "held-out" not in table_of([result])
        assert ended(result) == "starts_repeat=no"


def test_starts_are_compared_by_what_the_policy_sees_and_on_no_real_robot():
    assert evaluated(UnseededFrames(length=15), n=1).starts_repeat is True  # no policy looks at that camera
    config = dataclasses.replace(make_config(), robot=GymConfig(make=lambda fake_env: None, is_real=True))
    env = EverySecond(length=15)
    result = evaluated(env, config=config)
    assert env.seeds == [EVAL_SEED_BASE, EVAL_SEED_BASE + 1]
    assert result.starts_repeat is result.to_json()["starts_repeat"] is None


def test_a_human_who_acts_inside_the_environment_is_named_and_its_episode_a_failure():
    result = evaluated(EverySecond(length=15, human=dict.fromkeys((2, 3), np.zeros(2, np.float32))))
    found = [(e["human_ticks"], e["outcome"], e["ended_by"]) for e in result.to_json()["episodes"]]
    assert (result.human_ticks, found) == (4, [(2, "failure", "intervention")] * 2)
    assert "a human acted on 4 ticks: 2 failures" in table_of([result])
    assert ended(result) == "human_ticks=4"


def test_starved_ticks_are_shown_where_there_are_any(monkeypatch):
    clock, policy = SimClock(), make_policy(NoisyAgent(8))
    late = SimInference(policy, clock, itertools.repeat(15e-3))  # half a tick of 20 ms is 10
    config = make_config(actor=ActorConfig(clock="realtime", inference="sync"))
    monkeypatch.setattr("serl_chunk.actor.planner.InferenceThread", lambda policy, clock: late)
    result = evaluate(EverySecond(length=15, clock=clock), policy, config, n=2, clock=clock)
    assert result.starved_ticks == sum(e["starved_ticks"] for e in result.to_json()["episodes"]) == 4
    assert "starved" in table_of([result])
    assert "4 ticks" in table_of([result])
    assert ended(result) == "starved_ticks=4"


def test_videos_hold_every_moment_and_are_named_by_outcome(tmp_path):
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg", reason=NO_VIDEO)
    assert evaluated(n=3, save_video=tmp_path, filmed=2).episodes == 3  # only the first are filmed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mean_000_unknown.mp4", "mean_001_success.mp4"]
    program = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(tmp_path / "mean_001_success.mp4")]
    decoded = subprocess.run([*program, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], capture_output=True, check=True)
    size = decoded.stderr.decode().split(f", {WIDTH}x")[1].split(",")[0].split(" ")[0]
    frames = np.frombuffer(decoded.stdout, np.uint8).reshape(-1, int(size), WIDTH, 3)
    assert len(frames) == 11  # ten ticks and the final moment
    assert 1 / DT > MAX_FPS  # so that it plays slower than the robot moved
    assert f"{MAX_FPS:g} fps" in decoded.stderr.decode()


def test_a_film_is_coloured_on_the_ticks_on_which_a_human_acts_and_a_crash_leaves_none(tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg", reason=NO_VIDEO)
    with pytest.raises(RuntimeError, match="motor"):
        evaluated(LineEnv(crash_at=3), n=1, save_video=tmp_path)
    assert list(tmp_path.iterdir()) == []
    coloured = []
    monkeypatch.setattr(EpisodeVideo, "add", lambda self, images, human=False: coloured.append(human))
    monkeypatch.setattr(EpisodeVideo, "finish", lambda self, name: self.discard())
    evaluated(LineEnv(length=6, human=dict.fromkeys((2, 3), np.zeros(2, np.float32))), n=1, save_video=tmp_path)
    assert coloured == [False, False, True, True, False, False, False]


def test_a_video_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "ffmpeg_program", lambda: "false")  # a program that fails whatever it gets
    film = EpisodeVideo(tmp_path / "a.mp4", 50)
    film.add({"images/front": np.zeros((4, 4, 3), np.uint8)})
    with pytest.raises(VideoError, match=naming("b.mp4", "ffmpeg", 1)):
        film.finish("b.mp4")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ConfigError, match=naming("imageio_ffmpeg", "pip install 'serl-chunk[video]'")):
        EpisodeVideo(tmp_path / "a.mp4", 50)


class Told(LineEnv):
    def step(self, action):
        self.success_at = self.tick if action[0] > 0.15 else None
        return super().step(action)


class Named(NoisyAgent):
    def __init__(self, name: str, log: list[str], spread: float) -> None:
        super().__init__(8, spread)
        self._name, self._log = name, log

    def sample(self, params, observation, key, *, explore, committed=None, alone=False):
        if observation["state"][2] == 0:
            self._log.append(self._name)
        return super().sample(params, observation, key, explore=explore, committed=committed)


def policies(log: list[str], env: RobotEnv) -> list[LocalPolicy]:
    found = []
    for number, (name, spread) in enumerate((("a", 0.05), ("b", 0.1), ("c", 0.2))):
        policy = make_policy(Named(name, log, spread))
        policy.swap(Snapshot(10 * number, {"bias": np.float32(0)}))
        found.append(policy)
    return found


def in_turns(n: int, *, seed: int = 0, count: int = 3, **more):
    log: list[str] = []
    env = Told(length=15)
    entries = [Entry(p, deterministic=False) for p in policies(log, env)[:count]]
    results = evaluate_in_turns(env, entries, dataclasses.replace(make_config(), seed=seed), n=n, **more)
    return results, log, env.seeds[2:]  # the first two are compared


def test_each_start_is_played_by_every_policy_before_the_next_one_in_a_drawn_order():
    results, log, seeds = in_turns(20)
    blocks = [log[k : k + 3] for k in range(0, 60, 3)]
    assert all(sorted(block) == ["a", "b", "c"] for block in blocks)
    assert {tuple(block) for block in blocks} >= {("a", "b", "c"), ("c", "b", "a")}
    assert seeds == [EVAL_SEED_BASE + k // 3 for k in range(60)]
    assert in_turns(20)[1] == log
    assert in_turns(20, seed=1)[1] != log
    turns = [turn for result in results for turn in result.turns]
    assert sorted(turns) == list(range(60))
    assert [log[turn] for turn in results[1].turns] == ["b"] * 20


def test_each_result_is_that_of_an_evaluation_alone():
    results, *_ = in_turns(6)
    env, config = Told(length=15), dataclasses.replace(make_config(), seed=0)
    alone = [evaluate(env, p, config, n=6, deterministic=False) for p in policies([], env)]
    ours, theirs = ([[(e.seed, e.length, e.success) for e in r.summaries] for r in found] for found in (results, alone))
    assert ours == theirs
    assert [r.policy_version for r in results] == [0, 10, 20]
    assert len({r.successes for r in results}) > 1
    result = results[2]
    before, gone = result.successes, result.summaries[1]
    result.take_back(result.turns[1])  # it counts no more
    assert (result.episodes, result.successes, result.repeated) == (5, before - gone.success, [gone])
    assert gone not in result.summaries
    assert result.steps == sum(e.length for e in result.summaries)


class Faulty(Told):
    """A fault ends every second episode from one start, and each from another, on whichever of several robots."""

    resets: ClassVar[Counter[int]] = Counter()

    def reset(self, *, seed=None, options=None):
        self.resets[seed] += 1
        odd = seed == EVAL_SEED_BASE + 2 and self.resets[seed] % 2
        self.fails = 3 if odd else int(seed == EVAL_SEED_BASE + 3)  # tick; 0: none
        return super().reset(seed=seed, options=options)

    def step(self, action):
        *result, truncated, info = super().step(action)
        fault = {"fault": "a joint is too warm"} if self.tick == self.fails else {}
        return *result, truncated or bool(fault), info | fault


def without_times(results: list[EvalResult]) -> list[tuple[dict[str, Any], list[int]]]:
    found = [(result.to_json(), result.turns) for result in results]
    for data, _ in found:
        for episode in (*data["episodes"], *data.get("repeated", ())):
            del episode["wall_seconds"]
    return found


@pytest.mark.parametrize(("delay", "filmed"), [(0, 0), (2, 0), (0, 2)])
def test_several_at_once_have_the_results_of_one(monkeypatch, tmp_path, delay, filmed):
    films: list[str] = []
    monkeypatch.setattr(EpisodeVideo, "add", lambda self, images, human=False: None)
    monkeypatch.setattr(EpisodeVideo, "finish", lambda self, name: films.append(name))
    config = make_config(actor=ActorConfig(delay_ticks=delay))
    found, done = [], []
    for n in (1, 3, 8):
        envs = [Faulty(length=15) for _ in range(n)]
        videos = tmp_path if filmed else None
        entries = [Entry(p, deterministic=False, videos=videos) for p in policies([], envs[0])[:2]]
        results = evaluate_in_turns(envs[0], entries, config, n=7, others=envs[1:], filmed=filmed, progress=done.append)
        found.append((without_times(results), sorted(films)))
        assert sum(bool(env.seeds) for env in envs) == min(n, 7 - filmed)
        films.clear()
        Faulty.resets.clear()
    assert len(done) == 3 * 14
    assert found[0] == found[1] == found[2]
    data = found[0][0][1][0]
    assert 0 < data["successes"] < 6
    assert [e["ended_by"] for e in data["episodes"]].count("fault") == 1
    assert len(found[0][1]) == 2 * filmed


def test_an_operator_and_a_policy_server_have_one_robot():
    env, policy = EverySecond(length=15), make_policy(NoisyAgent(8))
    for entry, more in ((Entry(policy), {"intervention": HumanOnTicks(frozenset())}), (Entry(Mock(image_keys=())), {})):
        with pytest.raises(ConfigError, match=naming("n_envs", 2, 1)):
            evaluate_in_turns(env, [entry], make_config(), n=1, others=[env], **more)


def test_an_environment_that_is_made_once_is_not_played_as_several():
    inner, policy = gymnasium.Env(), make_policy(NoisyAgent(8))
    envs = [EverySecond(length=15) for _ in range(2)]
    for env in envs:
        env.env = gymnasium.wrappers.OrderEnforcing(inner)
    with pytest.raises(ConfigError, match=naming(2, "robot.make", "n_envs")):
        evaluate_in_turns(envs[0], [Entry(policy)], make_config(), n=1, others=envs[1:])


@pytest.mark.parametrize("finished", [0, 2, 5])
@pytest.mark.parametrize("n_envs", [1, 2])
def test_what_was_finished_before_a_stop_counts(finished, n_envs):
    done: list[int] = []

    def stop() -> str | None:
        return "interrupted" if len(done) >= finished else None

    others = [Told(length=15) for _ in range(n_envs - 1)]
    results, log, _ = in_turns(2, progress=lambda results: done.append(len(results)), stop=stop, others=others)
    assert sum(r.episodes for r in results) == len(done) == sum(len(r.turns) for r in results)
    assert finished <= len(done) < finished + n_envs
    assert len(log) <= finished + n_envs
    assert [r.interrupted and r.to_json()["interrupted"] for r in results] == [True] * 3
    assert not in_turns(1)[0][0].interrupted


def test_both_arms_of_one_policy_are_compared():
    env, agents = Told(length=15), [NoisyAgent(8) for _ in range(4)]
    made = [make_policy(agent) for agent in agents]
    made[3].swap(Snapshot(3, {"bias": np.float32(3), "critic_chooses": np.bool_(False)}))
    entries = [Entry(policy, arm=arm) for policy, arm in zip(made, ("one", "best", "", ""), strict=True)]
    evaluate_in_turns(env, entries, make_config(), n=2)
    assert [set(agent.alone) for agent in agents] == [{True}, {False}, {False}, {True}]
    results = evaluate_in_turns(env, entries[:2], make_config(), n=2)
    assert [r.to_json()["arm"] for r in results] == ["one", "best"]
    assert "arm" not in evaluate(env, made[2], make_config(), n=1).to_json()
    assert [summary_line(r, "x").split()[-1] for r in results] == ["arm=one", "arm=best"]
    assert "best against one, paired" in table_of(results)
    assert "mean (version 3, one)" in table_of(results)


@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [(97, 100, (0.9155, 0.9897)), (0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (0, 0, (0.0, 1.0))],
)
def test_wilson_interval(successes, n, interval):
    assert wilson_interval(successes, n) == pytest.approx(interval, abs=6e-5)


def pairs(both: int, first: int, second: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    table = ((both, 1, 1), (first, 1, 0), (second, 0, 1), (neither, 0, 0))
    return tuple(np.concatenate([np.full(n, values[k], bool) for n, *values in table]) for k in (0, 1))


def test_the_interval_of_a_table_of_newcombe():
    """Published: 0.2000 (0.0569, 0.3404)."""
    first, second = pairs(36, 2, 12, 0)
    assert paired_difference(first, second) == pytest.approx((0.2, 0.0569, 0.3404), abs=6e-5)
    assert paired_difference(second, first) == pytest.approx((-0.2, -0.3404, -0.0569), abs=6e-5)
