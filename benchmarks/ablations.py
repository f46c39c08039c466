"""One option changed at a time, on two tasks: how much does each of our choices matter?

Every row of `OPTIONS` is trained on the fake ALOHA task (with its scripted human) and on OGBench's cube-single
(offline, then online), for every seed, and compared with the row `default`, or with the one that `BESIDE` names. One
table comes out, OUT/table.md; `--json` writes the counts. What is finished is not run again:

    python benchmarks/ablations.py --seeds 0,1 --data cube-single-play-v0.npz --out runs/ablations

Without `--data` there is no cube-single. The intervals are of the measured episodes (Wilson's, and Newcombe's of a
difference), all seeds together: what other seeds would do is not in them, so the single seeds' rates stand beside.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learn_fake_aloha import N_DEMOS
from support import learning
from support.cli_args import chosen, keep_plan, split
from support.result_tables import difference_text, pooled
from support.results import Checkpoint, Run, read, write

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.evaluation.results import wilson_interval

CUBE_SINGLE = Path(__file__).with_name("cube_single.py")
DEFAULT, PRESET = "default", "preset"

# What the published Gaussian agents need to have the recipe's size; `preset=` is the command's --preset.
GAUSSIAN = ("preset=qc-rlpd", "agent.critic.hidden=256,256", "agent.hidden=256,256")
FAULTS = (
    "robot.scripted_human.fault_rate=0.3",
    "robot.scripted_human.miss_rate=0.3",
)  # a human who fumbles and overlooks

# option -> overrides of the experiment, the same on both tasks
# fmt: off
OPTIONS: dict[str, tuple[str, ...]] = {
    DEFAULT: (),
    "drop_terminal_windows": ("replay.terminal_windows=drop",),
    "expectile_0.9": ("agent.expectile=0.9",),
    "ensemble_2": ("agent.critic.ensemble=2",),
    "utd_0.5": ("learner.utd_ratio=0.5",),
    "candidates_1": ("agent.candidates=1",),
    "candidates_4": ("agent.candidates=4",),
    "candidates_8": ("agent.candidates=8",),
    "candidates_32": ("agent.candidates=32",),
    "no_policy_average": ("agent.policy_ema=0",),
    "policy_updates_1": ("agent.policy_updates=1",),
    "imitate_all": ("agent.bc_on=all",),
    "horizon_1": ("chunk.horizon=1",),
    "absolute_actions": ("normaliser.actions=absolute_demo",),
    "adjacent_windows": ("replay.windows=qc", "replay.terminal_windows=drop"),
    "decoupled_10": ("preset=decoupled", "chunk.critic_horizon=10"),
    "decoupled_20": ("preset=decoupled", "chunk.critic_horizon=20"),
    "replan_early": (
        "preset=decoupled", "chunk.critic_horizon=10", "agent.prefix_lengths=5", "agent.replan_spread=0.02",
        "actor.adaptive_execution=True",
    ),
    "delay_2": ("actor.delay_ticks=2",),
    "delay_2_trained": ("actor.delay_ticks=2", "agent.train_delay=sampled"),
    "gaussian": GAUSSIAN,
    "gaussian_16": (*GAUSSIAN, "agent.candidates=16"),
    "helper_errs": FAULTS,
}
# fmt: on
# What a row is compared with, where that is not the default.
BESIDE = {
    "replan_early": "decoupled_10",
    "delay_2_trained": "delay_2",
    "gaussian_16": "gaussian",
}
# Without online steps these train and are evaluated as the default is.
ONLINE = ("utd_0.5",)


def configuration(experiment: str, texts: Sequence[str]) -> ExperimentConfig:
    """The experiment with settings `field=value`; of two for one field the later one counts. Raises ConfigError."""
    return _configuration(experiment, tuple(texts))


@functools.cache  # each option is compared with all before it
def _configuration(experiment: str, texts: tuple[str, ...]) -> ExperimentConfig:
    last = dict(map(split, texts))
    preset = last.pop(PRESET, None)
    return configured(load_experiment(experiment), list(last.items()), preset=preset)


def says_nothing(option: str, experiment: str, texts: Sequence[str], *, online: bool = True) -> str:
    """Reason not to run `option` there: another row is the same, or no human intervenes; "" where there is none."""
    if option in ONLINE and not online:
        return "is the same as default without online steps"
    if load_experiment(experiment).actor.intervention == "none" and any(
        "intervention" in s or "scripted_human" in s for s in OPTIONS[option]
    ):
        return "is about interventions, and no human intervenes"
    config = configuration(experiment, [*texts, *OPTIONS[option]])
    for earlier in itertools.takewhile(lambda o: o != option, OPTIONS):
        if configuration(experiment, [*texts, *OPTIONS[earlier]]) == config:
            return f"is the same as {earlier}"
    return ""


def folder(task: str, option: str, args: argparse.Namespace, plan: Sequence[Any]) -> Path:
    """Where the runs of one row lie; refuses those that were made another way."""
    out = args.out / task / option
    out.mkdir(parents=True, exist_ok=True)
    keep_plan(out / "plan.json", [*plan, args.episodes, args.set, OPTIONS[option]], out)
    return out


def on_fake_aloha(option: str, seed: int, args: argparse.Namespace) -> Checkpoint:
    """The last checkpoint of one run of the demo's recipe, on held-out starts without interventions."""
    length = [f"learner.max_steps={args.fake_steps}", f"learner.checkpoint_period={args.fake_steps}"]
    config = configuration("fake_aloha", [*length, *args.set, *OPTIONS[option]])
    out = folder("fake_aloha", option, args, [args.fake_steps])
    demos = learning.record(load_experiment("fake_aloha"), N_DEMOS, args.out / "fake_aloha" / "demos")
    trained = learning.train(dataclasses.replace(config, seed=seed), out / f"rl_helper_{seed}", [demos])
    return trained.evaluate(trained.steps[-1], args.episodes)


def on_cube_single(option: str, seed: int, args: argparse.Namespace) -> Checkpoint:
    """The last evaluation of one run of the product on OGBench's data, offline and then online."""
    out = folder("cube_single", option, args, [args.offline_steps, args.online_steps])
    figures = out / f"figures_{seed}.json"
    options = dict(map(split, OPTIONS[option]))
    method = options.pop(PRESET, "ours")
    command = [sys.executable, str(CUBE_SINGLE), "--data", str(args.data), "--out", str(out), "--methods", method]
    command += [
        "--seeds",
        str(seed),
        "--episodes",
        str(args.episodes),
        "--json",
        str(figures),
        "--port",
        str(args.port),
    ]
    command += ["--offline_steps", str(args.offline_steps), "--online_steps", str(args.online_steps)]
    command += ["--eval_interval", str(args.offline_steps)]
    for setting in (*args.set, *(f"{field}={value}" for field, value in options.items())):
        command += ["--set", setting]
    subprocess.run(command, check=True)
    [run] = read(figures).runs
    return run.checkpoints[-1]


TASKS = {"fake_aloha": on_fake_aloha, "cube_single": on_cube_single}
EXPERIMENTS = {"fake_aloha": "fake_aloha", "cube_single": "ogbench"}


def table(runs: Sequence[Run]) -> str:
    """Return the table as it goes into a document; a star marks a difference whose interval excludes 0."""
    lines = ["| task | option | success [95 %] | seeds | difference [95 %] |", "|---|---|---|---|---|"]
    for task, option in itertools.product(TASKS, OPTIONS):
        found = {run.name: dict[int, Checkpoint]() for run in runs}
        for run in runs:
            if run.experiment == EXPERIMENTS[task]:
                found[run.name][run.seed] = run.checkpoints[-1]
        if not (points := found.get(option)):
            continue
        count = pooled(list(points.values()))
        low, high = wilson_interval(*count)
        seeds = ", ".join(f"{c.rate:.2f}" for c in points.values())
        # The same seeds of both, however far the run has come.
        beside, difference = BESIDE.get(option, DEFAULT), ""
        shared = [seed for seed in points if seed in found.get(beside, {})]
        if option != DEFAULT and shared:
            ours, base = (pooled([found[o][s] for s in shared]) for o in (option, beside))
            difference = difference_text(ours, base) + ("" if beside == DEFAULT else f" beside {beside}")
        lines.append(f"| {task} | {option} | {count.rate:.2f} [{low:.2f}, {high:.2f}] | {seeds} | {difference} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    p = learning.parser(__doc__, "ablations", of="for every row")
    p.add_argument("--options", default="all", help=f"separated by commas, of: {', '.join(OPTIONS)}; or all")
    p.add_argument("--tasks", default=None, help=f"of: {', '.join(TASKS)}; by default those there is data for")
    p.add_argument("--data", type=Path, help="OGBench's cube-single-play .npz, for cube_single")
    p.add_argument("--fake_steps", type=int, default=8_000, help="updates on fake_aloha")
    p.add_argument("--offline_steps", type=int, default=20_000, help="updates on cube_single before actors begin")
    p.add_argument("--online_steps", type=int, default=10_000, help="on cube_single")
    p.add_argument("--port", type=int, default=5688)
    args = learning.arguments(p)
    options = chosen(p, args.options, OPTIONS, "option")
    tasks = chosen(p, args.tasks or ("all" if args.data else "fake_aloha"), TASKS, "task")
    if "cube_single" in tasks and args.data is None:
        p.error("cube_single needs --data: OGBench's cube-single-play .npz")
    # What the others are compared with, before them.
    options = [*dict.fromkeys([DEFAULT, *(BESIDE[o] for o in options if o in BESIDE), *options])]
    args.out.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    for seed in args.seeds:
        for task in tasks:
            for option in options:
                online = task != "cube_single" or args.online_steps > 0
                if why := says_nothing(option, EXPERIMENTS[task], args.set, online=online):
                    print(f"{task:12s} {option} {why}: no run", flush=True)
                    continue
                count = TASKS[task](option, seed, args)
                runs.append(Run(option, seed, EXPERIMENTS[task], [*args.set, *OPTIONS[option]], [count]))
                print(f"{task:12s} seed {seed} {option:24s} {count.successes}/{count.episodes}", flush=True)
                (args.out / "table.md").write_text(table(runs))
    print(table(runs))
    if args.json:
        write(args.json, runs)


if __name__ == "__main__":
    main()
