"""The fake ALOHA task trained in real time through a robot server; learner, actor and server are processes.

    python benchmarks/learn_served.py --seed 42 --out runs/benchmark_served --json served_learning.json

Ten scripted demonstrations are recorded through the server. Then `serl-chunk --learner --actor` trains with the
scripted human, who reads published joints and extras alone. The last checkpoint is evaluated on 100 held-out starts,
behind the server in real time and in this process in lockstep (`served_policy.py`). A run that was killed is resumed.
The robot moves at 50 Hz: training takes about half an hour on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.cli_args import add_settings
from support.ports import free_port
from support.served import ROBOTS, ServedRobotProcess

from serl_chunk.runs.checkpoints import CheckpointStore

N_DEMOS = 10
HERE = Path(__file__).resolve().parent


def command(robot: ServedRobotProcess, *words: str, settings: list[str]) -> None:
    """Run one `serl-chunk` command against the served robot. Raises SystemExit where it fails."""
    overrides = [f"--config.robot.server={robot.address}", *(f"--config.{text}" for text in settings)]
    line = [sys.executable, "-m", "serl_chunk", *words, "--exp_name", "fake_aloha", *overrides]
    print("$", *line[2:], flush=True)
    if subprocess.run(line, check=False).returncode != 0:
        raise SystemExit(f"{' '.join(line[2:])} failed; run the same command again to go on")


def main() -> None:
    """Record, train (or resume), evaluate, print and write the figures."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--episodes", type=int, default=100, help="held-out starts of the evaluation")
    p.add_argument("--out", type=Path, default=Path("runs/benchmark_served"))
    p.add_argument("--json", type=Path, help="write the figures here")
    add_settings(p, "of the training")
    args = p.parse_args()
    if bad := [text for text in args.set if "=" not in text]:
        p.error(f"--set {bad[0]}: expected FIELD=VALUE")
    run, demos, servers = args.out / f"seed_{args.seed}", args.out / "demos", args.out / f"servers_{args.seed}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    sessions: list[dict[str, Any]] = json.loads(servers.read_text()) if servers.exists() else []
    with ServedRobotProcess(ROBOTS / "fake_aloha.toml") as robot:
        began = time.monotonic()
        try:
            command(robot, "record", "--n_demos", str(N_DEMOS), "--out", str(demos), "--policy", "scripted",
                    settings=args.set)  # fmt: skip
            command(robot, "--learner", "--actor", "--debug", "--seed", str(args.seed), "--port", str(free_port()),
                    "--demo_path", str(demos), "--checkpoint_path", str(run), "--spool_path", str(args.out / "spool"),
                    settings=["actor.clock=realtime", "actor.intervention=scripted", *args.set])  # fmt: skip
        finally:
            sessions.append({"seconds": time.monotonic() - began, **robot.figures()})
            servers.write_text(json.dumps(sessions, indent=1))
    step = CheckpointStore(run).steps()[-1]
    file = run / f"served_{step}.json"
    evaluate = [sys.executable, str(HERE / "served_policy.py"), str(run), "--episodes", str(args.episodes)]
    overrides = [word for text in args.set for word in ("--set", text)]
    if subprocess.run([*evaluate, *overrides, "--json", str(file)], check=False).returncode != 0:
        raise SystemExit("the evaluation failed; run the same command again to go on")
    if args.json:
        result = {"seed": args.seed, "step": step, "training": sessions, **json.loads(file.read_text())["summary"]}
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
