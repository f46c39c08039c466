"""Clones that their own outcomes improve: success over iterations, steps and time, paired with the clone.

A clone of scripted demonstrations is trained once for each seed, and each rule starts from it: a learner and its actors
are real processes of the product. Mean policies are evaluated on starts that nothing was chosen on (`--validation`: on
those that settings are chosen on). `--shuffled` shuffles the outcomes of every iteration's episodes: what is learnt
then is drift. A finished run is not run again, an interrupted one goes on:

    python benchmarks/group_learning.py --preset ript-flow-sde --seeds 11,12,13 --json group_learning.json
    python benchmarks/group_learning.py --preset ript-flow-sde --seeds 11 --shuffled --json group_learning.json

`--against NAME` compares each run, in pairs of starts, with an earlier one of this name and seed: at as many
environment steps, as nearly as checkpoints allow, and its end with the best checkpoint of the other.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support import learning
from support.cli_args import keep_plan
from support.learning import Trained
from support.ports import free_port
from support.results import Checkpoint, Run, read, write

from serl_chunk.cli.learner import train_offline
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.evaluation.results import paired_difference
from serl_chunk.evaluation.rollouts import evaluate
from serl_chunk.fleet.engines import PROGRAM
from serl_chunk.fleet.local import run_both
from serl_chunk.learner.building import RunOptions
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import VALIDATION_SEED_BASE
from serl_chunk.viz import plots

TAUGHT_AT_ONCE = 16  # robots that a policy server decides for
STARTS = 600_000  # of evaluations here; nothing was tuned on them
SHUFFLED = Path(__file__).parent / "support" / "shuffled_learner.py"
SHUFFLED_NAME = ", shuffled"  # behind a rule's name; its line is dashed
CLONE_UPDATES = 8_000


def demos_of(task: str, demos: int, seed: int, out: Path) -> Path:
    """Return the folder of so many scripted demonstrations."""
    return out / f"{task}_demos_{demos}_{seed}"


def taught_by(run: Path, task: str, demos: int, seed: int, out: Path) -> Path:
    """Return the folder of so many successes of the clone that a run of `ript-flow-end` began with."""
    folder = out / f"{task}_taught_{demos}_{seed}"
    port = str(free_port())
    words = ["serve", "--exp_name", task, "--preset", "ript-flow-end", "--checkpoint_path", str(run),
             "--checkpoint_step", "0", "--port", port, "--max_batch", str(TAUGHT_AT_ONCE)]  # fmt: skip
    with subprocess.Popen([sys.executable, "-m", "serl_chunk", *words]) as server:
        try:
            learning.product(
                "record", "--policy", "server", "--n_demos", str(demos), "--n_envs", str(TAUGHT_AT_ONCE), "--out",
                str(folder), experiment=task,
                overrides=[f"actor.policy=openpi://127.0.0.1:{port}", "actor.policy_observation=state=state"],
            )  # fmt: skip
        finally:
            server.terminate()
    return folder


def demo_rows(config: ExperimentConfig, demos: int) -> int:
    """Return the `replay.demo_capacity` that holds so many demonstrations."""
    return max(config.replay.demo_capacity, demos * (config.robot.max_episode_steps + 1))


def recorded(config: ExperimentConfig, task: str, demos: int, seed: int, out: Path) -> Path:
    """Record so many scripted demonstrations, unless they are there; return their folder."""
    config = dataclasses.replace(config, seed=seed)
    return learning.record(config, demos, demos_of(task, demos, seed, out), learning.NOISE[task])


def clone_of(task: str, policy: str, demos: int, seed: int, out: Path, joint_noise: float, taught: Path | None) -> Path:
    """Return the run folder of a clone of so many demonstrations, scripted or `taught`, trained once."""
    base = load_experiment(task)
    agent = BcConfig(policy=policy, policy_updates=1, bc_joint_noise=joint_noise)  # type: ignore[arg-type]
    loop = dataclasses.replace(
        base.learner, pretrain_steps=0, offline_steps=CLONE_UPDATES, online_steps=0, checkpoint_period=0
    )
    actor = dataclasses.replace(base.actor, intervention="none")
    replay = dataclasses.replace(base.replay, demo_capacity=demo_rows(base, demos))
    config = dataclasses.replace(base, seed=seed, agent=agent, learner=loop, actor=actor, replay=replay)
    folder = taught or recorded(config, task, demos, seed, out)
    run = out / f"{task}_clone_{policy}_{demos}_{joint_noise:g}_{seed}"
    if (Trained(config, run).store.newest() or 0) < CLONE_UPDATES:
        train_offline(config, RunOptions([str(folder)], str(run)))
    return run


def train(config: ExperimentConfig, run: Path, words: Sequence[str], *, shuffled: bool, actors: int) -> Trained:
    """Train a run by a learner and its actor processes to its last iteration. Raises SystemExit where that failed."""
    run.parent.mkdir(parents=True, exist_ok=True)
    ids = [f"actor-{i + 1}" for i in range(actors)] if actors > 1 else []
    keep_plan(run.with_name(f"{run.name}.plan"), [*words, shuffled, *ids], run)
    trained = Trained(config, run)
    if (trained.store.newest() or 0) < config.group.iterations:
        program = (sys.executable, str(SHUFFLED)) if shuffled else PROGRAM
        own = [
            "--checkpoint_path",
            str(run),
            "--port",
            str(free_port()),
            "--spool_path",
            str(run.parent / f"{run.name}.spool"),
        ]
        given = [*words, *own]
        if run_both(given, pin=False, ip="127.0.0.1", actors=ids, program=program) != 0:
            raise SystemExit(f"{run} failed; run the same command again to go on")
    return trained


def successes(trained: Trained, step: int, episodes: int, starts: int, envs: Sequence[Any]) -> list[bool]:
    """Return which of the starts the mean policy of a checkpoint succeeds from."""

    def found() -> list[bool]:
        policy, _ = trained.policy(step)
        result = evaluate(trained.env, policy, trained.config, n=episodes, seed_base=starts, others=envs)
        return [bool(summary.success) for summary in result.summaries]

    return trained.kept(f"mean_{starts}_{step}_{episodes}", found)


def gain(before: Sequence[bool], after: Sequence[bool], key: str, label: str) -> dict[str, float]:
    """Print the difference of success in pairs of starts, and return it as figures of a run."""
    found = paired_difference(np.array(before), np.array(after))
    print(f"{label}: {100 * found.mean:+.0f} points ({100 * found.low:+.0f} .. {100 * found.high:+.0f})", flush=True)
    return {key: found.mean, f"{key}_low": found.low, f"{key}_high": found.high}


def draw(runs: Sequence[Run], file: Path) -> None:
    """Draw the mean policy's success of all runs, over environment steps and over time, as PNG."""
    rule = lambda run: run.name.removesuffix(SHUFFLED_NAME)  # noqa: E731
    names = list(dict.fromkeys(map(rule, runs)))
    colours = dict(
        zip(names, (plots.BLUE, plots.VERMILLION, plots.GREEN, plots.PURPLE, plots.SKY, plots.INK) * 3, strict=False)
    )
    with plots.new_figure(11, 4) as figure:
        for ax, of, label in zip(
            figure.subplots(1, 2), ("env_steps", "wall"), ("environment steps, millions", "minutes of training"),
            strict=True,
        ):  # fmt: skip
            scale = 1e6 if of == "env_steps" else 60.0
            for run in runs:
                x = [(getattr(c, of) or 0) / scale for c in run.checkpoints]
                first = run is next(r for r in runs if r.name == run.name)
                ax.plot(
                    x,
                    [c.rate for c in run.checkpoints],
                    color=colours[rule(run)],
                    linestyle="-" if run.name == rule(run) else "--",
                    label=run.name if first else "",
                )
            plots.percent_axis(ax, "success, mean policy")
            ax.set_xlabel(label)
        plots.add_legend(ax, "upper left")
        file.write_bytes(plots.to_png(figure))


def main() -> None:
    p = learning.parser(__doc__, "benchmark_groups", of="of the rule", seeds="11", episodes=200)
    p.add_argument("--preset", default="ript-flow-sde")
    p.add_argument("--task", default="fake_aloha", choices=learning.NOISE)
    p.add_argument("--policy", default="flow", help="of the clone")
    p.add_argument("--clone", type=Path, help="start from this run instead of a clone of scripted demonstrations")
    p.add_argument("--demos", type=int, default=10, help="demonstrations")
    p.add_argument(
        "--taught_by",
        metavar="RUN",
        help="demonstrations are successes of the clone that this run of "
        "ript-flow-end began with; {seed} in its path is the seed",
    )
    p.add_argument("--joint_noise", type=float, default=0.0, help="agent.bc_joint_noise of the clone")
    p.add_argument("--n_envs", type=int, default=64, help="of each actor")
    p.add_argument("--actors", type=int, default=1, help="processes that collect")
    p.add_argument("--every", type=int, default=10, help="iterations between checkpoints that are evaluated")
    p.add_argument("--shuffled", action="store_true", help="shuffle the outcomes of each iteration")
    p.add_argument("--validation", action="store_true", help="evaluate on the starts that settings are chosen on")
    p.add_argument("--name", default="", help="of these settings, in the results and in the folder")
    p.add_argument("--against", default="", help="--name of earlier runs that these are compared with")
    p.add_argument("--plot", type=Path, help="draw the runs in --json's file, as PNG")
    args = learning.arguments(p)
    if args.plot and not args.json:
        p.error("--plot draws what is in the file of --json: give that")
    name = (args.name or args.preset) + (SHUFFLED_NAME if args.shuffled else "")
    starts = VALIDATION_SEED_BASE if args.validation else STARTS
    for seed in args.seeds:

        def folder(name: str, seed: int = seed) -> Path:
            slug = f"{args.task}_{name}_{args.demos}_{seed}"
            return args.out / slug.replace(", ", "_").replace(" ", "_")

        taught = None
        if args.taught_by:
            taught = taught_by(Path(args.taught_by.format(seed=seed)), args.task, args.demos, seed, args.out)
        itself = args.policy == "laplace"  # a head of this agent alone: the run imitates before its iterations
        if itself:
            taught = taught or recorded(load_experiment(args.task), args.task, args.demos, seed, args.out)
            first = [("learner.pretrain_steps", str(CLONE_UPDATES)), ("agent.bc_joint_noise", f"{args.joint_noise:g}"),
                     ("replay.demo_capacity", str(demo_rows(load_experiment(args.task), args.demos)))]  # fmt: skip
        else:
            clone = args.clone or clone_of(args.task, args.policy, args.demos, seed, args.out, args.joint_noise, taught)
            first = [("learner.start_from", str(clone)), ("learner.pretrain_steps", "0")]
        given = [("seed", str(seed)), *first, ("group.eval_every", "0"), ("learner.keep_checkpoints", "1000"),
                 *args.overrides]  # fmt: skip
        config = configured(load_experiment(args.task), given, preset=args.preset)
        words = ["--exp_name", args.task, "--preset", args.preset, "--debug", "--launched_with_learner",
                 "--n_envs", str(args.n_envs), *(f"--config.{path}={value}" for path, value in given)]  # fmt: skip
        if itself or (config.agent.clones_successes and not args.clone):  # and the demonstrations
            words += ["--demo_path", str(taught or demos_of(args.task, args.demos, seed, args.out))]
        trained = train(config, folder(name), words, shuffled=args.shuffled, actors=args.actors)
        envs = [make_env(config.robot) for _ in range(min(args.n_envs, args.episodes) - 1)]
        walls = {row["step"]: row["wall"] for row in read_metrics(trained.run)["train"]}
        of: dict[int, list[bool]] = {}
        points = []
        for step in sorted({*range(0, config.group.iterations, args.every), config.group.iterations}):
            of[step] = successes(trained, step, args.episodes, starts, envs)
            meta = trained.store.restore_policy(step).meta
            kind = "validation" if args.validation else "reported"
            points.append(Checkpoint(step, sum(of[step]), args.episodes, kind, meta["env_steps"], 0,
                                     wall=walls.get(step, 0.0)))  # fmt: skip
            print(
                f"{trained.run.name}: iteration {step}, {meta['env_steps']:,} steps, {points[-1].rate:.0%}", flush=True
            )
        last = of[config.group.iterations]
        rows = read_metrics(trained.run)["train"]
        figures = gain(of[0], last, "gain", trained.run.name) | {
            "gradient_steps": float(sum(row.get("group/gradient_steps", 0) for row in rows)),
            "sampled_first": rows[0].get("group/success", 0.0),
            "sampled_last": rows[-1].get("group/success", 0.0),
        }
        means = ("actor/mean_weight", "actor/mean_weight_successes", "actor/mean_weight_failures")
        figures |= {key: float(np.mean([row[key] for row in rows if key in row])) for key in means if key in rows[-1]}
        if args.against:
            other = Trained(config, folder(args.against))
            its = {k: successes(other, k, args.episodes, starts, envs) for k in other.steps if k % args.every == 0}
            at = [{k: float(run.store.restore_policy(k).meta["env_steps"]) for k in found}
                  for run, found in ((trained, of), (other, its))]  # fmt: skip
            fewer = min(max(steps.values()) for steps in at)
            ours, theirs = (min(steps, key=lambda k, steps=steps: abs(steps[k] - fewer)) for steps in at)  # type: ignore[misc]
            best = max(its, key=lambda k: sum(its[k]))
            pair = f"{trained.run.name} over {other.run.name}"
            figures |= gain(its[theirs], of[ours], f"over {args.against}", f"{pair}, {ours} and {theirs} iterations")
            figures |= gain(its[best], last, f"over best of {args.against}", f"{pair}'s best, {best} iterations")
        for env in envs:
            env.close()
        if args.json:
            write(args.json, [Run(name, seed, args.task, args.set, points, figures)], join=True)
    if args.plot:
        draw(read(args.json).runs, args.plot)


if __name__ == "__main__":
    main()
