"""Benefit of human ticks on the fake ALOHA task: our recipe beside RLPD, HIL-SERL, HG-DAgger and cloning, same human.

Every method trains in one process from the same ten scripted demonstrations, with interventions of the same scripted
human during collection (late, noisy, and with faults under `--set robot.scripted_human.fault_rate=0.2`).
Of every checkpoint, success is measured on 100 held-out starts without interventions. A finished run is not run again,
an interrupted one is resumed:

    python benchmarks/human_in_the_loop.py --seeds 0,1 --json figures.json --plot human_in_the_loop.png

`--quick` trains tiny networks for a few dozen updates: it shows that everything runs, and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from learn_fake_aloha import N_DEMOS, REPORT_SEED_BASE, evaluate_checkpoint
from support.cli_args import add_settings, chosen, keep_plan, settings, split
from support.results import Run, checkpoint, write

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.learner.building import RunOptions
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.metrics import read_metrics

EPISODES = 20  # of the moving intervention share
RESAMPLES = 1_000  # of its bootstrap interval


class Method(NamedTuple):
    """What is changed of the experiment `fake_aloha`, and how its curve is drawn."""

    label: str
    preset: str | None
    settings: tuple[str, ...]
    color: str


CLONE = ("agent.flow.hidden=256,256", "agent.flow.steps=5", "agent.policy_updates=3", "agent.policy_ema=0.999")
GAUSSIAN = ("agent.critic.hidden=256,256", "agent.hidden=256,256")
UPDATES = 12_000  # of the experiment, at 0.25 an online step
METHODS = {
    "ours": Method("ours: the experiment as it is", None, (), "#d62728"),
    # RLPD has no imitation to begin with, and its critic no phase of its own.
    "rlpd-qc": Method(
        "RLPD of Q-chunking", "rlpd-qc",
        (*GAUSSIAN, "learner.pretrain_steps=0"), "#8c564b",
    ),
    # Its loop has no ratio; one process needs one, and figures over online steps need the same number of these.
    "hil-serl": Method("HIL-SERL", "hil-serl", ("learner.utd_ratio=4", f"learner.max_steps={16 * UPDATES}"), "#bcbd22"),
    "qc-rlpd": Method("QC-RLPD, pretrained", "qc-rlpd", GAUSSIAN, "#9467bd"),
    "hg-dagger": Method("HG-DAgger (flow)", "hg-dagger", CLONE, "#2ca02c"),
    # Learns nothing from human steps; interventions happen all the same. Adjacent windows draw demonstrations alone:
    # other ones would fill its batches with human steps, which it does not imitate.
    "bc": Method(
        "BC (flow)", "bc",
        (*CLONE, "agent.bc_on=demo", "replay.demo_fraction=1", "replay.windows=qc",
         "replay.terminal_windows=drop"), "#7f7f7f",
    ),
}  # fmt: skip
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
    config = configured(experiment, [split(s) for s in texts], preset=method.preset)
    learner = dataclasses.replace(
        config.learner,
        checkpoint_period=max(1, config.learner.max_steps // checkpoints),
        keep_checkpoints=checkpoints + 1,
    )
    return dataclasses.replace(config, seed=seed, learner=learner)


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


def run(name: str, seed: int, demos: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train (or resume) one method with one seed and measure its checkpoints; what is measured is kept."""
    config = configuration(name, seed, args.checkpoints, args.set, quick=args.quick)
    folder, file = args.out / f"{name}_{seed}", args.out / f"{name}_{seed}.json"
    plan = [config.learner.max_steps, args.checkpoints, args.episodes, *METHODS[name].settings, *args.set]
    keep_plan(args.out / f"{name}_{seed}.plan", plan, folder)
    if file.exists():
        return json.loads(file.read_text())
    learner, _ = train_local(config, RunOptions([str(demos)], str(folder)))
    if learner.updates < config.learner.max_steps:
        raise SystemExit(f"{name} seed {seed} was interrupted at step {learner.updates}; run the same command again")
    env, store = make_env(config.robot), CheckpointStore(folder)
    agent = make_agent(config, env.robot_spec)
    curve = []
    for step in store.steps():
        curve.append(evaluate_checkpoint(config, env, agent, store, step, args.episodes, REPORT_SEED_BASE))
        print(f"{name} seed {seed} step {step}: {curve[-1]['success_rate']:.2f}", flush=True)
    share = human_share(read_metrics(folder)["episode"])
    result = {"method": name, "seed": seed, "curve": curve, "people": share}
    file.write_text(json.dumps(result, indent=1))
    return result


def as_run(result: dict[str, Any], episodes: int, changes: Sequence[str]) -> Run:
    """Return a result of `run` in the common form, with the human's share at the end of training."""
    method, last = METHODS[result["method"]], result["people"][-1]
    preset = [f"preset={method.preset}"] if method.preset else []
    points = [checkpoint(p, episodes) for p in result["curve"]]
    figures = {
        "human_share": last["share"],
        "human_share_low": last["low"],
        "human_share_high": last["high"],
        "later_share": later_share(result["people"]),
    }
    return Run(result["method"], result["seed"], "fake_aloha", [*preset, *method.settings, *changes], points, figures)


def plot(results: list[dict[str, Any]], episodes: int, path: Path) -> None:
    """Success, the human's share and the human ticks over online steps; a line a run, a colour a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (success, share, ticks) = plt.subplots(1, 3, figsize=(17, 5), layout="constrained")
    for r in results:
        color, label = METHODS[r["method"]].color, METHODS[r["method"]].label
        x = [p["env_steps"] / 1000 for p in r["curve"]]
        success.fill_between(x, [p["low"] for p in r["curve"]], [p["high"] for p in r["curve"]], color=color, alpha=0.1)
        success.plot(x, [p["success_rate"] for p in r["curve"]], marker=".", color=color, label=label)
        x = [p["env_steps"] / 1000 for p in r["people"]]
        share.fill_between(x, [p["low"] for p in r["people"]], [p["high"] for p in r["people"]], color=color, alpha=0.1)
        share.plot(x, [p["share"] for p in r["people"]], color=color, linewidth=1)
        ticks.plot(x, [p["human_ticks"] / 1000 for p in r["people"]], color=color, linewidth=1)
    success.set(ylabel=f"success alone, {episodes} held-out starts, 95 % interval", ylim=(0, 1.02))
    share.set(ylabel=f"human's share of the ticks, last {EPISODES} episodes, 95 % interval", ylim=(0, 1.02))
    ticks.set(ylabel="human ticks so far, thousands")
    for axis in (success, share, ticks):
        axis.set_xlabel("online steps, thousands")
        axis.grid(alpha=0.3)
    handles, labels = success.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=len(unique), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Run what is missing, print one line a run, write the figures and the plot."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--methods", default="ours,rlpd-qc,qc-rlpd,hg-dagger,bc", help=f"of: {', '.join(METHODS)}")
    p.add_argument("--seeds", default="0", help="separated by commas")
    p.add_argument("--checkpoints", type=int, default=6, help="of each run that are measured, beside the first")
    p.add_argument("--episodes", type=int, default=100, help="of each measurement")
    p.add_argument("--out", type=Path, default=Path("runs/human_in_the_loop"))
    add_settings(p, "for every method")
    p.add_argument("--quick", action="store_true", help="tiny, in OUT/quick: does it run?")
    p.add_argument("--json", type=Path, help="write the results here (benchmarks/README.md, Results)")
    p.add_argument("--plot", type=Path, help="write the curves here (PNG)")
    args = p.parse_args()
    names = chosen(p, args.methods, METHODS, "method")
    settings(p, args.set)
    if args.quick:
        args.out, args.checkpoints, args.episodes = args.out / "quick", 2, 2
    args.out.mkdir(parents=True, exist_ok=True)
    demos = args.out / "demos"
    run_record(load_experiment("fake_aloha"), N_DEMOS, str(demos), policy="scripted", noise=None, cameras=())
    results = []
    for seed in map(int, args.seeds.split(",")):
        for name in names:
            r = run(name, seed, demos, args)
            results.append(r)
            last, share = r["curve"][-1], r["people"][-1]
            print(
                f"{name:10s} seed {seed}: success alone {last['success_rate']:.2f} [{last['low']:.2f}, "
                f"{last['high']:.2f}]; human's share at the end {share['share']:.2f} [{share['low']:.2f}, "
                f"{share['high']:.2f}], {share['human_ticks']} human ticks in {last['env_steps']} steps, "
                f"share in the second half {later_share(r['people']):.3f}",
                flush=True,
            )
    if args.json:
        write(args.json, [as_run(r, args.episodes, args.set) for r in results])
    if args.plot:
        plot(results, args.episodes, args.plot)


if __name__ == "__main__":
    main()
