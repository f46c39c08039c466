"""Learning curves on the fake ALOHA task: the demo's recipe beside its baselines, resumable.

Every variant trains from the same ten scripted demonstrations in one process. Checkpoints are chosen on the validation
starts and reported on starts that no other command uses (100 each); no human intervenes in either. A finished run is
not run again, an interrupted one is resumed:

    python benchmarks/learn_fake_aloha.py --variants rl_helper,bc --seeds 11 --json fake_aloha.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.cli_args import add_settings, chosen, differing, keep_plan, settings, split
from support.results import Run, checkpoint, write

from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.config.presets import configured
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.evaluation.rollouts import VALIDATION_SEED_BASE, evaluate
from serl_chunk.learner.building import RunOptions
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import Snapshot

replace = dataclasses.replace
N_DEMOS = 10
# Reported starts. Not the product's evaluation starts: the recipe was tuned while these were being looked at.
REPORT_SEED_BASE = 500_000


def _with(config: ExperimentConfig, **parts: dict[str, Any]) -> ExperimentConfig:
    """`config` with fields of its parts replaced: `_with(c, learner={"max_steps": 5})`."""
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in parts.items()})


def _bc(config: ExperimentConfig, **agent: Any) -> ExperimentConfig:
    """Cloning of demonstrations and interventions, with as many policy updates as the RL agent makes."""
    return _with(replace(config, agent=BcConfig(**agent)), replay={"demo_fraction": 1.0})


def _gaussian(config: ExperimentConfig) -> ExperimentConfig:
    return replace(config, agent=AcrlpdConfig(candidates=16))


def _alone(config: ExperimentConfig) -> ExperimentConfig:
    """No human shows the way out of a failure: imitation of all that was selected, twice the training."""
    config = replace(config, agent=replace(config.agent, bc_on="all"))
    return _with(config, actor={"intervention": "none"}, learner={"max_steps": 2 * config.learner.max_steps})


def _no_demos(config: ExperimentConfig) -> ExperimentConfig:
    config = _with(config, learner={"pretrain_steps": 0, "critic_pretrain_steps": 0})
    return replace(config, agent=replace(config.agent, bc_on="all"))


def _preset(name: str, *texts: str) -> Callable[[ExperimentConfig], ExperimentConfig]:
    """A published algorithm with networks of this task's size, the training loop and the scripted human as they are."""
    small = [split(text) for text in texts]
    return lambda config: configured(config, small, preset=name)


FLOW = ("agent.value_hidden_dims=256,256", "agent.actor_hidden_dims=256,256", "agent.flow_steps=5")
GAUSSIAN = ("agent.critic.hidden=256,256", "agent.hidden=256,256")

VARIANTS: dict[str, Callable[[ExperimentConfig], ExperimentConfig]] = {
    "rl_helper": lambda c: c,
    "rl_helper_1000": lambda c: _with(c, actor={"max_human_ticks": 1000}),
    "rl_alone": _alone,
    "rl_alone_default": lambda c: _with(c, actor={"intervention": "none"}),
    "hg_dagger": lambda c: _bc(c),
    "hg_dagger_1000": lambda c: _with(_bc(c), actor={"max_human_ticks": 1000}),
    "horizon_1": lambda c: replace(c, chunk=replace(c.chunk, horizon=1)),
    "gaussian": _gaussian,
    "no_demos": _no_demos,
    "qc": _preset("qc", *FLOW, "agent.actor_num_samples=8"),
    "qc_fql": _preset("qc-fql", *FLOW),
    "qc_rlpd": _preset("qc-rlpd", *GAUSSIAN),
    "rlpd_qc": _preset("rlpd-qc", *GAUSSIAN),
}
# BC is not an online run: its checkpoints are of pretraining, under both normalisers (best is reported).
BC_NORMALISERS = ("relative", "absolute_demo")
BC_UPDATES = (2_000, 4_000, 8_000, 16_000, 32_000)


def evaluate_checkpoint(
    config: ExperimentConfig, env: Any, agent: Any, store: CheckpointStore, step: int, n: int, base: int
) -> dict[str, Any]:
    """The mean policy of one checkpoint on `n` starts from `base`."""
    checkpoint = store.restore_policy(step)
    preprocess = Preprocess.restored(config, env.robot_spec, checkpoint.meta, checkpoint.normaliser)
    policy = ChunkPolicy(agent, preprocess, env.robot_spec, seed=1)
    policy.swap(Snapshot(step, checkpoint.params))
    result = evaluate(env, policy, config, n=n, seed_base=base)
    return {
        "step": step,
        "env_steps": checkpoint.meta["env_steps"],
        "human_ticks": checkpoint.meta["human_ticks"],
        "success_rate": result.success_rate,
        "low": result.interval.low,
        "high": result.interval.high,
    }


def run_variant(name: str, seed: int, demos: Path, out: Path, n: int, config: ExperimentConfig) -> dict[str, Any]:
    """Train (or resume) one variant with one seed, evaluate every checkpoint, choose and report."""
    result_file, run = out / f"{name}_{seed}.json", out / f"{name}_{seed}"
    config = replace(VARIANTS[name](config), seed=seed)
    keep_plan(out / f"{name}_{seed}.plan", [n, *differing(config)], run)
    if result_file.exists():
        return json.loads(result_file.read_text())
    paths = [] if name == "no_demos" else [str(demos)]
    learner, _ = train_local(config, RunOptions(paths, str(run)))
    if learner.updates < config.learner.max_steps:
        raise SystemExit(f"{name} seed {seed} was interrupted at step {learner.updates}; run the same command again")
    env, store = make_env(config.robot), CheckpointStore(run)
    agent = make_agent(config, env.robot_spec)
    walls = {r["step"]: r["wall"] for r in read_metrics(run)["train"]}
    curve = []
    for step in store.steps():
        point = evaluate_checkpoint(config, env, agent, store, step, n, VALIDATION_SEED_BASE)
        point["wall"] = max((w for s, w in walls.items() if s <= step), default=0.0)
        curve.append(point)
        print(f"{name} seed {seed} step {step}: validation {point['success_rate']:.2f}", flush=True)
    best = max(curve, key=lambda p: (p["success_rate"], p["step"]))
    result = {
        "variant": name,
        "seed": seed,
        "curve": curve,
        "last": evaluate_checkpoint(config, env, agent, store, curve[-1]["step"], n, REPORT_SEED_BASE),
        "best": evaluate_checkpoint(config, env, agent, store, best["step"], n, REPORT_SEED_BASE),
        "wall": curve[-1]["wall"],
    }
    result_file.write_text(json.dumps(result, indent=2))
    return result


def try_candidates(
    name: str, seed: int, out: Path, n: int, config: ExperimentConfig, counts: list[int]
) -> dict[int, dict[str, Any]]:
    """The last checkpoint of a finished run, acting by the best of other numbers of candidates than it had."""
    file = out / f"{name}_{seed}_candidates.json"
    done = {int(k): v for k, v in json.loads(file.read_text()).items()} if file.exists() else {}
    config, store = VARIANTS[name](config), CheckpointStore(out / f"{name}_{seed}")
    env = make_env(config.robot)
    for count in counts:
        if count not in done:
            c = replace(config, agent=replace(config.agent, candidates=count))
            agent = make_agent(c, env.robot_spec)
            done[count] = evaluate_checkpoint(c, env, agent, store, store.steps()[-1], n, REPORT_SEED_BASE)
            file.write_text(json.dumps(done, indent=2))
    return done


def run_bc(seed: int, demos: Path, out: Path, n: int, config: ExperimentConfig) -> dict[str, Any]:
    """Clone the demonstrations under each normaliser to each length; the best on validation is reported."""
    result_file = out / f"bc_{seed}.json"
    keep_plan(out / f"bc_{seed}.plan", [n, *differing(config)], out)
    if result_file.exists():
        return json.loads(result_file.read_text())
    points = []
    for actions in BC_NORMALISERS:
        for updates in BC_UPDATES:
            c = _with(
                _bc(config),
                normaliser={"actions": actions},
                learner={"pretrain_steps": updates, "critic_pretrain_steps": 0, "warmup_episodes": 1, "max_steps": 1,
                         "training_starts": 0},
                actor={"intervention": "none"},
            )  # fmt: skip
            run = out / f"bc_{seed}_{actions}_{updates}"
            started = time.perf_counter()
            train_local(replace(c, seed=seed), RunOptions([str(demos)], str(run)))
            env, store = make_env(c.robot), CheckpointStore(run)
            agent = make_agent(c, env.robot_spec)
            point = evaluate_checkpoint(c, env, agent, store, 0, n, VALIDATION_SEED_BASE)
            point |= {"actions": actions, "updates": updates, "wall": time.perf_counter() - started}
            point["reported"] = evaluate_checkpoint(c, env, agent, store, 0, n, REPORT_SEED_BASE)
            points.append(point)
            print(f"bc seed {seed} {actions} {updates}: validation {point['success_rate']:.2f}", flush=True)
    best = max(points, key=lambda p: p["success_rate"])
    result = {"variant": "bc", "seed": seed, "curve": points, "best": best["reported"], "last": best["reported"],
              "wall": sum(p["wall"] for p in points)}  # fmt: skip
    result_file.write_text(json.dumps(result, indent=2))
    return result


def as_run(result: dict[str, Any], episodes: int, experiment: str, changes: list[str]) -> Run:
    """Return the result of `run_variant` or `run_bc` in the common form.

    Args:
        episodes: of each evaluation.
        changes: of the experiment, for every variant.
    """
    clone = result["variant"] == "bc"  # one checkpoint of each training, counted in updates of imitation
    points = []
    chosen_clone = max(result["curve"], key=lambda p: p["success_rate"])
    for p in result["curve"]:
        more = {"updates": p["updates"], "note": f"normaliser.actions={p['actions']}"} if clone else {}
        points.append(checkpoint(p, episodes, "validation", **more))
        if clone:
            points.append(checkpoint(p["reported"], episodes, best=p is chosen_clone, **more))
    best, last = result["best"], result["last"]
    if not clone and best["step"] != last["step"]:
        points.append(checkpoint(best, episodes, best=True))
    if not clone:
        points.append(checkpoint(last, episodes, best=best["step"] == last["step"]))
    wall = {"wall_seconds": round(result["wall"], 1)}
    return Run(result["variant"], result["seed"], experiment, changes, points, wall)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Validation success over environment steps, human ticks and wall time; one line a run, one colour a variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(r["variant"] for r in results if r["variant"] != "bc"))
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), sharey=True, layout="constrained")
    colours = plt.get_cmap("tab10" if len(names) <= 10 else "tab20")
    for axis, (key, label) in zip(
        axes,
        (("env_steps", "environment steps"), ("human_ticks", "human ticks"), ("wall", "wall time, s")),
        strict=True,
    ):
        for r in results:
            if r["variant"] == "bc":
                continue
            i = names.index(r["variant"])
            first = r["seed"] == min(q["seed"] for q in results if q["variant"] == r["variant"])
            axis.plot([p[key] for p in r["curve"]], [100 * p["success_rate"] for p in r["curve"]], marker=".",
                      color=colours(i), label=r["variant"] if first else None)  # fmt: skip
        for k, r in enumerate(r for r in results if r["variant"] == "bc"):
            axis.axhline(100 * r["best"]["success_rate"], color="black", linestyle=":", label=None if k else "best bc")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("success, %, 100 validation starts, no interventions")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the chosen variants and seeds, print one line each, write JSON and a plot."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--variants", default="bc,rl_helper", help=f"of: bc, {', '.join(VARIANTS)}; or all")
    p.add_argument("--seeds", default="0", help="comma-separated")
    p.add_argument("--episodes", type=int, default=100, help="evaluation episodes per checkpoint")
    p.add_argument("--candidates", default="", help="also evaluate each last checkpoint with these, comma-separated")
    p.add_argument("--out", type=Path, default=Path("runs/benchmark_fake_aloha"))
    p.add_argument("--json", type=Path, help="write the results here (benchmarks/README.md, Results)")
    p.add_argument("--plot", type=Path, help="write the curves here (PNG)")
    add_settings(p, "for every variant")
    args = p.parse_args()
    names = chosen(p, args.variants, ["bc", *VARIANTS], "variant")
    config = load_experiment("fake_aloha")
    config = _with(config, learner={"checkpoint_period": config.learner.max_steps // 6})
    config = apply_overrides(config, settings(p, args.set))
    args.out.mkdir(parents=True, exist_ok=True)
    demos = args.out / "demos"
    run_record(config, N_DEMOS, str(demos), policy="scripted", noise=None, cameras=())
    results = []
    for seed in map(int, args.seeds.split(",")):
        for name in names:
            run = run_bc if name == "bc" else None
            r = run(seed, demos, args.out, args.episodes, config) if run else run_variant(
                name, seed, demos, args.out, args.episodes, config
            )  # fmt: skip
            results.append(r)
            if args.candidates and name != "bc":
                counts = [int(c) for c in args.candidates.split(",")]
                r["candidates"] = try_candidates(name, seed, args.out, args.episodes, config, counts)
                for count, point in r["candidates"].items():
                    print(f"{name:15s} seed {seed}: best of {count}: {point['success_rate']:.2f} "
                          f"[{point['low']:.2f}, {point['high']:.2f}]", flush=True)  # fmt: skip
            b, last = r["best"], r["last"]
            print(
                f"{name:15s} seed {seed}: best checkpoint {b['success_rate']:.2f} [{b['low']:.2f}, {b['high']:.2f}], "
                f"last {last['success_rate']:.2f} [{last['low']:.2f}, {last['high']:.2f}], "
                f"{last['env_steps']} steps, {last['human_ticks']} human ticks, {r['wall']:.0f} s",
                flush=True,
            )
    if args.json:
        write(args.json, [as_run(r, args.episodes, config.name, args.set) for r in results])
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
