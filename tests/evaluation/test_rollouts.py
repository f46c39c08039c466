"""Evaluation: intervals, held-out starts, videos."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import rich.console
from actor_helpers import DT, LineEnv, NoisyAgent, SimClock, SimInference, make_config, make_policy
from errors import naming

from serl_chunk.config.experiment import ActorConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.evaluation.results import EvalResult, results_table, summary_line
from serl_chunk.evaluation.rollouts import EVAL_SEED_BASE, VALIDATION_SEED_BASE, evaluate
from serl_chunk.types import STATE, ConfigError
from serl_chunk.viz import video
from serl_chunk.viz.video import MAX_FPS, WIDTH, EpisodeVideo, VideoError, framed, side_by_side

NO_VIDEO = "the extra serl-chunk[video] is not installed"


class EverySecond(LineEnv):
    """Succeeds on tick 9 from odd seeds; runs into the time limit from even ones."""

    def reset(self, *, seed=None, options=None):
        self.success_at = 9 if seed % 2 else None
        return super().reset(seed=seed, options=options)


def evaluated(env=None, agent=None, config=None, *, n=2, **more) -> EvalResult:
    return evaluate(
        env or EverySecond(length=15), make_policy(agent or NoisyAgent(8)), config or make_config(), n=n, **more
    )


def shown(result: EvalResult) -> str:
    text = io.StringIO()
    rich.console.Console(file=text, width=120).print(results_table([result]))
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
        assert expected in shown(result)
    assert "starved" not in shown(result)
    assert ended(result) == ""
    never = evaluated(LineEnv(length=5))
    assert (never.success_rate, never.mean_time_s) == (0.0, None)
    with pytest.raises(ConfigError, match=naming("n", 0, 1)):
        evaluated(n=0)


def test_sampled_policy_validation_starts_and_delay():
    env, agent = EverySecond(length=15), NoisyAgent(8)
    config = make_config(actor=ActorConfig(delay_ticks=2))
    result = evaluated(env, agent, config, seed_base=VALIDATION_SEED_BASE, deterministic=False)
    assert env.seeds[2:] == [VALIDATION_SEED_BASE, VALIDATION_SEED_BASE + 1]
    assert (agent.explored, result.mode, result.summaries[0].hold_ticks) == ({True}, "sampled", 2)


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
        assert "starts that ignore the seed" in shown(result)
        assert "held-out" not in shown(result)
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
    assert "a human acted on 4 ticks: 2 failures" in shown(result)
    assert ended(result) == "human_ticks=4"


def test_starved_ticks_are_shown_where_there_are_any(monkeypatch):
    clock, policy = SimClock(), make_policy(NoisyAgent(8))
    late = SimInference(policy, clock, itertools.repeat(15e-3))  # half a tick of 20 ms is 10
    config = make_config(actor=ActorConfig(clock="realtime", inference="sync"))
    monkeypatch.setattr("serl_chunk.actor.planner.InferenceThread", lambda policy, clock: late)
    result = evaluate(EverySecond(length=15, clock=clock), policy, config, n=2, clock=clock)
    assert result.starved_ticks == sum(e["starved_ticks"] for e in result.to_json()["episodes"]) == 4
    assert "starved" in shown(result)
    assert "4 ticks" in shown(result)
    assert ended(result) == "starved_ticks=4"


def test_side_by_side_keeps_every_pixel_and_a_frame_is_wide_and_coloured_while_a_human_acts():
    a, b = np.full((8, 10, 3), 1, np.uint8), np.full((5, 5, 3), 2, np.uint8)
    out = side_by_side([a, b])
    assert out.shape == (8, 15, 3)
    assert ((out[:8, :10] == 1).all(), (out[:5, 10:15] == 2).all(), out[5:, 10:].max()) == (True, True, 0)
    image = np.full((7, 10, 3), 200, np.uint8)
    alone, human = framed(image, False), framed(image, True)
    assert alone.shape == human.shape == (340, WIDTH, 3)
    assert all((each[20:-20, 20:-20] == 200).all() for each in (alone, human))
    assert (alone[0].max(), human[0].tolist()) == (0, [[0xD5, 0x5E, 0x00]] * WIDTH)


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
