"""Two tasks that undo each other on one simulated arm: success from each other's ends, resets, time without one.

Two learners, each with 20 scripted demonstrations, and one actor that gives both the robot in turns, until one learner
is done. No human intervenes. Robot minutes are of ticks at 10 Hz; an actor without turns resets before each episode:

    python benchmarks/pick_return.py --json docs/figures/pick_return.json
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from support.cli_args import make_parser, write_figures
from support.learning import product
from support.ports import free_port

from serl_chunk.runs.metrics import Row, read_metrics
from serl_chunk.version import version_info

TASKS = ("pick", "return")
DEMOS = 20
RECENT = 50  # episodes of a task at the beginning and at the end
HZ = 10.0


def train(out: Path, overrides: list[str]) -> None:
    """Record demonstrations, then run both learners and their actor."""
    demos = {task: out / "demos" / task for task in TASKS}
    for task, folder in demos.items():
        product("record", "--n_demos", str(DEMOS), "--out", str(folder),
                experiment=f"fake_pick_return:{task}", overrides=[])  # fmt: skip
    ports = {task: free_port() for task in TASKS}
    settings = [f"--config.{text}" for text in overrides]
    command = [sys.executable, "-m", "serl_chunk", "--exp_name"]
    learners = [
        subprocess.Popen([
            *command, f"fake_pick_return:{task}", "--learner", "--debug", "--demo_path", str(demos[task]),
            "--checkpoint_path", str(out / task), "--port", str(ports[task]), *settings,
        ])
        for task in TASKS
    ]  # fmt: skip
    try:
        product(
            "--actor", "--port", str(ports["pick"]), "--undone_by",
            f"fake_pick_return:return@127.0.0.1:{ports['return']}", "--spool_path", str(out / "spool"),
            experiment="fake_pick_return:pick", overrides=overrides,
        )  # fmt: skip
    finally:
        for learner in learners:
            learner.terminate()
        for learner in learners:
            learner.wait()


def share(rows: list[Row]) -> dict[str, int]:
    return {"episodes": len(rows), "successes": sum(bool(row["succeed"]) for row in rows)}


def figures(out: Path) -> dict[str, Any]:
    """The figures of both runs, each apart and of the robot."""
    found: dict[str, Any] = {}
    for task in TASKS:
        rows = read_metrics(out / task)["episode"]
        undone = [row for row in rows if row["start"] == "other"]
        found[task] = {
            "updates": rows[-1]["step"],
            **share(rows),
            "from_other": share(undone),
            "from_other_first": share(undone[:RECENT]),
            "from_other_last": share(undone[-RECENT:]),
            "from_own_attempt": share([row for row in rows if row["start"] == "again"]),
            "resets": sum(row["start"] == "reset" for row in rows),
            "resets_in_last": sum(row["start"] == "reset" for row in rows[-RECENT:]),
            "robot_minutes": sum(row["episode/l"] for row in rows) / HZ / 60,
            "longest_without_reset_minutes": max(row["since_reset"] + row["episode/l"] for row in rows) / HZ / 60,
        }
    parts = [found[task] for task in TASKS]
    episodes, resets = (sum(part[name] for part in parts) for name in ("episodes", "resets"))
    return found | {
        "resets_per_100_episodes": 100 * resets / episodes,
        "robot_minutes": sum(part["robot_minutes"] for part in parts),
        "longest_without_reset_minutes": max(part["longest_without_reset_minutes"] for part in parts),
    }


def main() -> None:
    """Print the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/pick_return"), help="folder of demonstrations and runs")
    parser.add_argument("--updates", type=int, default=5_000, help="of the learner that is done first")
    args = parser.parse_args()
    if not (args.out / "pick").exists():
        train(args.out, [f"learner.max_steps={args.updates}"])
    known = {"command": f"pick_return.py --updates {args.updates}", "commit": version_info().commit[:12]}
    known |= figures(args.out)
    for name, value in known.items():
        print(f"{name}: {value}")
    write_figures(args, known)


if __name__ == "__main__":
    main()
