"""TransferCube by a simulated operator with two virtual SpaceMice: demonstrations, and training with interventions.

The operator (`support/simulated_operator.py`) sees the robot's state late and nothing else of the simulator; its mice
report below pyspacemouse.

    python benchmarks/operator_transfer_cube.py record --json operator_transfer_cube.json

records ten demonstrations in real time by `serl-chunk record --policy human`, through a robot server. Then

    python benchmarks/operator_transfer_cube.py ours --json operator_transfer_cube.json

trains from them in one process, on a simulated clock, while the operator watches and intervenes. A run in one process
keeps no steps on disk, so that an interrupted one is not resumed. The others are to be compared with it, and run after
it with the same `--json`: HG-DAgger has as many ticks of the operator as ours, `bc` the demonstrations alone, and
`bc-more` as many ticks as ours, all of them demonstrations. `bc-more-still` shows what moved joints do to that clone.
Each part evaluates its last checkpoint, `ours` all of them, on held-out starts
without the operator.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from support import learning
from support.cli_args import split
from support.curves import draw_curves
from support.results import Checkpoint, Results, Run, read, write
from support.served import ROBOTS, ServedRobotProcess
from support.simulated_operator import RATE, SimulatedOperator
from support.stepped_operator import operated
from support.transfer_task import TransferCube
from support.virtual_mice import NAMES, SOCKET, MouseReports, frames
from support.watching_operator import WatchingOperator

from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.operator import DeviceConfig
from serl_chunk.config.presets import configured
from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.learner.building import RunOptions
from serl_chunk.recording import recording
from serl_chunk.robots.aloha_sim.env import AlohaSimEnv
from serl_chunk.robots.arms import aloha_arms
from serl_chunk.robots.base import RobotEnv
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import IMAGE_PREFIX, STATE
from serl_chunk_robot.client.client import RobotClient

HERE = Path(__file__).resolve().parent
EXPERIMENT, N_DEMOS = "aloha_transfer_cube", 10
TRANSLATION, ROTATION = 0.3, 1.5  # m/s and rad/s at full deflection
# The scripted expert needs 165 ticks. The operator needs 300, and more where it has to grasp again.
LONGEST = 500
LAST = 20  # episodes of training whose share of human ticks is reported
STARTS_WITHIN = 120.0  # s, of the recording
PICTURE, TITLE, COLUMNS = 160, 14, 8  # pixels of a picture and of the line above a row, and pictures of a row
JOINTS = 14
SUMMARY = re.compile(r"(\d+) demonstrations? recorded in (\d+) episodes?")


def overrides(mice: Path) -> list[tuple[str, str]]:
    """Settings that recording and training have in common."""
    return [
        ("robot.max_episode_steps", str(LONGEST)),
        ("actor.intervention", "spacemouse"),
        ("device.paths", ",".join(str(mice / name) for name in NAMES)),
        ("device.translation", str(TRANSLATION)),
        ("device.rotation", str(ROTATION)),
        ("device.gripper", "press"),
    ]


def operate(robot: str, mice: Path, process: subprocess.Popen[str], operator: SimulatedOperator) -> dict[str, Any]:
    """Be the operator of a recording until it ends; returns how late the reports were.

    Reports go out every 8 ms. A machine that stood still does not make up for those that it missed.
    """
    ends = time.monotonic() + STARTS_WITHIN
    while not (mice / SOCKET).exists():
        if process.poll() is not None or time.monotonic() > ends:
            raise SystemExit("the recording did not start")
        time.sleep(0.05)
    late, reports = [], [MouseReports(), MouseReports()]
    with socket.socket(socket.AF_UNIX) as s, RobotClient(robot, name="eyes") as eyes:
        s.connect(str(mice / SOCKET))
        due, last = time.monotonic(), -1
        while process.poll() is None:
            state = eyes.newest_state()
            if state is not None and state["q"] is not None and state["pass"] != last:
                last = state["pass"]
                operator.see(time.monotonic(), state["q"], state["extra"]["objects"], state["state"] == "RUN")
            hands = operator.hands(due)
            try:
                s.sendall(frames(reports, hands))
            except OSError:  # the recording has ended
                break
            late.append(time.monotonic() - due)
            due += 1 / RATE
            if time.monotonic() > due + 0.1:
                due = time.monotonic()
            time.sleep(max(0.0, due - time.monotonic()))
    p50, p99 = np.percentile(1e3 * np.array(late), (50, 99))
    return {"reports": len(late), "late_p50_ms": float(p50), "late_p99_ms": float(p99), "late_max_ms": 1e3 * max(late)}


def record(args: argparse.Namespace) -> dict[str, Any]:
    """Record demonstrations through a served robot in real time; returns their figures."""
    demos = args.out / "demos"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mice_") as folder, ServedRobotProcess(ROBOTS / "aloha_sim.toml") as robot:
        mice = Path(folder)
        settings = [*overrides(mice), ("robot.server", robot.address), *(text.split("=", 1) for text in args.set)]
        line = [sys.executable, str(HERE / "support" / "virtual_mice.py"), folder, "record", "--exp_name", EXPERIMENT,
                "--policy", "human", "--n_demos", str(args.demos), "--out", str(demos),
                *(f"--config.{name}={value}" for name, value in settings)]  # fmt: skip
        log = args.out / "record.log"
        operator = SimulatedOperator(
            aloha_arms(), TransferCube(), translation=TRANSLATION, rotation=ROTATION, seed=args.seed
        )
        with log.open("w") as file:
            process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, text=True)
            try:
                late = operate(robot.address, mice, process, operator)
            finally:
                if process.poll() is None:
                    process.terminate()
                process.wait()
        text = log.read_text()
        print(text)
        found = SUMMARY.search(text)
        if process.returncode or found is None:
            raise SystemExit("the recording failed")
        served = robot.figures()
    if args.png:
        draw_demonstrations(demos, args.png)
    return {
        "demonstrations": int(found[1]), "attempts": int(found[2]), "seconds": time.monotonic() - began,
        "lengths": lengths(demos), "operator": late, "server": served,
    }  # fmt: skip


class Method(NamedTuple):
    """What is changed of the experiment."""

    preset: str | None
    settings: tuple[str, ...]


POLICY = ("agent.bc_joint_noise=0.7",)  # about 0.03 rad: demonstrations by hand tremble
# The operator watches for 1.5 s and reacts 0.4 s later.
LEARNER = ("learner.max_steps=36000", "learner.utd_ratio=0.5", "learner.checkpoint_period=5000",
           "learner.keep_checkpoints=20", "learner.pretrain_steps=6000", "learner.warmup_episodes=5",
           "replay.exclude_before_takeover=2")  # fmt: skip
# Sizes and averages of our policy, which the presets do not have.
CLONE = ("agent.flow.hidden=256,256", "agent.flow.steps=5", "agent.policy_updates=3", "agent.policy_ema=0.999",
         "chunk.horizon=10")  # fmt: skip
OFFLINE = ("learner.pretrain_steps=12000", "learner.max_steps=1", "learner.warmup_episodes=1",
           "learner.training_starts=0", "learner.critic_pretrain_steps=0",
           "actor.max_human_ticks=1")  # fmt: skip
METHODS = {
    "ours": Method(None, (*LEARNER, *POLICY)),
    "hg-dagger": Method("hg-dagger", (*CLONE, *POLICY, *LEARNER)),
    "bc": Method("bc", (*CLONE, *POLICY, *OFFLINE)),
    # With `more_demonstrations`, and without moved joints.
    "bc-more": Method("bc", (*CLONE, *POLICY, *OFFLINE)),
    "bc-more-still": Method("bc", (*CLONE, *POLICY, *OFFLINE, "agent.bc_joint_noise=0")),
}


def train(args: argparse.Namespace, there: Results | None) -> Run:
    """Train one method, where that was not done, and evaluate it. `there`: the other parts' results."""
    run, mice, method = args.out / f"{args.part}_{args.seed}", args.out / "mice", METHODS[args.part]
    mice.mkdir(exist_ok=True)
    texts = [split(text) for text in (*method.settings, *args.set)]
    common = [("seed", str(args.seed)), *overrides(mice)]
    if args.part == "hg-dagger":
        texts.append(("actor.max_human_ticks", str(int(ours(there, args.seed).figures["human_ticks"]))))
    config = configured(load_experiment(EXPERIMENT), [*common, *texts], preset=method.preset)

    def make(config: ExperimentConfig, env: RobotEnv) -> SimulatedOperator:
        return SimulatedOperator(
            aloha_arms(), WatchingOperator(), translation=TRANSLATION, rotation=ROTATION, seed=args.seed
        )

    demos = [str(args.out / "demos")]
    if args.part.startswith("bc-more"):
        count = math.ceil(ours(there, args.seed).figures["human_ticks"] / np.mean(lengths(args.out / "demos")))
        demos.append(str(more_demonstrations(config, mice, count, args)))
    done = CheckpointStore(run).steps() if run.exists() else []
    if done and done[-1] < config.learner.max_steps and not args.as_it_is:
        raise SystemExit(f"{run}: it was interrupted at update {done[-1]}, and its steps are lost. Remove it")
    if not done:
        with operated(mice, make):
            train_local(config, RunOptions(demos, str(run)))
    rows = read_metrics(run)
    demonstrated = sum(sum(lengths(Path(folder))) for folder in demos)
    points = evaluated(config, run, args)
    if args.part.startswith("bc"):  # `OFFLINE` lets the operator act for one tick, which a clone does not imitate
        points = [dataclasses.replace(point, human_ticks=None) for point in points]
    points[-1] = dataclasses.replace(points[-1], wall=rows["event"][-1]["wall"])
    preset = [f"preset={method.preset}"] if method.preset else []
    figures = {"demonstrated_ticks": demonstrated, **human_share(rows["episode"])}
    return Run(args.part, args.seed, EXPERIMENT, [*preset, *method.settings, *args.set], points, figures)


class InstantClock:
    """A clock on which nothing has to be waited for."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep_until(self, moment: float) -> None:
        self._now = max(self._now, moment)


def ours(there: Results | None, seed: int) -> Run:
    """Return the run `ours` of a seed, which has the number of the operator's ticks that the others get."""
    for run in there.runs if there else ():
        if (run.name, run.seed) == ("ours", seed):
            return run
    raise SystemExit("run the part ours before this one, with the same --json and --seed")


def more_demonstrations(config: ExperimentConfig, mice: Path, count: int, args: argparse.Namespace) -> Path:
    """Record `count` demonstrations of the same operator on the simulated clock; returns their folder."""
    folder = args.out / f"more_{count}"

    def make(config: ExperimentConfig, env: RobotEnv) -> SimulatedOperator:
        return SimulatedOperator(
            aloha_arms(), TransferCube(), translation=TRANSLATION, rotation=ROTATION, seed=args.seed + 1
        )

    with operated(mice, make), patch.object(recording, "Clock", InstantClock):
        run_record(config, count, str(folder), policy="human", noise=None, cameras=())
    return folder


def evaluated(config: ExperimentConfig, run: Path, args: argparse.Namespace) -> list[Checkpoint]:
    """Evaluate checkpoints on held-out starts without the operator."""
    config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, intervention="none"))
    trained = learning.Trained(dataclasses.replace(config, device=DeviceConfig()), run)
    steps = trained.steps if args.part == "ours" and not args.as_it_is else trained.steps[-1:]
    return [trained.evaluate(step, args.episodes) for step in steps]


def human_share(episodes: list[dict[str, Any]]) -> dict[str, float]:
    """Return the operator's ticks, and their share of the last episodes of training."""
    last = episodes[-LAST:]
    return {
        "episodes": len(episodes),
        "human_ticks": episodes[-1]["human_ticks"] if episodes else 0,
        "last_share": sum(e["intervention_steps"] for e in last) / sum(e["episode/l"] for e in last) if last else 0.0,
    }


def draw_demonstrations(demos: Path, path: Path) -> None:
    """Draw the first demonstrations from their states: a row for each, time from left to right."""
    from PIL import Image, ImageDraw

    files = sorted(demos.glob("*.hdf5"))[:5]
    env = AlohaSimEnv(AlohaSimConfig(cameras=("angle",), image_size=PICTURE))
    picture = Image.new("RGB", (COLUMNS * PICTURE, len(files) * (PICTURE + TITLE)), "white")
    for y, file in enumerate(files):
        episode = read_episode(file, cameras=())
        states, top = episode.steps.observation[STATE].astype(np.float64), y * (PICTURE + TITLE)
        ImageDraw.Draw(picture).text((2, top + 1), f"{file.name}: {episode.end.length} ticks", (0, 0, 0))
        for x, tick in enumerate(np.linspace(0, len(states) - 1, COLUMNS).astype(int)):
            env.place(states[tick, :JOINTS], states[tick, JOINTS:])
            frame = env.read_images(["angle"])[IMAGE_PREFIX + "angle"]
            picture.paste(Image.fromarray(frame), (x * PICTURE, top + TITLE))
    env.close()
    picture.save(path)


def lengths(demos: Path) -> list[int]:
    return [read_episode(file, cameras=()).end.length for file in sorted(demos.glob("*.hdf5"))]


def main() -> None:
    p = learning.parser(__doc__, "benchmark_operator", of="of the experiment", seed=42)
    p.add_argument("part", choices=("record", *METHODS, "plot"))
    p.add_argument("--demos", type=int, default=N_DEMOS, help="to be recorded")
    p.add_argument("--as_it_is", action="store_true", help="evaluate the newest checkpoint of a run that goes on")
    p.add_argument("--png", type=Path, help="of record: pictures of the demonstrations; of plot: the curve of --json")
    args = learning.arguments(p)
    there = read(args.json) if args.json and args.json.exists() else None
    if args.part == "plot":
        if there is None or args.png is None:
            p.error("plot: needs --json of the other parts, and --png")
        axes = {"ticks of the operator": lambda run, c: run.figures["demonstrated_ticks"] + (c.human_ticks or 0)}
        draw_curves(there.runs, args.png, axes)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    run, details = (None, {"record": record(args)}) if args.part == "record" else (train(args, there), {})
    print(json.dumps(run.figures if run else details, indent=1))
    if args.json:
        write(args.json, [run] if run else [], details=details, join=True)


if __name__ == "__main__":
    main()
