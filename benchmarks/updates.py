"""Updates per second and milliseconds per decision at the published sizes, beside a plain implementation.

    python benchmarks/updates.py [--quick | --small] [--json FILE] [--qc DIR [--qc_python PATH]] [--savings]

Networks of 4x512, batch 256, 28 numbers of state, chunks of 5 actions of 5 dimensions; qc-rlpd with ten critics,
qc-fql and qc (best of 32) with two, all with the published agents (`--compat qc`). *ours* makes four updates a call.
*plain* is the same equations, written straight from the paper: one jitted update a call, nothing donated, one
Adam over all parameters, the target's among them. Before it is timed, three updates with the same parameters, batches
and random numbers must give the same losses in both. `--qc` adds the published code from a checkout.

The contestants take turns, each in a process of its own; ratios are medians over the rounds of the ratio within one.
Processor time counts all threads; unlike the clock it is little disturbed by a machine's other work.

`--small` takes the sizes of cube_single.py, and beside them the recipe of the experiment `ogbench`, another algorithm:
what an update of each costs there.

`--savings` measures what changes the algorithm, in our conventions; what that does to learning it cannot say.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from support.cli_args import make_parser, write_figures
from support.worker import Worker

TOLERANCE = 1e-4  # relative, of the losses
PRESETS = ("qc-rlpd", "qc-fql", "qc")
QUICK = {"hidden": 32, "batch": 32}
# The sizes of cube_single.py, at which our own recipe is measured as well.
SMALL = {"hidden": 256, "layers": 2}
SMALL_CHANGES: dict[str, dict[str, Any]] = {
    "qc-rlpd": {},
    "qc-fql": {"flow_steps": 5},
    "qc": {"flow_steps": 5, "actor_num_samples": 8},
}
QUICK_CHANGES: dict[str, dict[str, Any]] = {
    "qc-rlpd": {},
    "qc-fql": {"flow_steps": 2},
    "qc": {"flow_steps": 2, "actor_num_samples": 4},
}
AS_IT_IS = "the policy with every critic update"
# name -> (preset, changes of the configuration, critic updates for one of the policy)
SAVINGS: dict[str, tuple[str, dict[str, Any], int]] = {
    "the policy once in 4 critic updates": ("qc-rlpd", {}, 4),
    "2 random heads in the target": ("qc-rlpd", {"critic.target_subset": 2}, 1),
    "both": ("qc-rlpd", {"critic.target_subset": 2}, 4),
}


def check(ours: Worker, plain: Worker, preset: str) -> float:
    """The largest relative difference of a loss; ends the benchmark where it is one of substance."""
    worst = 0.0
    for a, b in zip(ours("losses"), plain("losses"), strict=True):
        for part, value in b.items():
            difference = abs(a[part] - value) / max(1.0, abs(value))
            worst = max(worst, difference)
            if not difference <= TOLERANCE:
                raise SystemExit(f"{preset}: {part} is {a[part]:g} in ours and {value:g} in the plain implementation")
    return worst


def measure(
    contestants: dict[str, Worker], rounds: int, seconds: float
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """contestant -> kind of call -> figures of each round; the contestants take turns."""
    out: dict[str, dict[str, list[dict[str, float]]]] = {name: {"update": [], "decision": []} for name in contestants}
    for i in range(rounds):
        order = list(contestants.items())
        for name, worker in order if i % 2 == 0 else order[::-1]:
            for kind, share in (("update", 1.0), ("decision", 0.2)):
                times = worker(f"{kind}s", seconds=share * seconds)
                ms = sorted(times["ms"])
                out[name][kind].append(
                    {
                        "ms": statistics.median(ms),
                        "p10": ms[len(ms) // 10],
                        "p90": ms[len(ms) * 9 // 10],
                        "cpu_ms": statistics.median(times["cpu_ms"]),
                        "count": len(ms),
                    }
                )
    return out


def summary(rounds: dict[str, dict[str, list[dict[str, float]]]], first: str) -> dict[str, dict[str, float]]:
    """contestant -> medians over rounds, and how many times faster `first` is by the clock and in processor time."""
    out = {}
    for name, kinds in rounds.items():
        figures: dict[str, float] = {}
        for kind, values in kinds.items():
            for key in ("ms", "p10", "p90", "cpu_ms"):
                figures[f"{kind}_{key}"] = statistics.median(v[key] for v in values)
            for key in ("ms", "cpu_ms"):
                pairs = zip(values, rounds[first][kind], strict=True)
                figures[f"{kind}_{key}_ratio"] = statistics.median(v[key] / max(f[key], 1e-6) for v, f in pairs)
        figures["updates_per_s"] = 1e3 / figures["update_ms"]
        out[name] = figures
    return out


def table(title: str, figures: dict[str, dict[str, float]], first: str) -> str:
    head = f"{title:46} {'updates/s':>9} {'ms [p10, p90]':>22} {'processor ms':>12} "
    head += f"{'ratio':>6} {'(cpu)':>6} {'decision ms':>18}"
    lines = [head]
    for name, f in figures.items():
        spread = f"{f['update_ms']:.1f} [{f['update_p10']:.1f}, {f['update_p90']:.1f}]"
        decision = f"{f['decision_ms']:.2f} [{f['decision_p10']:.2f}, {f['decision_p90']:.2f}]"
        ratios = f"{'':13}" if name == first else f"{f['update_ms_ratio']:6.2f} {f['update_cpu_ms_ratio']:6.2f}"
        lines.append(
            f"  {name:44} {f['updates_per_s']:9.2f} {spread:>22} {f['update_cpu_ms']:12.1f} {ratios} {decision:>18}"
            + (f"  {f['memory_mb']:.0f} MB" if "memory_mb" in f else "")
        )
    return "\n".join(lines)


def compared(preset: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    classes = {"ours": "OurContestant", "plain": "PlainContestant"}
    contestants = {name: Worker("support.reference_agents.served_agents", kind) for name, kind in classes.items()}
    if args.qc:
        contestants["published"] = Worker(
            "support.reference_agents.published",
            "PublishedContestant",
            args.qc_python or sys.executable,
            path=[args.qc],
        )
    try:
        sizes: dict[str, Any] = {"preset": preset}
        if args.quick:
            sizes |= QUICK | {"changes": QUICK_CHANGES[preset]}
        elif args.small:
            sizes |= SMALL | {"changes": SMALL_CHANGES[preset]}
        for worker in contestants.values():
            worker.start("open", **sizes)
        if args.small:
            contestants["recipe"] = Worker("support.reference_agents.served_agents", "RecipeContestant")
            contestants["recipe"].start("open")
        for worker in contestants.values():
            worker.result()
        difference = check(contestants["ours"], contestants["plain"], preset)
        contestants["ours"]("settled")
        figures = summary(measure(contestants, args.rounds, args.seconds), "ours")
        for name, worker in contestants.items():
            figures[name]["memory_mb"] = worker("memory")
        figures["ours"] |= {"loss_difference": difference, "recompiled": contestants["ours"]("recompiled")}
        if figures["ours"]["recompiled"]:
            raise SystemExit(f"{preset}: ours was compiled again after its first calls")
        return figures
    finally:
        for worker in contestants.values():
            worker.kill()


def saved(preset: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure what changes of the algorithm save on one preset, next to one policy step for each of the critic."""
    variants = {AS_IT_IS: (preset, {}, 1)} | {name: v for name, v in SAVINGS.items() if v[0] == preset}
    contestants = {name: Worker("support.reference_agents.served_agents", "OurContestant") for name in variants}
    try:
        for name, worker in contestants.items():
            base, (_, changes, ratio) = QUICK_CHANGES[preset] if args.quick else {}, variants[name]
            sizes = QUICK if args.quick else {}
            worker.start("open", preset=preset, changes={**base, **changes}, per_call=ratio, compat=None, **sizes)
        for worker in contestants.values():
            worker.result()
        return summary(measure(contestants, args.rounds, args.seconds), AS_IT_IS)
    finally:
        for worker in contestants.values():
            worker.kill()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--qc", metavar="DIR", help="a checkout of Q-chunking's code, to be measured as well")
    parser.add_argument("--qc_python", metavar="PATH", help="interpreter that has what that checkout imports")
    parser.add_argument("--savings", action="store_true", help="measure what changes the algorithm instead")
    parser.add_argument("--presets", default=",".join(PRESETS), help="which ones, with commas between")
    parser.add_argument("--rounds", type=int, help="turns of every contestant; 7 by default")
    parser.add_argument("--seconds", type=float, help="of updates in a turn; 4 by default")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it works: its figures mean little"
    )
    parser.add_argument("--small", action="store_true", help="the sizes of cube_single.py, and our own recipe beside")
    args = parser.parse_args()
    if args.small and (args.quick or args.savings):
        raise SystemExit("--small goes with neither --quick nor --savings")
    args.rounds = args.rounds or (2 if args.quick else 7)
    args.seconds = args.seconds or (0.1 if args.quick else 4.0)
    presets = args.presets.split(",")
    if unknown := sorted(set(presets) - set(PRESETS)):
        raise SystemExit(f"--presets={args.presets}: {unknown[0]!r} is none; valid: {', '.join(PRESETS)}")
    if args.qc and not (Path(args.qc) / "agents" / "acfql.py").is_file():
        raise SystemExit(f"--qc={args.qc}: no checkout of Q-chunking's code (agents/acfql.py is missing)")
    figures: dict[str, Any] = {}
    for preset in presets:
        figures[preset] = (saved if args.savings else compared)(preset, args)
        print(table(preset, figures[preset], AS_IT_IS if args.savings else "ours"), flush=True)
    load = os.getloadavg()
    print(
        f"\nmedians of {args.rounds} rounds; {os.cpu_count()} processors, "
        f"load {load[0]:.1f} ({load[2]:.1f} over 15 minutes)"
    )
    write_figures(args, {**figures, "load": load})


if __name__ == "__main__":
    main()
