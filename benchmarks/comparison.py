"""Comparisons of two policies that end once they are decided: simulated, and of a run's checkpoints behind a server.

    python benchmarks/comparison.py --json comparison.json
    python benchmarks/comparison.py --run runs/demo --checkpoints 0,12000 --json comparison_served.json

1,000 comparisons each of equal policies and of 60 against 80 % success, by `evaluation.comparison`: how many end with a
verdict, and after how many pairs of episodes (200: later, or never). `shared`: the start alone decides, so that the
better policy succeeds wherever the other one does; else both outcomes are independent. `newcombe`: verdicts by the
interval of a fixed number of pairs, looked at once at the end, and after each tenth pair. `canary`: candidates of
`actor.gate=canary`; before them the acting snapshot had 40 episodes.

With --run two checkpoints of a run of `fake_aloha` are compared in real time behind a robot server. The simulation
judges successes; a scripted operator at the terminal types Enter to go on, and f where the time limit left no outcome.
`named_before_the_end`: checkpoints that the terminal named before the results. `same_starts`: whether both had the same
seeds, profiles and draws of the robot's resets.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from learn_served_mouse import COLUMNS, ROWS, Pty, own_terminal, process
from support.cli_args import make_parser, write_figures
from support.served import ROBOTS, ServedRobotProcess

from serl_chunk.actor.canary import Canary
from serl_chunk.evaluation.comparison import Pairs
from serl_chunk.evaluation.results import paired_difference
from serl_chunk.runs.evaluations import FOLDER
from serl_chunk.types import Snapshot

COMPARISONS, MOST = 1000, 200  # of each case; pairs
NEWCOMBE = 100  # pairs
RATES = {"equal": (0.7, 0.7), "better": (0.6, 0.8), "better_shared": (0.6, 0.8), "broken": (0.8, 0.0)}
CANDIDATES = {"equal": (0.7, 0.7), "worse": (0.8, 0.6), "broken": (0.8, 0.0)}  # the acting one, the candidate
LOOKS = 0.25  # s between two looks at the terminal


@cache
def decided(second_alone: int, first_alone: int) -> bool:
    return Pairs(second_alone, first_alone, 0).decided  # ties have no part in it


def outcomes(case: str, rng: np.random.Generator, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    starts = rng.random((2, pairs))
    first, second = RATES[case]
    return starts[0] < first, starts[0 if case.endswith("shared") else 1] < second


def compared(first: np.ndarray, second: np.ndarray) -> tuple[int, int]:
    """Return the pairs until the verdict, and the better policy (+1 the second); (0, 0): not decided."""
    for n, (alone, other) in enumerate(zip(np.cumsum(second & ~first), np.cumsum(first & ~second), strict=True), 1):
        if decided(int(alone), int(other)):
            return n, 1 if alone > other else -1
    return 0, 0


def sequential(case: str, rng: np.random.Generator) -> dict[str, float]:
    found = np.array([compared(*outcomes(case, rng, MOST)) for _ in range(COMPARISONS)])
    pairs = np.where(found[:, 0] > 0, found[:, 0], np.inf)
    better = np.sign(RATES[case][1] - RATES[case][0])
    p50, p90 = (float(x) if np.isfinite(x) else MOST for x in np.quantile(pairs, (0.5, 0.9), method="higher"))
    wrong = float(((found[:, 1] != 0) & (found[:, 1] != better)).mean())
    return {"verdicts": float((found[:, 1] != 0).mean()), "wrong": wrong, "pairs_median": p50, "pairs_p90": p90}


def newcombe(case: str, rng: np.random.Generator) -> dict[str, float]:
    once = looked = 0
    for _ in range(COMPARISONS):
        first, second = outcomes(case, rng, NEWCOMBE)
        found = [paired_difference(first[:n], second[:n]) for n in range(10, NEWCOMBE + 1, 10)]
        apart = [low > 0 or high < 0 for _, low, high in found]
        once, looked = once + apart[-1], looked + any(apart)
    return {"pairs": NEWCOMBE, "verdicts": once / COMPARISONS, "verdicts_of_ten_looks": looked / COMPARISONS}


def trial(acting: float, candidate: float, rng: np.random.Generator) -> tuple[bool, int]:
    """Return whether a candidate is dropped, and its episodes until then."""
    gate, episodes = Canary(), 0
    gate.offer(Snapshot(0, {}))
    for k in range(40):
        gate.add(0, f"before-{k}", bool(rng.random() < acting))
    gate.offer(Snapshot(1, {}))
    while True:
        snapshot = gate.draw()
        assert snapshot is not None
        episodes += snapshot.version
        success = rng.random() < (candidate if snapshot.version else acting)
        if verdict := gate.add(snapshot.version, f"trial-{episodes}", bool(success)):
            return not verdict.promoted, episodes


def canary(case: str, rng: np.random.Generator) -> dict[str, float]:
    dropped, episodes = np.array([trial(*CANDIDATES[case], rng) for _ in range(COMPARISONS)]).mean(axis=0)
    return {"dropped": float(dropped), "episodes": float(episodes)}


def served(run: Path, steps: str, n: int) -> dict[str, Any]:
    """Compare two checkpoints behind a robot server; returns the comparison as their files have it."""
    before, screen, keys = set((run / FOLDER).glob("*.json")), Pty(COLUMNS, ROWS), {"Enter": 0, "f": 0}
    screen.look()
    words = ["-m", "serl_chunk", "--exp_name", "fake_aloha", "--actor", "--eval_until_decided", "--checkpoint_path",
             str(run), "--eval_checkpoint_step", steps, "--eval_n_trajs", str(n), "--config.operator.countdown_s=1",
             "--config.actor.clock=realtime", "--config.actor.intervention=none"]  # fmt: skip
    began = time.monotonic()
    with (
        ServedRobotProcess(ROBOTS / "fake_aloha.toml") as robot,
        process([*words, f"--config.robot.server={robot.address}"], screen.slave, stdin=screen.slave,
                preexec_fn=own_terminal) as actor,
    ):  # fmt: skip
        while actor.poll() is None:
            shown = "\n".join(screen.picture.shown())
            key = "f" if "press s or f" in shown else "Enter" if "Enter go" in shown and "moves in" not in shown else ""
            if key:
                screen.type(b"\r" if key == "Enter" else key.encode())
                keys[key] += 1
            time.sleep(1.0 if key else LOOKS)
        server = robot.figures()
    written = screen.picture.written
    screen.close()
    if actor.returncode != 0:
        raise SystemExit(written[-2000:])
    made = sorted(set((run / FOLDER).glob("*.json")) - before)
    data = [json.loads(file.read_text()) for file in made]
    early = re.split("evaluation, (?:held-out )?starts", written)[0]
    named = [step for step in steps.split(",") if re.search(rf"(checkpoint|version|policy)\W{{0,3}}{step}\b", early)]
    return {
        **data[0]["comparison"], "seconds": time.monotonic() - began, "keys": keys,
        "named_before_the_end": named, "same_starts": starts(data[0]) == starts(data[1]),
        "successes": {str(d["checkpoint"]): d["results"][0]["successes"] for d in data},
        "repeated": sum(len(d["results"][0].get("repeated", [])) for d in data), "server": server,
    }  # fmt: skip


def starts(data: dict[str, Any]) -> list[tuple[int, str]]:
    found = sorted((e["seed"], json.dumps(e["conditions"])) for e in data["results"][0]["episodes"])
    return found[: data["comparison"]["pairs"]]  # one of the policies may have begun with the next start


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--run", type=Path, help="a run of fake_aloha; its checkpoints are compared behind a server")
    parser.add_argument("--checkpoints", default="0,12000", help="two of them")
    parser.add_argument("--episodes", type=int, default=100, help="of each checkpoint, at most")
    args = parser.parse_args()
    if args.run:
        figures = served(args.run.resolve(), args.checkpoints, args.episodes)
        json.dump(figures, sys.stdout, indent=1, default=float)
        write_figures(args, figures)
        return
    figures = {"comparisons": COMPARISONS, "most_pairs": MOST}
    simulated: list[tuple[str, Callable[[str, np.random.Generator], dict[str, float]], list[str]]] = [
        ("sequential", sequential, list(RATES)), ("newcombe", newcombe, ["equal", "better"]),
        ("canary", canary, list(CANDIDATES)),
    ]  # fmt: skip
    for name, simulate, cases in simulated:
        for case in cases:
            figures[f"{name}_{case}"] = row = simulate(case, np.random.default_rng(0))
            print(f"{name:10} {case:13} " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    write_figures(args, figures)


if __name__ == "__main__":
    main()
