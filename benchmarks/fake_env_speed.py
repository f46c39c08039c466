"""Steps per second of the fake ALOHA on one core, and its scripted expert's success: a few seconds.

    python benchmarks/fake_env_speed.py [--steps 20000] [--episodes 200] [--json FILE]

`steps_per_second` measures `step` alone with random commands, resets included; `images_per_second` counts frames
of one camera; `expert_*` are success rate, episode lengths in ticks (of successes) and microseconds per command.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.fake.env import FakeAlohaEnv


def steps_per_second(env: FakeAlohaEnv, steps: int) -> float:
    """Environment steps per second under random commands."""
    env.reset(seed=0)
    low, high = np.asarray(env.robot_spec.action_low), np.asarray(env.robot_spec.action_high)
    commands = np.random.default_rng(0).uniform(low, high, (1000, len(low))).astype(np.float32)
    begin = time.perf_counter()
    for i in range(steps):
        _, _, terminated, truncated, _ = env.step(commands[i % len(commands)])
        if terminated or truncated:
            env.reset()
    return steps / (time.perf_counter() - begin)


def images_per_second(env: FakeAlohaEnv, rounds: int) -> float:
    """Frames per second, all cameras taken together."""
    env.reset(seed=0)
    begin = time.perf_counter()
    for _ in range(rounds):
        env.read_images()
    return rounds * len(env.robot_spec.cameras) / (time.perf_counter() - begin)


def expert_figures(env: FakeAlohaEnv, episodes: int) -> dict[str, float]:
    """Success, lengths and cost of the scripted expert on `episodes` start states."""
    expert = env.make_expert()
    lengths, acting, acts = [], 0.0, 0
    for seed in range(episodes):
        env.reset(seed=seed)
        expert.reset(seed)
        terminated = truncated = False
        while not (terminated or truncated):
            begin = time.perf_counter()
            command = expert.act()
            acting += time.perf_counter() - begin
            acts += 1
            _, _, terminated, truncated, _ = env.step(command)
        if terminated:
            lengths.append(env.tick)
    return {
        "expert_success_rate": len(lengths) / episodes,
        "expert_mean_length": float(np.mean(lengths)),
        "expert_max_length": float(np.max(lengths)),
        "expert_microseconds": 1e6 * acting / acts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    env = FakeAlohaEnv(FakeAlohaConfig())
    figures = {
        "steps_per_second": steps_per_second(env, args.steps),
        "images_per_second": images_per_second(env, max(args.steps // 100, 1)),
        **expert_figures(env, args.episodes),
    }
    for name, value in figures.items():
        print(f"{name}: {value:.4g}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
