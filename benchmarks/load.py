"""A learner that trains while a fleet sends: what is acknowledged in time, and what of its updates is left.

Many actors in one process (`support/traffic.py`) send steps at the robot's rate to a learner of the product, whose
updates nothing limits; for comparison the same traffic goes to a server that keeps nothing, beside the same learner:

    python benchmarks/load.py --out runs/load --json load.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import learning
from support.cli_args import make_parser, write_figures
from support.ports import free_port
from support.traffic import Traffic

from serl_chunk.agents.registry import make_agent
from serl_chunk.config.compatibility import contract
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.transport.server.server import LearnerServer
from serl_chunk.transport.server.sessions import ServerHandler

TRAINS = {
    "actor.clock": "realtime", "actor.intervention": "none", "learner.utd_ratio": "none", "learner.pretrain_steps": "0",
    "learner.warmup_episodes": "1", "learner.max_steps": "100000000", "learner.checkpoint_period": "100000000",
    "learner.log_period": "10",
}  # fmt: skip
CASES = {
    "64 actors, step by step": ("fake_aloha", {"sessions": 64}),
    "200 actors, blocks of five": ("fake_aloha", {"sessions": 200, "block": 5}),
    "16 actors, three cameras at decisions": ("fake_aloha_images", {"sessions": 16}),
}
DEMOS = 10


def changes(experiment: str) -> list[tuple[str, str]]:
    images = {"robot.image_size": "128", "replay.image_capacity": "20000"} if experiment == "fake_aloha_images" else {}
    return list((TRAINS | images).items())


@contextlib.contextmanager
def learning_at(port: int, config: ExperimentConfig, demos: Path, run: Path) -> Iterator[None]:
    """A learner in a process of its own."""
    words = [sys.executable, "-m", "serl_chunk", "--learner", "--debug", "--exp_name", config.name, "--port", str(port)]
    words += ["--demo_path", str(demos), "--checkpoint_path", str(run)]
    words += [f"--config.{path}={value}" for path, value in changes(config.name)]
    with run.with_suffix(".log").open("w") as log:
        learner = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            yield
        finally:
            learner.terminate()
            learner.wait(120)


def send(traffic: Traffic, port: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "support.traffic", str(port), json.dumps(dataclasses.asdict(traffic))]
    return dict(
        json.loads(subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, check=True).stdout)
    )


def updates(run: Path) -> tuple[int, float]:
    """Return the newest row's updates, and its wall time."""
    rows = read_metrics(run)["train"]
    return (int(rows[-1]["step"]), float(rows[-1]["wall"])) if rows else (0, 0.0)


def measure(name: str, seconds: float, out: Path) -> dict[str, float]:
    experiment, of = CASES[name]
    config = apply_overrides(load_experiment(experiment), changes(experiment))
    spec = robot_spec(config.robot)
    agreed = contract(config, spec, make_agent(config, spec).network_shape())
    sizes = {"state_dim": spec.state_dim, "action_dim": spec.action_dim, "hz": spec.control_hz}
    cameras = config.agent.image_keys
    traffic = Traffic(**of, **sizes, cameras=cameras, decision=config.chunk.executed, seconds=seconds)
    demos, run = out / f"{experiment}_demos", out / f"{experiment}_{os.getpid()}_{time.time_ns()}"
    learning.record(config, DEMOS, demos)
    port = free_port()
    with learning_at(port, config, demos, run), contextlib.closing(
        LearnerServer(
            dataclasses.replace(config.transport, max_sessions=1_000), ServerHandler(), bind="127.0.0.1",
            port=(sink := free_port()), contract={},
        )
    ) as nothing:  # fmt: skip
        nothing.start()
        deadline = time.monotonic() + 300
        while True:  # the first traffic fills the warm-up; then it compiles
            with contextlib.suppress(subprocess.CalledProcessError):  # it reads its demonstrations
                send(dataclasses.replace(traffic, seconds=5.0, contract=agreed), port)
                if updates(run)[0] >= 30:
                    break
            if time.monotonic() > deadline:
                raise SystemExit(f"{run}: no updates, see {run.with_suffix('.log')}")
            time.sleep(1.0)
        rates: dict[str, float] = {}
        figures: dict[str, float] = {}
        for kind, to, asked in (("sink", sink, {}), ("learner", port, agreed)):
            began = updates(run)
            found = send(dataclasses.replace(traffic, contract=asked), to)
            ended = updates(run)
            rates[kind] = (ended[0] - began[0]) / max(1e-9, ended[1] - began[1])
            if kind == "learner":
                figures = {key: float(value) for key, value in found.items()}
    share = figures["acknowledged"] / figures["asked"]
    return {**figures, "share": share, "updates_per_s": rates["learner"], "updates_per_s_sink": rates["sink"]}


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("--seconds", type=float, default=60.0, help="of each traffic")
    p.add_argument("--out", type=Path, default=Path("runs/load"), help="folder of the runs")
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    figures = {}
    for name in CASES:
        row = figures[name] = measure(name, args.seconds, args.out)
        kept = row["updates_per_s"] / max(1e-9, row["updates_per_s_sink"])
        print(f"{name}: {row['share']:.1%} of {row['asked'] / args.seconds:.0f} steps/s acknowledged, p50 "
              f"{row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.0f} ms; {row['updates_per_s']:.1f} updates/s, "
              f"{kept:.2f} of those beside a sink", flush=True)  # fmt: skip
    write_figures(args, figures)


if __name__ == "__main__":
    main()
