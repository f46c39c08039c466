"""A clone by a small pi0 that reinforcement learning improves: from pictures, through processes, over robot steps.

Each seed has demonstrations of its own, and a clone that is stopped at its first checkpoint with 25 to 60 % of 100
validation starts, exported as openpi's, and imported again. A probe reads the cube's place from the frozen features
that the critic sees. Each rule then starts from the clone, with a learner and an actor; what acts in the end is
compared with one sample of the clone on starts that nothing was chosen on. Finished parts are not repeated:

    python benchmarks/learn_pi0_rl.py --rules edits,own --seeds 1,2,3 --json pi0_rl.json
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from support import learning
from support.cli_args import keep_plan
from support.learning import Trained
from support.results import Checkpoint, Run, write

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.learner import train_offline
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.config.presets import configured
from serl_chunk.data.prompts import make_prompts
from serl_chunk.evaluation.results import paired_difference
from serl_chunk.evaluation.rollouts import Entry, evaluate_in_turns
from serl_chunk.fleet.engines import PROGRAM
from serl_chunk.fleet.local import run_both
from serl_chunk.learner.building import RunOptions
from serl_chunk.robots.fake.env import FakeAlohaEnv
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import ONE, PROMPT, PROMPT_MASK

CLONE, RL = "fake_aloha_pi0", "fake_aloha_pi0_rl"
N_DEMOS, EVERY, UPDATES = 200, 1_000, 12_000
LEAST, MOST = 0.25, 0.60  # success of a clone that can be improved
STARTS = 600_000  # of evaluations; nothing was tuned on them
PROBED = 700_000
STEPS, CHECKPOINTS = 20_000, 5  # of the robot; checkpoints that are evaluated
AT_ONCE = 16  # episodes of an evaluation

# Name -> settings of its training, and its preset. All others are those of the experiment.
RULES: dict[str, dict[str, str]] = {
    "edits": {"actor.intervention": "none"},
    "own": {"actor.intervention": "none", "agent.edit_scale": "0"},
    "edit": {"actor.intervention": "none", "agent.target": "policy", "agent.improve_by": "edit"},
    "rlt": {"actor.intervention": "none", "agent.target": "policy", "agent.improve_by": "rlt"},
    "dsrl": {
        "actor.intervention": "none",
        "agent.target": "policy",
        "agent.improve_by": "dsrl",
        "agent.edit_scale": "0",
    },
    # All demonstrations succeed: there is nothing to balance.
    "q_gradient": {"preset": "acrlpd-pi0", "actor.intervention": "none", "replay.positive_fraction": "none"},
    # A bound for the others: the critic's state has what a tracker would tell. pi0 reads the joints alone.
    "tracked": {
        "actor.intervention": "none",
        "agent.critic_sees": "state",
        "agent.pi0.state_dims": "14",
        "learner.batch_size": "256",
        "robot.observe_objects": "True",
    },
    "person": {"actor.intervention": "scripted", "agent.pi0.trainable": "expert"},
}


def clone_config(seed: int, updates: int) -> ExperimentConfig:
    changes = {
        "seed": seed, "learner.offline_steps": updates, "learner.online_steps": 0, "learner.pretrain_steps": 0,
        "learner.eval_interval": 0, "learner.checkpoint_period": EVERY, "learner.keep_checkpoints": 100,
        "actor.intervention": "none", "agent.pi0.lr_cosine": UPDATES,
    }  # fmt: skip
    return apply_overrides(load_experiment(CLONE), [(path, str(value)) for path, value in changes.items()])


def clone(seed: int, out: Path) -> tuple[Path, Path]:
    """Return the imported weights of a clone, and the folder of its demonstrations."""
    demos, run, file = out / f"demos_{seed}", out / f"clone_{seed}", out / f"clone_{seed}.npz"
    learning.record(clone_config(seed, UPDATES), N_DEMOS, demos)
    for updates in range(EVERY, UPDATES + 1, EVERY):
        trained = Trained(clone_config(seed, updates), run)
        if (trained.store.newest() or 0) < updates:
            train_offline(trained.config, RunOptions([str(demos)], str(run)))
        point = trained.evaluate(updates, 100, "validation")
        if point.rate >= LEAST:
            if point.rate > MOST:
                raise SystemExit(f"{run}: {point.rate:.2f} after {updates} updates, above {MOST}: choose another seed")
            if not file.exists():
                checkpoint = out / f"clone_{seed}_openpi"
                serl_chunk("pi0", "export", str(run), str(checkpoint), f"--step={updates}", f"--exp_name={CLONE}")
                serl_chunk("pi0", "import", str(checkpoint), str(file), f"--exp_name={RL}")
            return file, demos
    raise SystemExit(f"{run}: below {LEAST} after {UPDATES} updates")


def serl_chunk(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "serl_chunk", *words], check=True)


def probe(file: Path, given: list[tuple[str, str]], episodes: int = 400, every: int = 4) -> tuple[float, float]:
    """Return how well a ridge regression from the critic's features tells the cube's x and y.

    R^2, and the root mean square of the distance (m) while no arm holds it, on a fourth of the episodes. It is fitted
    to the others.
    """
    config = configured(
        load_experiment(RL), [*given, ("agent.pi0.weights", str(file)), ("agent.critic_sees", "features")]
    )
    env = FakeAlohaEnv(config.robot)
    agent, expert, prompts = make_agent(config, env.robot_spec), env.make_expert(), make_prompts(config, 14)
    embed = agent.embedder(agent.source_base)
    assert embed is not None
    assert prompts is not None
    rows: dict[str, list[Any]] = {}
    places, held_out, lies = [], [], []
    for episode in range(episodes):
        env.reset(seed=PROBED + episode)
        expert.reset(PROBED + episode)
        for tick in range(config.robot.max_episode_steps):
            if tick % every == 0:
                tokens, mask = prompts(config.robot.task, np.zeros(14, np.float32))
                seen = {**env.read_images(config.agent.image_keys), PROMPT: tokens, PROMPT_MASK: mask}
                for key, value in seen.items():
                    rows.setdefault(key, []).append(value)
                places.append(env.cube[:2])
                held_out.append(episode % 4 == 0)
                lies.append(env.holder < 0)
            if env.step(expert.act())[2]:
                break
    [features] = embed({key: np.stack(values) for key, values in rows.items()}).values()
    x, y, test = features.reshape(len(features), -1).astype(np.float64), np.array(places), np.array(held_out)
    mean, deviation = x[~test].mean(0), x[~test].std(0) + 1e-6
    x, centre = (x - mean) / deviation, y[~test].mean(0)
    gram = x[~test].T @ x[~test] + 1.0 * np.eye(x.shape[1])
    found = x[test] @ np.linalg.solve(gram, x[~test].T @ (y[~test] - centre)) + centre
    square = ((found - y[test]) ** 2).sum(1)
    explained = 1 - square.sum() / ((y[test] - y[test].mean(0)) ** 2).sum()
    return float(explained), float(np.sqrt(square[np.array(lies)[test]].mean()))


def train(name: str, seed: int, file: Path, demos: Path, out: Path, given: list[tuple[str, str]]) -> Trained:
    """Train a rule by a learner and an actor, to the end. Raises SystemExit where that failed."""
    settings = {
        "seed": str(seed), "agent.pi0.weights": str(file), "learner.online_steps": str(STEPS),
        "learner.eval_interval": "0", "learner.keep_checkpoints": "100", **RULES[name],
    }  # fmt: skip
    preset = settings.pop("preset", None)
    pairs = [*settings.items(), *given]
    config = configured(load_experiment(RL), pairs, preset=preset)
    pairs.append(("learner.checkpoint_period", str(config.learner.max_steps // CHECKPOINTS)))
    if config.robot.observe_objects:  # the same demonstrations, with a longer state
        demos = learning.record(config, N_DEMOS, demos.with_name(f"{demos.name}_objects"))
    run = out / f"{name}_{seed}"
    words = ["--exp_name", RL, "--debug", "--launched_with_learner", "--demo_path", str(demos),
             *(f"--config.{path}={value}" for path, value in pairs)]  # fmt: skip
    words += ["--preset", preset] if preset else []
    keep_plan(run.with_name(f"{run.name}.plan"), words, run)
    trained = Trained(configured(load_experiment(RL), pairs, preset=preset), run)
    ended = run.with_name(f"{run.name}.ended")
    if not ended.exists():
        if run_both([*words, "--checkpoint_path", str(run)], pin=False, ip="127.0.0.1", program=PROGRAM):
            raise SystemExit(f"{run} failed; run the same command again to go on")
        ended.touch()  # after fewer updates than `max_steps`, where steps came before the first one
    return trained


def successes(trained: Trained, step: int, episodes: int, kind: str = "best") -> np.ndarray:
    """Return which starts a checkpoint succeeds from.

    `kind` "clone" is one sample of pi0, "random" one that explores; "best" what the critic chooses.
    """

    def found() -> list[bool]:
        policy, _ = trained.policy(step)
        envs = [make_env(trained.config.robot) for _ in range(AT_ONCE)]
        entry = Entry(policy, kind != "random", arm="" if kind == "best" else ONE)
        [result] = evaluate_in_turns(envs[0], [entry], trained.config, n=episodes, seed_base=STARTS, others=envs[1:])
        return [bool(summary.success) for summary in result.summaries]

    return np.array(trained.kept(f"{kind}_{step}_{episodes}", found))


def main() -> None:
    p = learning.parser(__doc__, "benchmark_pi0_rl", of="of the rules", seeds="1", episodes=200)
    p.add_argument("--rules", default="edits", help=f"comma-separated, of {', '.join(RULES)}")
    args = learning.arguments(p)
    names = list(filter(None, args.rules.split(",")))
    if unknown := set(names) - set(RULES):
        p.error(f"--rules: {', '.join(unknown)} is none of {', '.join(RULES)}")
    for seed in args.seeds:
        file, demos = clone(seed, args.out)
        explained, error = probe(file, args.overrides)
        near = f"{100 * error:.1f} cm while it lies"
        print(f"seed {seed}: R^2 {explained:.3f} of the cube's place from the features, {near}", flush=True)
        for name in names:
            trained = train(name, seed, file, demos, args.out, args.overrides)
            walls = {row["step"]: row["wall"] for row in read_metrics(trained.run)["train"]}
            last, points = trained.steps[-1], []
            start = successes(trained, trained.steps[0], args.episodes, "clone")
            drawn = successes(trained, last, args.episodes, "random")
            for step in trained.steps:
                best = successes(trained, step, args.episodes)
                meta = trained.store.restore_policy(step).meta
                points.append(Checkpoint(step, int(best.sum()), args.episodes, "reported", meta["env_steps"],
                                         meta["human_ticks"], wall=walls.get(step, 0.0)))  # fmt: skip
                print(
                    f"{name} {seed}: step {step}, {meta['env_steps']:,} robot steps, {100 * best.mean():.0f} %",
                    flush=True,
                )
            gain = paired_difference(start, best)
            figures = {
                "features_r2": explained, "features_error_m": error,
                "clone": float(start.mean()), "random": float(drawn.mean()),
                "gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high,
            }  # fmt: skip
            print(f"{name} {seed}: the clone {100 * start.mean():.0f} %, a random one of its chunks "
                  f"{100 * drawn.mean():.0f} %, {100 * gain.mean:+.0f} points "
                  f"({100 * gain.low:+.0f} .. {100 * gain.high:+.0f})", flush=True)  # fmt: skip
            if args.json:
                said = [*map("=".join, RULES[name].items()), *args.set]
                write(args.json, [Run(name, seed, RL, said, points, figures)], join=True)


if __name__ == "__main__":
    main()
