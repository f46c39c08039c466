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
from serl_chunk.evaluation.results import results_table, summary_line
from serl_chunk.evaluation.rollouts import (
    EVAL_SEED_BASE,
    VALIDATION_SEED_BASE,
    evaluate,
)
from serl_chunk.types import STATE, ConfigError
from serl_chunk.viz import video
from serl_chunk.viz.video import MAX_FPS, WIDTH, EpisodeVideo, VideoError, framed, side_by_side

NO_VIDEO = "the extra serl-chunk[video] is not installed"


class EverySecond(LineEnv):
    """Succeeds on tick 9 from odd seeds; runs into the time limit from even ones."""

    def reset(self, *, seed=None, options=None):
        self.success_at = 9 if seed % 2 else None
        return super().reset(seed=seed, options=options)


def test_an_evaluation_and_its_figures():
    env, agent = EverySecond(length=15), NoisyAgent(8)
    seen = []
    result = evaluate(
        env,
        make_policy(agent),
        make_config(),
        n=5,
        progress=lambda r: seen.append((r.episodes, r.summaries[-1].success)),
    )
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


def test_sampled_policy_validation_starts_and_delay():
    env, agent = EverySecond(length=15), NoisyAgent(8)
    config = make_config(actor=ActorConfig(delay_ticks=2))
    result = evaluate(env, make_policy(agent), config, n=2, seed_base=VALIDATION_SEED_BASE, deterministic=False)
    assert env.seeds[2:] == [VALIDATION_SEED_BASE, VALIDATION_SEED_BASE + 1]
    assert agent.explored == {True}
    assert result.mode == "sampled"
    assert result.summaries[0].hold_ticks == 2


def test_no_success_has_no_time():
    result = evaluate(LineEnv(length=5), make_policy(NoisyAgent(8)), make_config(), n=2)
    assert (result.success_rate, result.mean_time_s) == (0.0, None)


def test_a_stop_leaves_the_episode_it_cuts_short_out():
    env = LineEnv(length=10)
    result = evaluate(
        env,
        make_policy(NoisyAgent(8)),
        make_config(),
        n=5,
        stop=lambda: "operator" if len(env.seeds) == 5 and env.tick == 4 else None,
    )
    assert result.episodes == 2


def test_the_table():
    result = evaluate(EverySecond(length=15), make_policy(NoisyAgent(8)), make_config(), n=2)
    text = io.StringIO()
    rich.console.Console(file=text, width=120).print(results_table([result]))
    for expected in ("no interventions", "mean (version 3)", "50.0 %", "0.20 s", "12.5 ticks"):
        assert expected in text.getvalue()
    assert "starved" not in text.getvalue()
    assert summary_line(result, "r.html") == "evaluation: success_rate=0.50 n=2 report=r.html"


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

    def __init__(self, **options):
        super().__init__(**options)
        self.resets = 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        return super().reset(seed=seed, options=options)

    def _frames(self, tick, cameras=None):
        return {
            name: frame + np.uint8(100 * (self.resets % 2)) for name, frame in super()._frames(tick, cameras).items()
        }


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
        assert result.starts_repeat is False
        assert result.to_json()["starts_repeat"] is False
        text = io.StringIO()
        rich.console.Console(file=text, width=120).print(results_table([result]))
        assert "starts that ignore the seed" in text.getvalue()
        assert "held-out" not in text.getvalue()
        assert summary_line(result, "r.html") == "evaluation: success_rate=0.50 n=2 report=r.html starts_repeat=no"


def test_what_only_an_unused_camera_sees_is_not_looked_at():
    result = evaluate(UnseededFrames(length=15), make_policy(NoisyAgent(8)), make_config(), n=1)
    assert result.starts_repeat is True


def test_a_real_robot_is_not_moved_to_compare_starts():
    config = dataclasses.replace(make_config(), robot=GymConfig(make=lambda fake_env: None, is_real=True))
    env = EverySecond(length=15)
    result = evaluate(env, make_policy(NoisyAgent(8)), config, n=2)
    assert env.seeds == [EVAL_SEED_BASE, EVAL_SEED_BASE + 1]
    assert result.starts_repeat is None
    assert result.to_json()["starts_repeat"] is None


def test_a_human_who_acts_inside_the_environment_is_named_and_its_episode_a_failure():
    env = EverySecond(length=15, human={2: np.zeros(2, np.float32), 3: np.zeros(2, np.float32)})
    result = evaluate(env, make_policy(NoisyAgent(8)), make_config(), n=2)
    assert result.human_ticks == 4
    assert [e["human_ticks"] for e in result.to_json()["episodes"]] == [2, 2]
    text = io.StringIO()
    rich.console.Console(file=text, width=120).print(results_table([result]))
    assert "a human acted on 4 ticks: 2 failures" in text.getvalue()
    ended = [(e["outcome"], e["ended_by"]) for e in result.to_json()["episodes"]]
    assert ended == [("failure", "intervention")] * 2
    assert summary_line(result, "r.html") == "evaluation: success_rate=0.00 n=2 report=r.html human_ticks=4"


def test_starved_ticks_are_shown_where_there_are_any(monkeypatch):
    clock, policy = SimClock(), make_policy(NoisyAgent(8))
    late = SimInference(policy, clock, itertools.repeat(15e-3))  # half a tick of 20 ms is 10
    config = make_config(actor=ActorConfig(clock="realtime", inference="sync"))
    env = EverySecond(length=15, clock=clock)
    monkeypatch.setattr("serl_chunk.actor.planner.InferenceThread", lambda policy, clock: late)
    result = evaluate(env, policy, config, n=2, clock=clock)
    assert result.starved_ticks == sum(e["starved_ticks"] for e in result.to_json()["episodes"]) == 4
    text = io.StringIO()
    rich.console.Console(file=text, width=120).print(results_table([result]))
    assert "starved" in text.getvalue()
    assert "4 ticks" in text.getvalue()
    assert summary_line(result, "r.html") == "evaluation: success_rate=0.50 n=2 report=r.html starved_ticks=4"


def test_an_evaluation_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=naming("n", 0, 1)):
        evaluate(LineEnv(), make_policy(NoisyAgent(8)), make_config(), n=0)


def test_side_by_side_keeps_every_pixel():
    a, b = np.full((8, 10, 3), 1, np.uint8), np.full((5, 5, 3), 2, np.uint8)
    out = side_by_side([a, b])
    assert out.shape == (8, 15, 3)
    assert (out[:8, :10] == 1).all()
    assert (out[:5, 10:15] == 2).all()
    assert out[5:, 10:].max() == 0


def test_a_framed_image_is_wide_even_and_coloured_while_a_human_acts():
    image = np.full((7, 10, 3), 200, np.uint8)
    alone, human = framed(image, False), framed(image, True)
    assert alone.shape == human.shape == (340, WIDTH, 3)
    assert (alone[20:-20, 20:-20] == 200).all()
    assert alone[0].max() == 0
    assert human[0].tolist() == [[0xD5, 0x5E, 0x00]] * WIDTH
    assert (human[20:-20, 20:-20] == 200).all()


def test_videos_hold_every_moment_and_are_named_by_outcome(tmp_path):
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg", reason=NO_VIDEO)
    evaluate(EverySecond(length=15), make_policy(NoisyAgent(8)), make_config(), n=2, save_video=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mean_000_unknown.mp4", "mean_001_success.mp4"]
    program = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(tmp_path / "mean_001_success.mp4")]
    decoded = subprocess.run([*program, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], capture_output=True, check=True)
    size = decoded.stderr.decode().split(f", {WIDTH}x")[1].split(",")[0].split(" ")[0]
    frames = np.frombuffer(decoded.stdout, np.uint8).reshape(-1, int(size), WIDTH, 3)
    assert len(frames) == 11  # ten ticks and the final moment
    assert 1 / DT > MAX_FPS  # so that it plays slower than the robot moved
    assert f"{MAX_FPS:g} fps" in decoded.stderr.decode()


def test_a_film_is_coloured_on_the_ticks_on_which_a_human_acts(tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg", reason=NO_VIDEO)
    coloured = []
    monkeypatch.setattr(EpisodeVideo, "add", lambda self, images, human=False: coloured.append(human))
    monkeypatch.setattr(EpisodeVideo, "finish", lambda self, name: self.discard())
    env = LineEnv(length=6, human={2: np.zeros(2, np.float32), 3: np.zeros(2, np.float32)})
    evaluate(env, make_policy(NoisyAgent(8)), make_config(), n=1, save_video=tmp_path)
    assert coloured == [False, False, True, True, False, False, False]


def test_only_the_first_episodes_are_filmed_where_that_is_wanted(tmp_path):
    pytest.importorskip("imageio_ffmpeg", reason=NO_VIDEO)
    result = evaluate(EverySecond(), make_policy(NoisyAgent(8)), make_config(), n=3, save_video=tmp_path, filmed=1)
    assert result.episodes == 3
    assert [p.name[:8] for p in tmp_path.iterdir()] == ["mean_000"]


def test_a_crash_leaves_no_half_video(tmp_path):
    pytest.importorskip("imageio_ffmpeg", reason=NO_VIDEO)
    with pytest.raises(RuntimeError, match="motor"):
        evaluate(LineEnv(crash_at=3), make_policy(NoisyAgent(8)), make_config(), n=1, save_video=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_video_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "ffmpeg_program", lambda: "false")  # a program that fails whatever it gets
    film = EpisodeVideo(tmp_path / "a.mp4", 50)
    film.add({"images/front": np.zeros((4, 4, 3), np.uint8)})
    with pytest.raises(VideoError, match=naming("b.mp4", "ffmpeg", 1)):
        film.finish("b.mp4")


def test_missing_imageio_gives_the_install_hint(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ConfigError, match=naming("imageio_ffmpeg", "pip install 'serl-chunk[video]'")):
        EpisodeVideo(tmp_path / "a.mp4", 50)
