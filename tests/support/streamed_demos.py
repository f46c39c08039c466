"""A learner's replay and router without an agent, and demonstrations whose states say which one they belong to."""

from __future__ import annotations

import numpy as np

from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, ReplayConfig
from serl_chunk.config.robots import RobotConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.learner.intake import RecordRouter
from serl_chunk.replay.replay import Replay
from serl_chunk.types import Begin, CameraSpec, End, Episode, Outcome, RobotSpec, Source, Step, StepBlock

LENGTH, HORIZON = 7, 3
SPEC = RobotSpec("coded", 50.0, 3, (-1.0,), (1.0,), (-1,), (), (CameraSpec("top", 16, 16),), 20)


def make_router(cameras=(), demo_capacity=100) -> tuple[Replay, RecordRouter]:
    config = ExperimentConfig(
        name="coded",
        robot=RobotConfig(max_episode_steps=20),
        agent=AcrlpdConfig(image_keys=cameras),
        chunk=ChunkConfig(HORIZON),
        replay=ReplayConfig(demo_capacity=demo_capacity, image_capacity=60),
    )
    shape = (HORIZON, 1)
    plain = Normaliser(
        "absolute_range", np.zeros(3), np.ones(3), np.zeros(shape), np.ones(shape), np.array([-1])
    )  # model space is robot space
    replay = Replay(SPEC, config, Preprocess.of(config, SPEC, plain), bc_on="demo")
    return replay, RecordRouter(replay)


def episode(number: int, name: str = "", length: int = LENGTH) -> Episode:
    name = name or f"d{number}"
    steps = [
        Step(t, {"state": np.array([number, t, 0], np.float32), "images/top": np.full((16, 16, 3), t, np.uint8)},
             np.full(1, t / 10, np.float32), float(t == length - 1), Source.SCRIPTED, -1, 0, 0.02 * t)
        for t in range(length)
    ]  # fmt: skip
    final = {"state": np.array([number, length, 0], np.float32), "images/top": np.full((16, 16, 3), length, np.uint8)}
    return Episode(
        Begin(name, demonstration=True),
        StepBlock.from_steps(name, steps),
        End(name, length, final, True, False, Outcome.SUCCESS),
    )


def parts(e: Episode, cut: int = 3) -> list:
    begin, steps, end = e
    return [begin, steps.slice(0, cut), steps.slice(cut, steps.n), end]


def demo_rows(replay: Replay) -> tuple[int, int, int]:
    stats = replay.stats()
    return tuple(int(stats[f"replay/{name}"]) for name in ("demo_episodes", "demo_rows", "online_episodes"))
