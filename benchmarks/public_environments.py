"""Environments of other projects as they are: each is made by `gymnasium.make`, and trained for a few updates.

    pip install gymnasium-robotics gym-pusht panda-gym shimmy highway-env minigrid box2d gym-hil
    python benchmarks/public_environments.py [--only Pendulum-v1,PandaReach-v3] [--json FILE]

Needs the packages of the environments that are asked for, in this package's Python; metaworld pins a MuJoCo of its own,
so that it needs an environment of its own. Each runs `serl-chunk --local` in a process of its own: warm-up episodes,
then updates. An environment passes where that ends with exit status 0. The last column is what the command printed
otherwise; some cannot be used unchanged, and the sentence then names the wrapper.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
from support.cli_args import chosen, make_parser, write_figures

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, LearnerConfig, NormaliserConfig, ReplayConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.version import version_info


class Public(NamedTuple):
    """An environment that `gymnasium.make` builds once `module` is imported."""

    package: str
    module: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed


ENVIRONMENTS = {
    "Pendulum-v1": Public("gymnasium"),
    "MountainCarContinuous-v0": Public("gymnasium"),
    "LunarLanderContinuous-v3": Public("box2d"),
    "BipedalWalker-v3": Public("box2d"),
    "Reacher-v5": Public("mujoco"),
    "InvertedPendulum-v5": Public("mujoco"),
    "FetchPickAndPlace-v4": Public("gymnasium-robotics", "gymnasium_robotics"),
    "AdroitHandDoor-v1": Public("gymnasium-robotics", "gymnasium_robotics"),
    "PointMaze_UMaze-v3": Public("gymnasium-robotics", "gymnasium_robotics"),
    "FrankaKitchen-v1": Public("gymnasium-robotics", "gymnasium_robotics"),
    "gym_pusht/PushT-v0": Public("gym-pusht", "gym_pusht"),
    "PandaReach-v3": Public("panda-gym", "panda_gym"),
    "PandaPickAndPlace-v3": Public("panda-gym", "panda_gym"),
    "dm_control/cartpole-balance-v0": Public("shimmy[dm-control]", "shimmy"),
    "dm_control/manipulator-bring_ball-v0": Public("shimmy[dm-control]", "shimmy"),
    "parking-v0": Public("highway-env", "highway_env"),
    "gym_hil/PandaPickCubeBase-v0": Public("gym-hil", "gym_hil"),
    "gym_aloha/AlohaTransferCube-v0": Public("gym-aloha", "gym_aloha", {"obs_type": "pixels_agent_pos"}),
    "robosuite/Lift": Public("robosuite==1.5.2", "robosuite"),
    "Meta-World/MT1": Public("metaworld", "metaworld", {"env_name": "reach-v3"}),
    # Not unchanged: a matrix, pictures alone, choices.
    "highway-v0": Public("highway-env", "highway_env", {"config": {"action": {"type": "ContinuousAction"}}}),
    "CarRacing-v3": Public("box2d"),
    "MiniGrid-Empty-5x5-v0": Public("minigrid", "minigrid"),
}
TICKS, UPDATES = 50, 20


def make(name: str) -> gymnasium.Env[Any, Any]:
    """Return the environment as its project makes it."""
    public = ENVIRONMENTS[name]
    if public.module == "robosuite":  # which registers nothing
        suite, wrappers = importlib.import_module("robosuite"), importlib.import_module("robosuite.wrappers")
        task = name.rpartition("/")[2]
        off = dict.fromkeys(("has_renderer", "has_offscreen_renderer", "use_camera_obs"), False)
        return wrappers.GymWrapper(suite.make(task, robots="Panda", **off))
    if public.module:
        gymnasium.register_envs(importlib.import_module(public.module))
    return gymnasium.make(name, **public.options)


def experiment(name: str) -> ExperimentConfig:
    """Return a small experiment without demonstrations; `--exp_name public_environments.py:NAME`."""
    return ExperimentConfig(
        name="public",
        robot=GymConfig(make=lambda fake_env: make(name), robot_name=name, max_episode_steps=TICKS),
        agent=AcfqlConfig(critic=CriticConfig(hidden=(16,)), flow=FlowConfig(hidden=(16,))),
        chunk=ChunkConfig(horizon=5),
        normaliser=NormaliserConfig(actions="absolute_range"),
        replay=ReplayConfig(capacity=2_000, image_capacity=500),
        learner=LearnerConfig(
            max_steps=UPDATES, pretrain_steps=0, critic_pretrain_steps=0, warmup_episodes=2, batch_size=16,
            steps_per_update=10, log_period=10, checkpoint_period=0, utd_ratio=0.5, training_starts=TICKS,
        ),
        discount=0.97,
    )  # fmt: skip


def tried(name: str, folder: Path) -> dict[str, Any]:
    """Train `name` by the command; return its status, seconds, and the last line that it printed of an error."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "serl_chunk", "--exp_name", f"{Path(__file__).resolve()}:{name}", "--local"]
    command += ["--debug", "--checkpoint_path", str(folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    warnings = [line.partition("WARNING")[2].strip() for line in printed if "reports no success" in line]
    error = printed[-1] if done.returncode and printed else ""
    seconds = time.perf_counter() - began
    return {"package": ENVIRONMENTS[name].package, "status": done.returncode, "seconds": round(seconds, 1),
            "traceback": "Traceback" in done.stderr, "error": error, "warnings": warnings}  # fmt: skip


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("--only", default="all", metavar="ID,...", help="environments (default: all)")
    args = p.parse_args()
    figures = {}
    for name in chosen(p, args.only, ENVIRONMENTS, "environment"):
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = row = tried(name, Path(folder))
        print(f"{name:40} {'trained' if row['status'] == 0 else 'FAILED '} {row['seconds']:5.0f} s  {row['error']}")
        write_figures(args, {"commit": version_info().commit, "runs": figures})
    print(f"{sum(row['status'] == 0 for row in figures.values())} of {len(figures)} trained")


if __name__ == "__main__":
    main()
