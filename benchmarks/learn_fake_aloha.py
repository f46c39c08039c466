"""Learning curves on the fake ALOHA task: the demo's recipe beside its baselines, resumable.

Every variant trains from the same ten scripted demonstrations in one process. Checkpoints are chosen on the validation
starts and reported on starts that no other command uses (100 each); no human intervenes in either:

    python benchmarks/learn_fake_aloha.py --variants rl_helper,bc --seeds 11 --json fake_aloha.json
    python benchmarks/learn_fake_aloha.py --variants rl_helper,discrete --seeds 0,1 --json grasp_critic.json

`discrete` has grippers that a grasp critic closes and opens. The pick and the hand-over succeed only where fingers
close at the cube.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import learning
from support.cli_args import chosen, split
from support.curves import draw_curves
from support.results import Run, write

from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.config.presets import configured

replace = dataclasses.replace
N_DEMOS = 10
Variant = Callable[[ExperimentConfig], ExperimentConfig]


def _with(config: ExperimentConfig, **parts: dict[str, Any]) -> ExperimentConfig:
    """`config` with fields of its parts replaced: `_with(c, learner={"max_steps": 5})`."""
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in parts.items()})


def _bc(config: ExperimentConfig, **agent: Any) -> ExperimentConfig:
    """Cloning of demonstrations and interventions, with as many policy updates as the RL agent makes."""
    return _with(replace(config, agent=BcConfig(**agent)), replay={"demo_fraction": 1.0})


def _alone(config: ExperimentConfig) -> ExperimentConfig:
    """No human shows the way out of a failure: imitation of all that was selected, twice the training."""
    config = replace(config, agent=replace(config.agent, bc_on="all"))
    return _with(config, actor={"intervention": "none"}, learner={"max_steps": 2 * config.learner.max_steps})


def _no_demos(config: ExperimentConfig) -> ExperimentConfig:
    config = _with(config, learner={"pretrain_steps": 0, "critic_pretrain_steps": 0})
    return replace(config, agent=replace(config.agent, bc_on="all"))


def _preset(name: str, *texts: str) -> Variant:
    """A published algorithm with networks of this task's size, the training loop and the scripted human as they are."""
    small = [split(text) for text in texts]
    return lambda config: configured(config, small, preset=name)


FLOW = ("agent.value_hidden_dims=256,256", "agent.actor_hidden_dims=256,256", "agent.flow_steps=5")
GAUSSIAN = ("agent.critic.hidden=256,256", "agent.hidden=256,256")

VARIANTS: dict[str, Variant] = {
    "rl_helper": lambda c: c,
    "rl_helper_1000": lambda c: _with(c, actor={"max_human_ticks": 1000}),
    "rl_alone": _alone,
    "rl_alone_default": lambda c: _with(c, actor={"intervention": "none"}),
    "hg_dagger": _bc,
    "hg_dagger_1000": lambda c: _with(_bc(c), actor={"max_human_ticks": 1000}),
    "horizon_1": lambda c: replace(c, chunk=replace(c.chunk, horizon=1)),
    "gaussian": lambda c: replace(c, agent=AcrlpdConfig(candidates=16)),
    "no_demos": _no_demos,
    "qc": _preset("qc", *FLOW, "agent.actor_num_samples=8"),
    "qc_fql": _preset("qc-fql", *FLOW),
    "qc_rlpd": _preset("qc-rlpd", *GAUSSIAN),
    "rlpd_qc": _preset("rlpd-qc", *GAUSSIAN),
    "discrete": lambda c: c,
}
EXPERIMENTS = {"discrete": "fake_aloha_discrete_gripper"}  # others are of fake_aloha
# BC is not an online run: its checkpoints are of pretraining, under both normalisers (best is reported).
BC_NORMALISERS = ("relative", "absolute_demo")
BC_UPDATES = (2_000, 4_000, 8_000, 16_000, 32_000)


def online(name: str, seed: int, demos: Path, args: argparse.Namespace) -> Run:
    """Train (or resume) one variant with one seed, evaluate every checkpoint, choose and report."""
    config = load_experiment(EXPERIMENTS.get(name, "fake_aloha"))
    config = _with(config, learner={"checkpoint_period": max(1, config.learner.max_steps // 6)})
    config = replace(VARIANTS[name](apply_overrides(config, args.overrides)), seed=seed)
    trained = learning.train(config, args.out / f"{name}_{seed}", [] if name == "no_demos" else [demos])
    curve = [trained.evaluate(step, args.episodes, "validation") for step in trained.steps]
    best, last = max(curve, key=lambda c: (c.rate, c.updates)).updates, curve[-1]
    reported = [trained.evaluate(at, args.episodes, best=at == best) for at in dict.fromkeys((best, last.updates))]
    return Run(name, seed, config.name, args.set, [*curve, *reported], {"wall_seconds": last.wall or 0.0})


def cloned(seed: int, demos: Path, args: argparse.Namespace) -> Run:
    """Clone the demonstrations under each normaliser to each length; the best on validation is marked."""
    points, wall = [], 0.0
    for actions in BC_NORMALISERS:
        for updates in BC_UPDATES:
            config = _with(
                _bc(apply_overrides(load_experiment("fake_aloha"), [*args.overrides, ("seed", str(seed))])),
                normaliser={"actions": actions},
                learner={"pretrain_steps": updates, "critic_pretrain_steps": 0, "warmup_episodes": 1, "max_steps": 1,
                         "training_starts": 0},
                actor={"intervention": "none"},
            )  # fmt: skip
            trained = learning.train(config, args.out / f"bc_{seed}_{actions}_{updates}", [demos])
            more = {"updates": updates, "note": f"normaliser.actions={actions}"}
            points.append([trained.evaluate(0, args.episodes, starts, **more) for starts in learning.STARTS])
            wall += points[-1][0].wall or 0.0
    best = max(points, key=lambda pair: pair[0].rate)
    best[1] = replace(best[1], best=True)
    return Run("bc", seed, "fake_aloha", args.set, [point for pair in points for point in pair], {"wall_seconds": wall})


def main() -> None:
    p = learning.parser(__doc__, "benchmark_fake_aloha", of="for every variant")
    p.add_argument("--variants", default="bc,rl_helper", help=f"of: bc, {', '.join(VARIANTS)}; or all")
    p.add_argument("--plot", type=Path, help="write the curves here (PNG)")
    args = learning.arguments(p)
    names = chosen(p, args.variants, ["bc", *VARIANTS], "variant")
    demos = learning.record(load_experiment("fake_aloha"), N_DEMOS, args.out / "demos")
    runs = [
        cloned(seed, demos, args) if name == "bc" else online(name, seed, demos, args)
        for seed in args.seeds
        for name in names
    ]
    if args.json:
        write(args.json, runs)
    if args.plot:
        axes = {
            "environment steps": lambda _, c: c.env_steps,
            "human ticks": lambda _, c: c.human_ticks,
            "wall time, s": lambda _, c: c.wall or 0,
        }
        draw_curves([run for run in runs if run.name != "bc"], args.plot, axes, "validation")


if __name__ == "__main__":
    main()
