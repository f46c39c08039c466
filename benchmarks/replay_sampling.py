"""Batches per second the replay delivers, from states alone and with two cameras, one update at a time.

python benchmarks/replay_sampling.py --json replay_sampling.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from serl_chunk.config.agents import AcrlpdConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, NormaliserConfig, ReplayConfig
from serl_chunk.config.robots import RobotConfig
from serl_chunk.data.normaliser import fit_normaliser
from serl_chunk.learner.replay import Replay
from serl_chunk.types import Begin, CameraSpec, End, Episode, Outcome, RobotSpec, SparseRows, StepBlock

STATE, ACTION, LENGTH, CAMERAS = 23, 14, 100, ("left", "right")


def robot(side: int) -> RobotSpec:
    """A bimanual robot with two cameras of `side` pixels."""
    return RobotSpec(
        name="benchmark",
        control_hz=50.0,
        state_dim=STATE,
        action_low=(-2.0,) * ACTION,
        action_high=(2.0,) * ACTION,
        joint_of_action=tuple(range(ACTION)),
        grippers=(6, 13),
        cameras=tuple(CameraSpec(name, side, side) for name in CAMERAS),
        max_episode_steps=LENGTH,
    )


def episode(name: str, rng: np.random.Generator, side: int, image_every: int) -> Episode:
    """A successful episode of noise; every camera is read each `image_every` ticks, never for 0."""
    ticks = np.arange(0, LENGTH + 1, image_every) if image_every else np.empty(0, int)
    frames = {f"images/{c}": rng.integers(0, 256, (len(ticks), side, side, 3), np.uint8) for c in CAMERAS}
    inside = ticks < LENGTH
    steps = StepBlock(
        episode_id=name,
        first_tick=0,
        observation={"state": rng.normal(size=(LENGTH, STATE)).astype(np.float32)},
        action=rng.normal(size=(LENGTH, ACTION)).astype(np.float32),
        reward=np.zeros(LENGTH, np.float32),
        source=np.zeros(LENGTH, np.uint8),
        decision_tick=np.arange(LENGTH, dtype=np.int32) // 5 * 5,
        policy_version=np.zeros(LENGTH, np.int64),
        policy_age=np.zeros(LENGTH, np.float32),
        stamp=np.arange(LENGTH) / 50,
        sparse={k: SparseRows(ticks[inside].astype(np.int32), v[inside]) for k, v in frames.items()}
        if len(ticks)
        else {},
    )
    final = {"state": np.zeros(STATE, np.float32)} | {k: v[-1] for k, v in frames.items() if len(ticks)}
    return Episode(Begin(name), steps, End(name, LENGTH, final, True, False, Outcome.SUCCESS, reward=1.0))


def measure(seconds: float, steps: int, *, batch: int, horizon: int, side: int, images: bool) -> dict[str, float]:
    """Fill a replay with `steps` online steps and a tenth of demonstrations, then insert and sample for `seconds`."""
    rng, spec = np.random.default_rng(0), robot(side)
    config = ExperimentConfig(
        name="benchmark",
        robot=RobotConfig(max_episode_steps=LENGTH),
        agent=AcrlpdConfig(),
        chunk=ChunkConfig(horizon),
        replay=ReplayConfig(
            capacity=steps * 2, demo_capacity=steps, human_capacity=1, image_capacity=steps // horizon * 2
        ),
    )
    every = horizon if images else 0  # frames at every decision
    demos = [episode(f"d{k}", rng, side, every) for k in range(max(1, steps // LENGTH // 10))]
    normaliser = fit_normaliser(spec, NormaliserConfig(), horizon, demos)
    replay = Replay(spec, config, normaliser, image_keys=CAMERAS if images else ())
    replay.add_demo(*demos)
    count = steps // LENGTH
    start = time.perf_counter()
    for k in range(count):
        for record in episode(f"e{k}", rng, side, every):
            replay.insert("s", record)
    filled = time.perf_counter() - start
    sampled, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < seconds:
        replay.sample(rng, batch, 1)
        sampled += 1
    stream = episode("live", rng, side, every)
    replay.insert("s", stream.begin)
    singles = [stream.steps.slice(t, t + 1) for t in range(LENGTH)]
    start = time.perf_counter()
    for block in singles:
        replay.insert("s", block)
    live = time.perf_counter() - start
    stats = replay.stats()
    return {
        "batches_per_second": sampled / took,
        "windows_per_second": sampled * batch / took,
        "milliseconds_per_batch": 1000 * took / sampled,
        "live_steps_inserted_per_second": LENGTH / live,
        "windows": stats["replay/windows"],
        "megabytes": stats["replay/bytes"] / 1e6,
        "seconds_to_fill": filled,
    }


def main() -> None:
    """Print the figures, and write them where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--horizon", type=int, default=5)
    parser.add_argument("--side", type=int, default=128, help="pixels of a square camera image")
    parser.add_argument("--steps", type=int, default=20_000, help="online steps in the replay")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to sample, per case")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    for name, images in (("state", False), ("two_cameras", True)):
        case = measure(args.seconds, args.steps, batch=args.batch, horizon=args.horizon, side=args.side, images=images)
        figures |= {f"{name}_{key}": round(value, 3) for key, value in case.items()}
    for key, value in figures.items():
        print(f"{key:45s} {value:>14,.3f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
