"""The fake ALOHA task from three cameras: what a frame and an update cost, and what learning reaches.

`--costs` measures alone: milliseconds of a rendered frame, of an update, and of the same update without cameras; the
difference is what pictures cost there (sampling their frames, the encoder's two passes). Without it the experiment is
trained too (resumable) and its checkpoints are evaluated, the last one on 100 starts that no other command uses:

    python benchmarks/learn_fake_aloha_images.py --costs
    python benchmarks/learn_fake_aloha_images.py --json fake_aloha_images.json
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from support import learning
from support.cli_args import write_figures
from support.results import Run, write

from serl_chunk.agents.registry import make_agent
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.data.preprocess import fit_preprocess
from serl_chunk.replay.replay import BatchLoader, Replay, Request
from serl_chunk.robots.fake import render as renderer
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.checkpoints import CheckpointStore

N_DEMOS = 30


class RenderClock:
    """Seconds and frames of every call of the fake robot's renderer in this process, from here on."""

    def __init__(self) -> None:
        self.seconds, self.frames = 0.0, 0
        inner = renderer.render

        def timed(*args: Any) -> np.ndarray:
            begin = time.perf_counter()
            frame = inner(*args)
            self.seconds += time.perf_counter() - begin
            self.frames += 1
            return frame

        renderer.render = timed


def update_seconds(config: ExperimentConfig, demos: Path, seconds: float) -> dict[str, float]:
    """Medians of one update, one of the policy alone, and of drawing one batch, on the demonstrations."""
    cameras = config.agent.image_keys
    episodes = [read_episode(file, cameras=cameras) for file in sorted(demos.glob("episode_*.hdf5"))[:4]]
    env = make_env(config.robot)
    spec, rng = env.robot_spec, np.random.default_rng(0)
    agent = make_agent(config, spec)
    replay = Replay(spec, config, fit_preprocess(config, spec, episodes), bc_on=config.imitated)
    replay.add_demo(*episodes)
    loader = BatchLoader(replay, rng, put=jax.device_put)
    state, base = agent.init(jax.random.key(0)), agent.new_base(jax.random.key(1))
    times: dict[str, list[float]] = {"update": [], "policy": [], "draw": []}
    asked = Request("critic", 1, config.learner.batch_size)
    warm = loader.next(asked)
    state, _ = agent.update(state, base, warm)  # these two compile
    state, metrics = agent.update_policy(state, base, warm["critic"])
    jax.block_until_ready(metrics)
    begin = time.perf_counter()
    while len(times["draw"]) < 3 or time.perf_counter() - begin < seconds:
        t0 = time.perf_counter()
        batch = jax.block_until_ready(loader.next(asked))
        t1 = time.perf_counter()
        state, metrics = agent.update(state, base, batch)
        jax.block_until_ready(metrics)
        t2 = time.perf_counter()
        state, metrics = agent.update_policy(state, base, batch["critic"])
        jax.block_until_ready(metrics)
        t3 = time.perf_counter()
        for name, value in (("draw", t1 - t0), ("update", t2 - t1), ("policy", t3 - t2)):
            times[name].append(value)
    loader.close()
    return {name: statistics.median(values) for name, values in times.items()}


def costs(config: ExperimentConfig, demos: Path, seconds: float) -> dict[str, float]:
    """Milliseconds of a frame and of the parts of an update, with and without cameras; printed."""
    env = make_env(config.robot)
    env.reset(seed=0)
    begin, rounds = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds / 4:
        env.read_images()
        rounds += 1
    out = {"frame_ms": 1000 * (time.perf_counter() - begin) / (rounds * len(env.robot_spec.cameras))}
    blind = dataclasses.replace(config, agent=dataclasses.replace(config.agent, image_keys=()))
    for name, c in (("cameras", config), ("blind", blind)):
        out |= {f"{name}_{part}_ms": 1000 * s for part, s in update_seconds(c, demos, seconds).items()}
    print(", ".join(f"{name} {value:.2f}" for name, value in out.items()), flush=True)
    return out


def timed(config: ExperimentConfig, demos: Path, run: Path, cost: dict[str, float]) -> tuple[learning.Trained, Any]:
    """Train or resume `run`; returns it, and where the time of its last process went."""
    clock, begin, first = RenderClock(), time.perf_counter(), CheckpointStore(run).newest()
    # A longer run goes on where a shorter one ended: what was measured of its checkpoints stays true.
    plan, but = [len(list(demos.glob("*.hdf5")))], ("learner.max_steps",)
    trained = learning.train(config, run, [demos], plan, but=but)
    wall, updates = time.perf_counter() - begin, trained.steps[-1] - (first or 0)
    pretraining = config.learner.pretrain_steps if first is None else 0

    def times() -> dict[str, float]:
        pictures = {
            part: max(0.0, cost[f"cameras_{part}_ms"] - cost[f"blind_{part}_ms"]) / 1000
            for part in ("update", "policy", "draw")
        }
        encoder = updates * pictures["update"] + pretraining * pictures["policy"]
        drawing = (updates + pretraining) * pictures["draw"]
        return {"wall": wall, "rendering": clock.seconds, "frames": clock.frames, "encoder": encoder,
                "drawing": drawing, "rest": wall - clock.seconds - encoder - drawing}  # fmt: skip

    return trained, trained.kept(f"times_{trained.steps[-1]}", times)


def main() -> None:
    p = learning.parser(__doc__, "benchmark_fake_aloha_images", of="of the experiment", seeds="42")
    p.add_argument("--costs", action="store_true", help="measure what frames and updates cost, and stop")
    p.add_argument("--seconds", type=float, default=20.0, help="of measuring, for each of the two updates")
    p.add_argument("--demos", type=int, default=N_DEMOS, help="scripted demonstrations")
    args = learning.arguments(p)
    base = apply_overrides(load_experiment("fake_aloha_images"), args.overrides)
    demos = args.out / f"demos_{base.robot.image_size}"  # type: ignore[attr-defined]
    learning.record(base, args.demos, demos)
    if (there := len(list(demos.glob("*.hdf5")))) != args.demos:
        p.error(f"--demos={args.demos}: {demos} holds {there}; give another --out")
    cost, runs, details = costs(base, demos, args.seconds), [], {}
    if args.costs:
        write_figures(args, cost)
        return
    for seed in args.seeds:
        trained, times = timed(dataclasses.replace(base, seed=seed), demos, args.out / f"seed_{seed}", cost)
        runs.append(Run(base.name, seed, base.name, args.set, trained.curve(trained.steps, args.episodes)))
        shares = ", ".join(f"{k} {100 * times[k] / times['wall']:.0f} %" for k in ("rendering", "encoder", "drawing"))
        print(f"the last process: {times['wall']:.0f} s, of which {shares}; {times['frames']} frames", flush=True)
        details = {"costs": cost, "times": times}
    if args.json:
        write(args.json, runs, details=details)


if __name__ == "__main__":
    main()
