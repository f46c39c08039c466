"""Speed of a simulated robot, and how often its scripted expert succeeds.

    python benchmarks/robot_speed.py fake_aloha [--steps 20000] [--seeds 200] [--json FILE]
    python benchmarks/robot_speed.py aloha_sim [--steps 3000] [--image-size 128] [--seeds 50] [--noise 0.01]

Three cases, in steps per second, resets included: no camera is read; all cameras at every step, and at decisions (every
5 steps), over a tenth of the steps. The fake robot gets random commands, aloha_sim those of its expert. Then the
expert's success over `--seeds` start states, the ticks of its successes, and microseconds per command.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from support.cli_args import make_parser, write_figures

from serl_chunk.config.robots import AlohaSimConfig, FakeAlohaConfig
from serl_chunk.robots.registry import make_env

ROBOTS = {"fake_aloha": FakeAlohaConfig, "aloha_sim": AlohaSimConfig}


def commands_for(env: Any, robot: str) -> list[np.ndarray]:
    """Return the commands of an episode, which are made before the clock starts."""
    if robot == "aloha_sim":
        expert = env.make_expert()
        env.reset(seed=0)
        expert.reset(0)
        return [expert.act() for _ in range(180)]  # a whole transfer
    low, high = env.robot_spec.action_low, env.robot_spec.action_high
    return list(np.random.default_rng(0).uniform(low, high, (1000, len(low))).astype(np.float32))


def steps_per_second(env: Any, commands: list[np.ndarray], steps: int, images_every: int) -> float:
    """Control steps per second of wall time; `images_every` 0 never renders."""
    env.reset(seed=0)
    if images_every:
        env.read_images()  # makes the OpenGL context
    begin, ended = time.perf_counter(), False
    for i in range(steps):
        if ended or i % len(commands) == 0:
            env.reset(seed=i)
        _, _, terminated, truncated, _ = env.step(commands[i % len(commands)])
        ended = terminated or truncated
        if images_every and i % images_every == 0:
            env.read_images()
    return steps / (time.perf_counter() - begin)


def expert_figures(env: Any, seeds: int, noise: float | None) -> dict[str, float]:
    """Success, lengths and cost of the scripted expert, start states 0..seeds-1."""
    expert = env.make_expert()
    if noise is not None:
        if not hasattr(expert, "noise"):
            raise SystemExit("--noise has no effect on this robot's expert. Remove it.")
        expert.noise = noise
    lengths, acting, acts = [], 0.0, 0
    for seed in range(seeds):
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
    figures = {"expert_success_rate": len(lengths) / seeds, "expert_microseconds": 1e6 * acting / acts}
    more = {"expert_mean_ticks": float(np.mean(lengths)), "expert_max_ticks": max(lengths)} if lengths else {}
    return figures | more


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("robot", choices=ROBOTS)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--image-size", type=int, help="pixels; default: the robot's")
    parser.add_argument("--seeds", type=int, default=50, help="start states of the expert; 0: none")
    parser.add_argument("--noise", type=float, help="of the expert, rad; default: its own")
    args = parser.parse_args()
    size = {} if args.image_size is None else {"image_size": args.image_size}
    env = make_env(ROBOTS[args.robot](**size))
    commands = commands_for(env, args.robot)
    figures = {
        f"steps_per_second_{name}": steps_per_second(env, commands, steps, every)
        for name, steps, every in (
            ("without_images", args.steps, 0),
            ("images_every_step", args.steps // 10, 1),
            ("images_every_5_steps", args.steps // 10, 5),
        )
    }
    figures |= expert_figures(env, args.seeds, args.noise) if args.seeds else {}
    env.close()
    for name, value in figures.items():
        print(f"{name}: {value:.4g}")
    write_figures(args, figures)


if __name__ == "__main__":
    main()
