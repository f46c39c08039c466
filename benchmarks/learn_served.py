"""The fake ALOHA task trained in real time through a robot server; learner, actor and server are processes.

    python benchmarks/learn_served.py --seed 42 --out runs/benchmark_served --json served_learning.json

Ten scripted demonstrations are recorded through the server. Then `serl-chunk --learner --actor` trains with the
scripted human, who reads published joints and extras alone. The last checkpoint is evaluated on 100 held-out starts,
behind the server in real time and in this process in lockstep (`served_policy.py`). A run that was killed is resumed.
The robot moves at 50 Hz: training takes about half an hour on a quiet machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import learning
from support.cli_args import write_figures
from support.ports import free_port
from support.served import ROBOTS, ServedRobotProcess

from serl_chunk.runs.checkpoints import CheckpointStore

N_DEMOS = 10
HERE = Path(__file__).resolve().parent


def record(robot: ServedRobotProcess, demos: Path, count: int, overrides: Sequence[str] = ()) -> None:
    learning.product("record", "--n_demos", str(count), "--out", str(demos), "--policy", "scripted",
                     experiment="fake_aloha", overrides=[f"robot.server={robot.address}", *overrides])  # fmt: skip


def evaluated(run: Path, episodes: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Evaluate the last checkpoint behind the server and in lockstep; returns `served_policy.py`'s summary."""
    step = CheckpointStore(run).steps()[-1]
    file = run / f"served_{step}.json"
    line = [sys.executable, str(HERE / "served_policy.py"), str(run), f"--episodes={episodes}", f"--json={file}"]
    if subprocess.run([*line, *(f"--set={text}" for text in overrides)], check=False).returncode != 0:
        raise SystemExit("the evaluation failed; run the same command again to go on")
    return {"step": step, **json.loads(file.read_text())["summary"]}


def main() -> None:
    p = learning.parser(__doc__, "benchmark_served", of="of the training", seed=42)
    args = learning.arguments(p)
    seed = args.seed
    run, demos, servers = args.out / f"seed_{seed}", args.out / "demos", args.out / f"servers_{seed}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    sessions: list[dict[str, Any]] = json.loads(servers.read_text()) if servers.exists() else []
    with ServedRobotProcess(ROBOTS / "fake_aloha.toml") as robot:
        began = time.monotonic()
        try:
            record(robot, demos, N_DEMOS, args.set)
            learning.product(
                "--learner", "--actor", "--debug", "--seed", str(seed), "--port", str(free_port()),
                "--demo_path", str(demos), "--checkpoint_path", str(run), "--spool_path", str(args.out / "spool"),
                experiment="fake_aloha",
                overrides=[f"robot.server={robot.address}", "actor.clock=realtime", "actor.intervention=scripted",
                           *args.set],
            )  # fmt: skip
        finally:
            sessions.append({"seconds": time.monotonic() - began, **robot.figures()})
            servers.write_text(json.dumps(sessions, indent=1))
    result = {"seed": seed, "training": sessions, **evaluated(run, args.episodes, args.set)}
    write_figures(args, result)


if __name__ == "__main__":
    main()
