"""Benefit of human ticks on the fake ALOHA task: our recipe beside RLPD, HIL-SERL, HG-DAgger and cloning, same human.

Every method trains in one process from the same ten scripted demonstrations, with interventions of the same scripted
human during collection (late, noisy, and with faults under `--set robot.scripted_human.fault_rate=0.2`).
Of every checkpoint, success is measured on 100 held-out starts without interventions. A finished run is not run again,
an interrupted one is resumed:

    python benchmarks/human_in_the_loop.py --seeds 0,1 --json figures.json --plot human_in_the_loop.png

`advised` is `ours` with a human who leaves the robot alone after three successes in a row without a human's tick, until
the first failure.

`--quick` trains tiny networks for a few dozen updates: it shows that everything runs, and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from support import learning
from support.cli_args import chosen, split
from support.curves import colour, draw_success
from support.results import Run, write

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.robots.base import InterventionCommand
from serl_chunk.robots.fake.env import FakeAlohaEnv
from serl_chunk.robots.fake.scripted_human import ScriptedHuman
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.viz import plots

N_DEMOS = 10
EPISODES = 20  # of the moving intervention share
RESAMPLES = 1_000  # of its bootstrap interval


STREAK = 3  # successes alone, one after another, after which an advised human lets go


class AdvisedHuman(ScriptedHuman):
    """Follows the advice "hands off: three in a row alone" from episode to episode."""

    _helped: bool | None = None  # in the episode under way; None before its first tick

    def __init__(self, env: FakeAlohaEnv) -> None:
        self._alone = 0  # the newest episodes that succeeded without a human's tick, one after another
        super().__init__(env, env.config.scripted_human)

    def reset(self, seed: int) -> None:
        if self._helped is not None:  # an episode has ended
            *_, info = self._env.receive()
            self._alone = self._alone + 1 if info["success"] and not self._helped else 0
        self._helped = None
        super().reset(seed)

    def poll(self, *tick: Any) -> InterventionCommand | None:
        command = super().poll(*tick) if self._alone < STREAK else None
        self._helped = bool(self._helped) or command is not None
        return command


class Method(NamedTuple):
    """What is changed of the experiment `fake_aloha`."""

    preset: str | None
    settings: tuple[str, ...]
    advised: bool = False  # the human


CLONE = ("agent.flow.hidden=256,256", "agent.flow.steps=5", "agent.policy_updates=3", "agent.policy_ema=0.999")
GAUSSIAN = ("agent.critic.hidden=256,256", "agent.hidden=256,256")
ADJACENT = ("replay.windows=qc", "replay.terminal_windows=drop")
UPDATES = 12_000  # of the experiment, at 0.25 an online step
METHODS = {
    "ours": Method(None, ()),
    "advised": Method(None, (), advised=True),
    # RLPD has no imitation to begin with, and its critic no phase of its own.
    "rlpd-qc": Method("rlpd-qc", (*GAUSSIAN, "learner.pretrain_steps=0")),
    # Its loop has no ratio; one process needs one, and figures over online steps need the same number of these.
    "hil-serl": Method("hil-serl", ("learner.utd_ratio=4", f"learner.max_steps={16 * UPDATES}")),
    "qc-rlpd": Method("qc-rlpd", GAUSSIAN),
    "hg-dagger": Method("hg-dagger", CLONE),
    # Learns nothing from human steps; interventions happen all the same. Adjacent windows draw demonstrations alone:
    # other ones would fill its batches with human steps, which it does not imitate.
    "bc": Method("bc", (*CLONE, "agent.bc_on=demo", "replay.demo_fraction=1", *ADJACENT)),
}
QUICK = (
    "learner.max_steps=40", "learner.pretrain_steps=20", "learner.warmup_episodes=2",
    "learner.batch_size=16", "learner.steps_per_update=20", "learner.log_period=20",
)  # fmt: skip
QUICK_AGENT = {"critic": ("agent.critic.hidden=16",), "flow": ("agent.flow.hidden=16",), "hidden": ("agent.hidden=16",)}


def configuration(
    name: str, seed: int, checkpoints: int, extra: Sequence[str] = (), *, quick: bool = False
) -> ExperimentConfig:
    """The experiment of one method; `extra` are `field=value` for every method."""
    method, experiment = METHODS[name], load_experiment("fake_aloha")
    texts = [*method.settings, *extra]
    if quick:
        texts += QUICK
        agent = configured(experiment, preset=method.preset).agent
        texts += [s for field, texts in QUICK_AGENT.items() if hasattr(agent, field) for s in texts]
    config = dataclasses.replace(configured(experiment, [*map(split, texts)], preset=method.preset), seed=seed)
    last = config.learner.max_steps
    return learning.with_checkpoints(config, last, max(1, last // checkpoints))


def human_share(episodes: list[dict[str, Any]]) -> list[dict[str, float]]:
    """After each online episode: the human's share of the last `EPISODES` episodes' ticks, with a 95 % interval.

    The interval is of the ratio under resampling of those episodes (bootstrap, percentiles), from a fixed seed.
    `human_ticks` and `env_steps` are the sums since the beginning: counts, without an interval.
    """
    rng, out = np.random.default_rng(0), []
    human = np.array([e["intervention_steps"] for e in episodes], np.float64)
    length = np.array([e["episode/l"] for e in episodes], np.float64)
    for i in range(len(episodes)):
        of = np.arange(max(0, i + 1 - EPISODES), i + 1)
        drawn = of[rng.integers(len(of), size=(RESAMPLES, len(of)))]
        low, high = np.percentile(human[drawn].sum(1) / length[drawn].sum(1), [2.5, 97.5])
        share = human[of].sum() / length[of].sum()
        point = {"env_steps": episodes[i]["env_steps"], "human_ticks": episodes[i]["human_ticks"]}
        out.append({**point, "share": float(share), "low": float(low), "high": float(high)})
    return out


def later_share(share: list[dict[str, float]]) -> float:
    """The human's share of all ticks in the second half of the online steps."""
    end = share[-1]
    middle = max(
        (p for p in share if 2 * p["env_steps"] <= end["env_steps"]), key=lambda p: p["env_steps"], default=None
    )
    ticks, steps = (0, 0) if middle is None else (middle["human_ticks"], middle["env_steps"])
    return (end["human_ticks"] - ticks) / (end["env_steps"] - steps)


def figures(share: list[dict[str, float]]) -> dict[str, float]:
    """Return the human's share at the end of training, and in its second half."""
    last = share[-1]
    ends = {"human_share": last["share"], "human_share_low": last["low"], "human_share_high": last["high"]}
    return {**ends, "later_share": later_share(share)}


def plot(runs: Sequence[Run], people: Sequence[list[dict[str, float]]], path: Path) -> None:
    """Success, the human's share and the human ticks over online steps; a line a run, a colour a method."""
    with plots.new_figure(17, 5) as figure:
        success, share, ticks = figure.subplots(1, 3)
        draw_success(success, runs, "online steps", lambda _, c: c.env_steps)
        for run, points in zip(runs, people, strict=True):
            color, x = colour(runs, run.name), [p["env_steps"] for p in points]
            low, high, middle, counts = ([p[key] for p in points] for key in ("low", "high", "share", "human_ticks"))
            share.fill_between(x, low, high, color=color, alpha=0.1)
            share.plot(x, middle, color=color)
            ticks.plot(x, counts, color=color)
        plots.percent_axis(share, f"human's share of the ticks, last {EPISODES} episodes, 95 % interval")
        ticks.set_ylabel("human ticks so far")
        for axis in (share, ticks):
            axis.set_xlabel("online steps")
        plots.add_legend(success)
        path.write_bytes(plots.to_png(figure))


def main() -> None:
    p = learning.parser(__doc__, "human_in_the_loop", of="for every method")
    p.add_argument("--methods", default="ours,rlpd-qc,qc-rlpd,hg-dagger,bc", help=f"of: {', '.join(METHODS)}")
    p.add_argument("--checkpoints", type=int, default=6, help="of each run that are measured, beside the first")
    p.add_argument("--quick", action="store_true", help="tiny, in OUT/quick: does it run?")
    p.add_argument("--plot", type=Path, help="write the curves here (PNG)")
    args = learning.arguments(p)
    names = chosen(p, args.methods, METHODS, "method")
    if args.quick:
        args.out, args.checkpoints, args.episodes = args.out / "quick", 2, 2
    demos = learning.record(load_experiment("fake_aloha"), N_DEMOS, args.out / "demos")
    runs, shares = [], []
    for seed in args.seeds:
        for name in names:
            method = METHODS[name]
            config = configuration(name, seed, args.checkpoints, args.set, quick=args.quick)
            human = (lambda env: AdvisedHuman(env)) if method.advised else FakeAlohaEnv.make_scripted_human
            with mock.patch.object(FakeAlohaEnv, "make_scripted_human", human):
                trained = learning.train(config, args.out / f"{name}_{seed}", [demos])
            points = [trained.evaluate(step, args.episodes) for step in trained.steps]
            people = human_share(read_metrics(trained.run)["episode"])
            changes = [*([f"preset={method.preset}"] if method.preset else []), *method.settings, *args.set]
            runs.append(Run(name, seed, "fake_aloha", changes, points, figures(people)))
            shares.append(people)
            share = people[-1]
            print(
                f"{name:10s} seed {seed}: human's share at the end {share['share']:.2f} [{share['low']:.2f}, "
                f"{share['high']:.2f}], share in the second half {later_share(people):.3f}",
                flush=True,
            )
    if args.json:
        write(args.json, runs)
    if args.plot:
        plot(runs, shares, args.plot)


if __name__ == "__main__":
    main()
