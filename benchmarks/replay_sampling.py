"""Batches per second the replay delivers, from states alone and with two cameras, one update at a time.

States are also drawn as the published sampler of Q-chunking does, and shards of a data set replaced.

Also from demonstrations alone whose images are decoded beforehand, or stay in HDF5 files (raw, or JPEG rows) until a
batch shows them: with a cache that holds them all, and with one that holds a tenth.

python benchmarks/replay_sampling.py --json replay_sampling.json
"""

from __future__ import annotations

import dataclasses
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image
from support.cli_args import make_parser, write_figures
from support.noise import noise_episode

from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, ReplayConfig
from serl_chunk.config.robots import RobotConfig
from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats.hdf5 import write_episode
from serl_chunk.data.preprocess import fit_preprocess
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.replay.replay import Replay
from serl_chunk.types import CameraSpec, Episode, RobotSpec, SparseRows

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


def config_of(horizon: int, images: bool, **replay: Any) -> ExperimentConfig:
    """The robot's configuration; `replay`: fields of its replay."""
    return ExperimentConfig(
        name="benchmark",
        robot=RobotConfig(max_episode_steps=LENGTH),
        agent=AcrlpdConfig(image_keys=CAMERAS if images else ()),
        chunk=ChunkConfig(horizon),
        replay=ReplayConfig(human_capacity=1, **replay),
    )


def sampled(replay: Replay, rng: np.random.Generator, batch: int, seconds: float) -> tuple[int, float]:
    """Sample for `seconds`; returns the number of batches, and the time they took."""
    count, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < seconds:
        replay.sample(rng, batch, 1)
        count += 1
    return count, took


def measure(
    seconds: float, steps: int, *, batch: int, horizon: int, side: int, images: bool, adjacent: bool = False
) -> dict[str, float]:
    """Fill a replay with `steps` online steps and a tenth of demonstrations, then insert and sample for `seconds`.

    Then a data set's shard of half as many steps gives way to another one.
    """
    rng, spec = np.random.default_rng(0), robot(side)
    kinds = {"windows": "qc", "terminal_windows": "drop"} if adjacent else {}
    capacities = {"capacity": steps * 2, "demo_capacity": steps, "image_capacity": steps // horizon * 2}
    config = config_of(horizon, images, **capacities, **kinds)

    def episode(name: str) -> Episode:
        return noise_episode(name, spec, LENGTH, rng, image_every=horizon if images else 0)  # at every decision

    demos = [episode(f"d{k}") for k in range(max(1, steps // LENGTH // 10))]
    replay = Replay(spec, config, fit_preprocess(config, spec, demos), bc_on=config.imitated)
    replay.add_demo(*demos)
    count = steps // LENGTH
    start = time.perf_counter()
    for k in range(count):
        for record in episode(f"e{k}"):
            replay.insert("s", record)
    filled = time.perf_counter() - start
    batches, took = sampled(replay, rng, batch, seconds)
    stream = episode("live")
    replay.insert("s", stream.begin)
    singles = [stream.steps.slice(t, t + 1) for t in range(LENGTH)]
    start = time.perf_counter()
    for block in singles:
        replay.insert("s", block)
    live = time.perf_counter() - start
    shards = [[episode(f"{s}{k}") for k in range(max(1, count // 2))] for s in "xy"]
    replay.replace_demos(shards[0])
    start = time.perf_counter()
    replay.replace_demos(shards[1])
    replaced = time.perf_counter() - start
    stats = replay.stats()
    return {
        "batches_per_second": batches / took,
        "windows_per_second": batches * batch / took,
        "milliseconds_per_batch": 1000 * took / batches,
        "live_steps_inserted_per_second": LENGTH / live,
        "milliseconds_to_replace_1000_steps": 1e6 * replaced / (len(shards[1]) * LENGTH),
        "windows": stats["replay/windows"],
        "megabytes": stats["replay/bytes"] / 1e6,
        "seconds_to_fill": filled,
    }


def demo_files(folder: Path, count: int, side: int, jpeg: bool) -> None:
    """Demonstrations with two cameras read on every tick, raw in our layout, or as ALOHA's JPEG rows."""
    rng, spec = np.random.default_rng(0), robot(side)
    noise = rng.integers(0, 24, (LENGTH + 1, side, side, 3), np.uint8)
    slope = np.linspace(0, 200, side, dtype=np.uint8)[None, None, :, None]
    for k in range(count):
        e = noise_episode(f"d{k}", spec, LENGTH, rng)
        frames = noise + slope + np.uint8(k % 30)
        path = folder / f"episode_{k}.hdf5"
        if not jpeg:
            images = {f"images/{c}": SparseRows(np.arange(LENGTH, dtype=np.int32), frames[:LENGTH]) for c in CAMERAS}
            final = {"state": np.zeros(STATE, np.float32)} | {f"images/{c}": frames[-1] for c in CAMERAS}
            steps = dataclasses.replace(e.steps, sparse=images)
            write_episode(path, Episode(e.begin, steps, e.end._replace(final_observation=final)), spec)
            continue
        rows = [_jpeg(frame) for frame in frames]
        with h5py.File(path, "w") as file:
            file["/observations/qpos"] = rng.normal(size=(LENGTH + 1, STATE)).astype(np.float32)
            file["/action"] = rng.normal(size=(LENGTH + 1, ACTION)).astype(np.float32)
            padded = np.stack([np.pad(r, (0, max(map(len, rows)) - len(r))) for r in rows])
            for c in CAMERAS:
                file[f"/observations/images/{c}"] = padded


def _jpeg(frame: np.ndarray) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=90)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def measure_demos(seconds: float, count: int, *, batch: int, horizon: int, side: int) -> dict[str, float]:
    """Sample from `count` demonstrations for `seconds`, each of a few ways to hold their images."""
    out: dict[str, float] = {}
    spec, total = robot(side), count * (LENGTH + 1) * len(CAMERAS) * side * side * 3
    for stored, jpeg in (("raw", False), ("jpeg", True)):
        with tempfile.TemporaryDirectory() as name:
            demo_files(Path(name), count, side, jpeg)
            # Plain files hold joints only: the state of this robot has as many.
            used = dataclasses.replace(spec, joint_of_action=(-1,) * ACTION) if jpeg else spec
            options = ReadOptions(color="rgb", success=True)
            for held, cache in (("decoded", 0), ("all_cached", total), ("tenth_cached", total // 10)):
                start = time.perf_counter()
                demos = load_demos([name], used, options=options).episodes
                demos = [decode_images(d) for d in demos] if held == "decoded" else demos
                rows = count * (LENGTH + 1)
                capacities = {"capacity": LENGTH * 2, "demo_capacity": rows, "image_capacity": rows}
                config = config_of(horizon, True, **capacities, frame_cache_bytes=cache)
                replay = Replay(used, config, fit_preprocess(config, used, demos), bc_on=config.imitated)
                replay.add_demo(*demos)
                loaded, rng = time.perf_counter() - start, np.random.default_rng(1)
                warm = 0
                while held == "all_cached" and replay.stats()["replay/frame_cache_bytes"] < 0.95 * total and warm < 400:
                    replay.sample(rng, batch, 1)
                    warm += 1
                for _ in range(10 if held == "tenth_cached" else 2):
                    replay.sample(rng, batch, 1)
                batches, took = sampled(replay, rng, batch, seconds)
                key = f"demos_{stored}_{held}"
                out[f"{key}_milliseconds_per_batch"] = 1000 * took / batches
                out[f"{key}_seconds_to_load"] = loaded
                out[f"{key}_megabytes"] = replay.stats()["replay/bytes"] / 1e6
                del replay, demos
    return out


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--horizon", type=int, default=5)
    parser.add_argument("--side", type=int, default=128, help="pixels of a square camera image")
    parser.add_argument("--steps", type=int, default=20_000, help="online steps in the replay")
    parser.add_argument("--demos", type=int, default=100, help="demonstrations that are sampled from; 0: none")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to sample, per case")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    sizes = {"batch": args.batch, "horizon": args.horizon, "side": args.side}
    for name, images, adjacent in (
        ("state", False, False),
        ("state_adjacent", False, True),
        ("two_cameras", True, False),
    ):
        case = measure(args.seconds, args.steps, **sizes, images=images, adjacent=adjacent)
        figures |= {f"{name}_{key}": round(value, 3) for key, value in case.items()}
    if args.demos:
        measured = measure_demos(args.seconds, args.demos, **sizes)
        figures |= {key: round(value, 3) for key, value in measured.items()}
    for key, value in figures.items():
        print(f"{key:45s} {value:>14,.3f}")
    write_figures(args, figures)


if __name__ == "__main__":
    main()
