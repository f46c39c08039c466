"""What cameras cost an update: each encoder, a frozen one, and a frozen one whose features are kept per stored frame.

    python benchmarks/vision.py [--quick] [--json FILE] [--sizes PIXELS:BATCH,...]

The agent, networks and three cameras of `fake_aloha_images`, once at its size and once with ResNet-10's 128 x 128; the
frames are noise, which costs the same as pictures. An update is drawn from a replay, brought to the device and
computed; the cases take turns, and figures are medians. *cameras* is the share of the time that the same update without
cameras does not take, *encoder* what of it lies in the compiled update. Before anything is timed, an update with kept
features must give the losses of one that computes them from pixels (same state, windows and random numbers).

`frozen` and `cached` have no random shift, so that they differ in nothing but the features that are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from typing import Any

import jax
import numpy as np
from support.cli_args import make_parser, write_figures
from support.noise import noise_episode

from serl_chunk.agents.registry import make_agent
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.experiment import ExperimentConfig, ReplayConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.data.preprocess import fit_preprocess
from serl_chunk.replay.features import groups_of
from serl_chunk.replay.replay import Replay
from serl_chunk.robots.registry import robot_spec

EPISODES, LENGTH = 8, 60
TOLERANCE = 1e-2  # relative, of losses after one update: features are float16
CHECK_SEED = 7
# A policy alone, and one camera: most of a quick run's time is compilation.
QUICK = BcConfig(
    policy="gaussian",
    hidden=(16,),
    policy_updates=1,
    image_keys=("top",),
    encoder=EncoderConfig(features=(4,), latent=8),
)
CASES = ("none", "conv", "impala", "resnet10", "frozen", "cached")
FROZEN = {"kind": "resnet10", "pooling": "spatial", "frozen_backbone": True, "shift": 0}


def encoder_of(case: str, base: EncoderConfig) -> EncoderConfig:
    """The experiment's encoder, as `case` has it."""
    changes: dict[str, dict[str, Any]] = {
        "none": {},
        "conv": {"kind": "conv"},
        "impala": {"kind": "impala"},
        "resnet10": {"kind": "resnet10", "pooling": "spatial"},
        "frozen": FROZEN,
        "cached": {**FROZEN, "cache_features": True},
    }
    return dataclasses.replace(base, **changes[case])


def config_of(case: str, pixels: int, batch: int, args: argparse.Namespace) -> ExperimentConfig:
    """The experiment at `pixels` x `pixels` and `batch` windows, with a replay that holds this benchmark's data."""
    sizes = [("robot.image_size", str(pixels)), ("learner.batch_size", str(batch))]
    config = load_experiment("fake_aloha_images")
    config = dataclasses.replace(config, agent=QUICK) if args.quick else config
    config = apply_overrides(config, [*sizes, *(tuple(s.split("=", 1)) for s in args.set)])
    rows = EPISODES * (LENGTH + 1)
    roomy = max(rows, config.robot.max_episode_steps + 1)
    replay = ReplayConfig(capacity=roomy, demo_capacity=rows, human_capacity=1, image_capacity=roomy)
    agent = dataclasses.replace(config.agent, encoder=encoder_of(case, config.agent.encoder))
    agent = dataclasses.replace(agent, image_keys=() if case == "none" else agent.image_keys)
    return dataclasses.replace(config, agent=agent, replay=replay)


class Contestant:
    """One case: its agent, a state, and a replay of the data. Compiles when it is made."""

    def __init__(self, case: str, config: ExperimentConfig) -> None:
        spec = robot_spec(config.robot)
        rng, horizon = np.random.default_rng(0), config.chunk.horizon
        every = {"horizon": horizon, "image_every": horizon}  # cameras are read at each decision
        data = [noise_episode(f"noise-{k}", spec, LENGTH, rng, **every) for k in range(EPISODES)]
        self.case, self._batch = case, config.learner.batch_size
        self.agent = make_agent(config, spec)
        self.state = self.agent.init(jax.random.key(0))
        self.base = self.agent.new_base(jax.random.key(0))
        self.embed = self.agent.perception.embedder(self.base)
        preprocess = fit_preprocess(config, spec, data)
        self.replay = Replay(spec, config, preprocess, bc_on="all", embed=self.embed)
        self.replay.add_demo(*data)
        self.figures: dict[str, float] = {}
        shown = preprocess.cameras
        if shown:
            self.figures["pixel_bytes_per_frame"] = float(shown[0].height * shown[0].width * 3)
        if self.embed is not None:
            self.figures["feature_bytes_per_frame"] = float(groups_of(self.embed.features)[0].nbytes)
            self._fill()
        self.rng = np.random.default_rng(CHECK_SEED)  # the same windows for all
        self.first = self._update(self._device(self._draw()))
        self.rounds: list[dict[str, float]] = []

    def _fill(self) -> None:
        """Features of all frames but those of the first calls, which compile; timed."""
        for first in (64, 8):
            self.replay.compute_features(first)
        start, computed = time.perf_counter(), 0
        while found := self.replay.compute_features(64):
            computed += found
        self.figures["embed_ms_per_frame"] = 1e3 * (time.perf_counter() - start) / max(1, computed)

    def _draw(self) -> Any:
        return self.replay.sample(self.rng, self._batch, 1, half="demo")

    @staticmethod
    def _device(batch: Any) -> Any:
        return jax.block_until_ready(jax.device_put(batch))

    def _update(self, batch: Any) -> dict[str, float]:
        name, *_ = self.agent.wants()  # of the critic, or of a policy alone
        self.state, metrics = self.agent.update(self.state, self.base, {name: batch})
        return {k: float(v) for k, v in metrics.items()}

    def turn(self, seconds: float) -> None:
        """Updates for `seconds`, one at least; keeps the medians of their parts in milliseconds."""
        parts: dict[str, list[float]] = {"draw": [], "bring": [], "update": [], "total": [], "cpu": []}
        begin, busy = time.perf_counter(), time.process_time()
        while not parts["total"] or time.perf_counter() - begin < seconds:
            times = [time.perf_counter()]
            drawn = self._draw()
            times.append(time.perf_counter())
            batch = self._device(drawn)
            times.append(time.perf_counter())
            self._update(batch)
            times.append(time.perf_counter())
            now = time.process_time()
            for name, value in zip(("draw", "bring", "update"), np.diff(times), strict=True):
                parts[name].append(1e3 * value)
            parts["total"].append(1e3 * (times[-1] - times[0]))
            parts["cpu"].append(1e3 * (now - busy))
            busy = now
        self.figures["batch_mb"] = sum(np.asarray(x).nbytes for x in jax.tree.leaves(drawn)) / 1e6
        self.rounds.append({name: statistics.median(values) for name, values in parts.items()})

    def summary(self) -> dict[str, float]:
        """Medians over the turns, and what was measured once. Ends the benchmark where something was compiled again."""
        if self.agent.update._cache_size() != 1:
            raise SystemExit(f"{self.case}: the update was compiled again after its first call")
        keys = self.rounds[0]
        return {f"{k}_ms": statistics.median(r[k] for r in self.rounds) for k in keys} | self.figures


def check(cached: Contestant, frozen: Contestant) -> float:
    """The largest relative difference of a metric after one update; ends the benchmark where it is one of substance."""
    worst = 0.0
    for name, value in frozen.first.items():
        difference = abs(cached.first[name] - value) / max(1.0, abs(value))
        worst = max(worst, difference)
        if not difference <= TOLERANCE:
            raise SystemExit(f"{name} is {cached.first[name]:g} with kept features and {value:g} with pixels")
    return worst


def compared(pixels: int, batch: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    contestants = {case: Contestant(case, config_of(case, pixels, batch, args)) for case in args.cases}
    difference = None
    if {"cached", "frozen"} <= contestants.keys():
        difference = check(contestants["cached"], contestants["frozen"])
    for i in range(args.rounds):
        order = list(contestants.values())
        for contestant in order if i % 2 == 0 else order[::-1]:
            contestant.turn(args.seconds)
    figures = {case: c.summary() for case, c in contestants.items()}
    for case, f in figures.items():
        if "none" in figures and case != "none":
            f["camera_share"] = 1 - figures["none"]["total_ms"] / f["total_ms"]
            f["encoder_share"] = (f["update_ms"] - figures["none"]["update_ms"]) / f["total_ms"]
    if difference is not None:
        cached, frozen = figures["cached"], figures["frozen"]
        cached["loss_difference"] = difference
        cached["saved_ms"] = frozen["total_ms"] - cached["total_ms"]
        cached["saved_share"] = cached["saved_ms"] / frozen["total_ms"]
    return figures


def table(pixels: int, batch: int, figures: dict[str, dict[str, float]]) -> str:
    head = f"{pixels} x {pixels}, batches of {batch}"
    lines = [
        f"{head:26} {'ms':>9} {'cpu ms':>9} {'draw':>7} {'bring':>7} {'update':>9} {'MB':>7}"
        f" {'cameras':>8} {'encoder':>8}"
    ]
    for case, f in figures.items():
        shares = f"{100 * f['camera_share']:7.0f}% {100 * f['encoder_share']:7.0f}%" if "camera_share" in f else ""
        lines.append(
            f"  {case:24} {f['total_ms']:9.1f} {f['cpu_ms']:9.1f} {f['draw_ms']:7.1f} {f['bring_ms']:7.1f} "
            f"{f['update_ms']:9.1f} {f['batch_mb']:7.1f} {shares}"
        )
    if "embed_ms_per_frame" in (cached := figures.get("cached", {})):
        bytes_of = {kind: f"{cached[f'{kind}_bytes_per_frame']:,.0f}" for kind in ("pixel", "feature")}
        lines.append(
            f"  a frame: {bytes_of['pixel']} bytes of pixels, {bytes_of['feature']} of features, computed once in "
            f"{cached['embed_ms_per_frame']:.1f} ms"
        )
    if "saved_ms" in cached:
        lines.append(f"  the cache saves {cached['saved_ms']:.1f} ms of an update, {100 * cached['saved_share']:.0f} %")
    return "\n".join(lines)


def _sizes(text: str) -> list[tuple[int, int]]:
    try:
        sizes = [(int(pixels), int(batch)) for pixels, batch in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise SystemExit(f"--sizes={text}: expected PIXELS:BATCH with commas between, as 48:64,128:16") from None
    if bad := [s for s in sizes if s[0] < 8 or s[1] < 2 or s[1] % 2]:
        raise SystemExit(f"--sizes={text}: {bad[0][0]}:{bad[0][1]} is no size: 8 pixels or more, an even batch")
    return sizes


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", help="PIXELS:BATCH, with commas between; 48:64,128:16 by default")
    parser.add_argument("--cases", help=f"which ones, with commas between; of {','.join(CASES)}")
    parser.add_argument("--rounds", type=int, help="turns of every case; 5 by default")
    parser.add_argument("--seconds", type=float, help="of updates in a turn; 3 by default")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override of the experiment")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it works: its figures mean little"
    )
    args = parser.parse_args()
    if bad := [s for s in args.set if "=" not in s]:
        parser.error(f"--set {bad[0]}: expected FIELD=VALUE")
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.seconds = args.seconds or (0.05 if args.quick else 3.0)
    quick = [case for case in CASES if case not in ("impala", "resnet10")]
    args.cases = args.cases.split(",") if args.cases else quick if args.quick else list(CASES)
    if unknown := sorted(set(args.cases) - set(CASES)):
        raise SystemExit(f"--cases: {unknown[0]!r} is none; valid: {', '.join(CASES)}")
    sizes = _sizes(args.sizes or ("32:4" if args.quick else "48:64,128:16"))
    if args.quick:  # most of its time is compilation
        jax.config.update("jax_disable_most_optimizations", True)
    figures: dict[str, Any] = {}
    for pixels, batch in sizes:
        figures[str(pixels)] = compared(pixels, batch, args)
        print(table(pixels, batch, figures[str(pixels)]), flush=True)
    load = os.getloadavg()
    print(
        f"\nmedians of {args.rounds} rounds on {jax.devices()[0].device_kind}; {os.cpu_count()} processors, "
        f"load {load[0]:.1f} ({load[2]:.1f} over 15 minutes)"
    )
    write_figures(args, {**figures, "load": load})


if __name__ == "__main__":
    main()
