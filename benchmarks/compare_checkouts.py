"""Speed of two checkouts side by side: a benchmark runs in each in turn, each with its own interpreter.

python benchmarks/compare_checkouts.py BASE NEW --scripts "transport.py --quick" updates.py --json compare.json

Both checkouts need their `.venv` (`make .venv/installed`). A round runs the script once in each, in alternating order.
A figure's ratio is above 1 where NEW is faster: NEW / BASE of rates (`*_per_s`), BASE / NEW of times (`*_s`, `*_ms`).
Its interval comes from resampling the rounds. Figures that are neither rates nor times are left out, and with
`--figures` those that do not match it (`--figures "ours.*steps_per_s"` leaves out what a script measures of others).
A script passes where the median of all its figures' ratios is at least 0.95, or where its interval contains 1 and the
processor times differ by at most 5 %.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from support.cli_args import make_parser, write_figures

RESAMPLES = 10_000
LEAST_RATIO = 0.95
CPU_TOLERANCE = 0.05


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield dotted names and numbers of nested figures."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from flat(item, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield prefix, float(value)


def measure(checkout: Path, command: str) -> tuple[dict[str, float], float]:
    """Run a benchmark in a checkout; return its figures and the processor seconds it took."""
    script, *flags = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = [str(checkout / ".venv/bin/python"), f"benchmarks/{script}", *flags, "--json", str(file)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{checkout}: {command} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return dict(flat(json.loads(file.read_text()))), cpu


def speed_ratio(name: str, base: float, new: float) -> float | None:
    """Return how many times as fast NEW is by one figure; None where it is neither a rate nor a time."""
    if base <= 0 or new <= 0:
        return None
    last = name.rpartition(".")[2]
    if "per_s" in last:
        return new / base
    if last.endswith(("_s", "_ms", "_us", "_seconds")) or last in ("ms", "s"):
        return base / new
    return None


def compare(base: Path, new: Path, command: str, rounds: int, figures: str = "") -> dict[str, Any]:
    """Run one script `rounds` times in both checkouts; return ratios with their intervals, and the verdict.

    Args:
        figures: a regular expression for the names of figures that count; empty for all.
    """
    ratios: dict[str, list[float]] = {}
    cpu: list[float] = []
    for number in range(rounds):
        order = [base, new] if number % 2 == 0 else [new, base]
        runs = {checkout: measure(checkout, command) for checkout in order}
        cpu.append(runs[new][1] / runs[base][1])
        for name in runs[base][0].keys() & runs[new][0].keys():
            ratio = speed_ratio(name, runs[base][0][name], runs[new][0][name])
            if ratio is not None and re.search(figures, name):
                ratios.setdefault(name, []).append(ratio)
        print(f"{command}: round {number + 1} of {rounds}, processor time {cpu[-1]:.3f}", flush=True)
    whole = {name: values for name, values in sorted(ratios.items()) if len(values) == rounds}
    if not whole:
        raise SystemExit(f"{command}: it writes no rate and no time" + (f" called {figures!r}" if figures else ""))
    table = np.log(np.array(list(whole.values())))  # figures x rounds
    rng = np.random.default_rng(0)
    picks = rng.integers(0, rounds, (RESAMPLES, rounds))
    overall = np.exp(np.median(np.median(table[:, picks], axis=2), axis=0))
    result = {
        "ratio": float(np.exp(np.median(np.median(table, axis=1)))),
        "low": float(np.quantile(overall, 0.025)),
        "high": float(np.quantile(overall, 0.975)),
        "cpu_ratio": statistics.median(cpu),
        "figures": {name: statistics.median(values) for name, values in whole.items()},
    }
    same = result["low"] <= 1 <= result["high"] and abs(result["cpu_ratio"] - 1) <= CPU_TOLERANCE
    return result | {"passes": bool(result["ratio"] >= LEAST_RATIO or same)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("base", type=Path, help="checkout of the earlier commit")
    parser.add_argument("new", type=Path, help="checkout of the later commit")
    parser.add_argument("--scripts", nargs="+", required=True, metavar="COMMAND", help="benchmarks with their flags")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figures", default="", metavar="REGEX", help="count figures alone whose names match")
    args = parser.parse_args()
    results = {}
    for command in args.scripts:
        r = results[command] = compare(args.base.resolve(), args.new.resolve(), command, args.rounds, args.figures)
        verdict = "passes" if r["passes"] else "FAILS"
        print(
            f"{command}: ratio {r['ratio']:.3f} [{r['low']:.3f}, {r['high']:.3f}], "
            f"processor time {r['cpu_ratio']:.3f}, {len(r['figures'])} figures: {verdict}"
        )
        for name, ratio in sorted(r["figures"].items(), key=lambda item: item[1])[:3]:
            print(f"    slowest: {name} {ratio:.3f}")
        write_figures(args, results)


if __name__ == "__main__":
    main()
