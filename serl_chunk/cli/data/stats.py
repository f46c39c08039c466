"""`serl-chunk data stats`: statistics for the normalisation of states and actions."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

from serl_chunk.cli.data.inspect import horizon_of
from serl_chunk.cli.data.options import add_reading, open_any, options_of, shown_progress
from serl_chunk.data.normalise.chunk_statistics import (
    STD_FLOOR,
    StatsRequest,
    StatsResult,
    compute,
    joints_of,
    parse_mask,
    write_norm_stats,
)
from serl_chunk.types import ConfigError


def add_parsers(commands: Any) -> None:
    """Add this module's commands."""
    p = commands.add_parser(
        "stats",
        help="mean, std, q01 and q99 of states and actions, as openpi's norm_stats.json",
        description="Mean, std and the exact quantiles 0.01 and 0.99 of states and action chunks, in openpi's layout.",
        allow_abbrev=False,
    )
    p.set_defaults(run=run_stats)
    add_reading(p)
    p.add_argument("--out", metavar="FILE|DIR", help="a .json file, or the folder of norm_stats.json (default: none)")
    p.add_argument(
        "--actions", choices=("absolute", "delta"), default="absolute",
        help="as recorded, or minus the state at the chunk's start (default: absolute)",
    )  # fmt: skip
    p.add_argument(
        "--mask", metavar="N,-M,...",
        help="delta: N dimensions that are differences, M that are not, ...; ALOHA: 6,-1,6,-1 (default: the joints of "
        "--exp_name's robot)",
    )  # fmt: skip
    p.add_argument(
        "--horizon", type=int, metavar="H",
        help="actions of a chunk; behind an episode's end the last one is repeated (default: --exp_name's, else 1 for "
        "absolute actions)",
    )  # fmt: skip
    p.add_argument("--max_samples", type=int, metavar="N", help="of N steps drawn at random (default: all)")
    p.add_argument("--seed", type=int, default=0, metavar="S", help="of that draw (default: 0)")
    p.add_argument(
        "--std_floor", type=float, default=STD_FLOOR, metavar="X",
        help=f"what std is at least, so that a dimension that never moves does not explode (default: {STD_FLOOR})",
    )  # fmt: skip


def run_stats(flags: argparse.Namespace) -> int:
    """Print the table, write the file, and return 0."""
    options = dataclasses.replace(options_of(flags), cameras=())
    if flags.seed < 0:
        raise ConfigError(f"must be at least 0, got {flags.seed}", parameter="seed")
    if not 0 < flags.std_floor < math.inf:
        raise ConfigError(f"must be positive and finite, got {flags.std_floor:g}", parameter="std_floor")
    mask = None if flags.mask is None else parse_mask(flags.mask)
    if mask is not None and flags.actions == "absolute":
        raise ConfigError("names the actions that are differences. Add --actions delta, or remove it", parameter="mask")
    horizon = horizon_of(flags)
    if horizon is None and flags.actions == "delta":
        raise ConfigError("delta actions depend on the length of a chunk. Give --horizon (pi0: 50), or --exp_name")
    what = StatsRequest(
        actions=flags.actions,
        joints=joints_of(mask, options.spec) if flags.actions == "delta" else (),
        horizon=1 if horizon is None else horizon,
        max_samples=flags.max_samples,
        seed=flags.seed,
        std_floor=flags.std_floor,
    )
    with shown_progress("reading") as progress:
        computed = compute(open_any(flags.path, options, flags.from_format), what, progress)
    show(computed)
    if flags.out is not None:
        vectors = {name: m.stats for name, m in computed.vectors.items()}
        print(f"wrote {write_norm_stats(flags.out, vectors, computed.note())}")
    return 0


def show(computed: StatsResult) -> None:
    """Print the table, a row for each dimension, and which dimensions were changed."""
    what = computed.what
    of = f"all {computed.steps:,} steps"
    if computed.samples < computed.steps:
        of = f"{computed.samples:,} of {computed.steps:,} steps (seed {what.seed})"
    print(f"{of} of {computed.episodes:,} episodes; {what.actions} actions, chunks of {what.horizon}")
    print(" " * 12 + "".join(f"{name:>10}" for name in ("mean", "std", "q01", "q99", "min", "max")))
    for name, m in computed.vectors.items():
        assert m.stats.q01 is not None
        assert m.stats.q99 is not None
        columns = (m.stats.mean, m.stats.std, m.stats.q01, m.stats.q99, m.moments.low, m.moments.high)
        for d in range(len(m.stats.mean)):
            delta = name == "actions" and d < len(what.joints) and what.joints[d] >= 0
            notes = ["delta"] * delta + ["floored"] * (d in m.std_floored) + ["widened"] * (d in m.quantiles_widened)
            row = f"{f'{name} {d}':12}" + "".join(f"{c[d]:10.4g}" for c in columns)
            print(row + ("  " + " ".join(notes) if notes else ""))
    for name, m in computed.vectors.items():
        if m.std_floored:
            was = ", ".join(f"{d} ({m.moments.std[d]:.2g})" for d in m.std_floored)
            print(f"{name}: std raised to {what.std_floor:g} in dimension {was}")
        if m.quantiles_widened:
            listed = ", ".join(map(str, m.quantiles_widened))
            print(f"{name}: q01 and q99 almost equal, moved apart in dimension {listed}")
