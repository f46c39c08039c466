"""Speed of aloha_sim, and how often its scripted expert succeeds.

    python benchmarks/aloha_sim_speed.py [--steps 300] [--image-size 128] [--seeds 50] [--noise 0.0] [--json FILE]

Three cases, in steps per second over the expert's episodes: no camera read; all cameras at every step; all cameras
at decisions (every 5 steps). Then the expert's success over `--seeds` start states.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots.aloha_sim.env import AlohaSimEnv


def steps_per_second(env: AlohaSimEnv, steps: int, images_every: int) -> float:
    """Control steps per second of wall time; `images_every` 0 never renders."""
    expert = env.make_expert()
    env.reset(seed=0)
    expert.reset(0)
    actions = [expert.act() for _ in range(180)]  # a whole transfer; planned before the clock starts
    if images_every:
        env.read_images()  # makes the OpenGL context
    start = time.perf_counter()
    for i in range(steps):
        if i % len(actions) == 0:
            env.reset(seed=i)
        env.step(actions[i % len(actions)])
        if images_every and i % images_every == 0:
            env.read_images()
    return steps / (time.perf_counter() - start)


def expert_ticks(env: AlohaSimEnv, seeds: int, noise: float) -> list[int]:
    """Ticks to success of the episodes that succeeded, start states 0..seeds-1."""
    expert = env.make_expert()
    expert.noise = noise
    ticks = []
    for seed in range(seeds):
        env.reset(seed=seed)
        expert.reset(seed)
        terminated = truncated = False
        while not (terminated or truncated):
            _, _, terminated, truncated, _ = env.step(expert.act())
        if terminated:
            ticks.append(env.tick)
    return ticks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--noise", type=float, default=0.0, help="of the expert, rad")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    env = AlohaSimEnv(AlohaSimConfig(image_size=args.image_size))
    figures: dict[str, float] = {
        "steps_per_second_without_images": steps_per_second(env, 10 * args.steps, 0),
        "steps_per_second_images_every_step": steps_per_second(env, args.steps, 1),
        "steps_per_second_images_every_5_steps": steps_per_second(env, args.steps, 5),
    }
    if args.seeds:
        ticks = expert_ticks(env, args.seeds, args.noise)
        figures["expert_episodes"] = args.seeds
        figures["expert_success_rate"] = len(ticks) / args.seeds
        if ticks:
            figures["expert_mean_ticks"] = sum(ticks) / len(ticks)
    env.close()
    for name, value in figures.items():
        print(f"{name:40s} {value:10.3g}" if value < 10 else f"{name:40s} {value:10.1f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
