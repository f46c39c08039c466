"""A pi0 with LoRA as processes: two texts, a base that stays in its file, and both sides killed."""

from __future__ import annotations

import signal
from collections import Counter

import jax
import numpy as np
import pytest
from processes import PATIENCE, actor_totals, checkpoints, learner_totals, resumed_at

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.process import load
from serl_chunk.models.pi0 import tree
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.runs.openpi_checkpoints import export

pytestmark = pytest.mark.timeout(8 * PATIENCE)
EXPERIMENT = "fake_aloha_pi0"
TASKS = {"left": "cube to the target", "right": "hand the cube over"}
SIZES = {  # the base is far larger than what is trained
    "agent.pi0.heads": 2, "agent.pi0.action_dim": 16, "agent.pi0.steps": 2, "agent.pi0.siglip.mlp": 2048,
    "agent.pi0.siglip.heads": 2, "agent.pi0.vlm.mlp": 1024,
}  # fmt: skip
LORA = {f"agent.pi0.{who}.{part}_rank": 4 for who in ("vlm", "expert") for part in ("attention", "mlp")}
RUN = {
    "agent.pi0.trainable": "lora", "agent.policy_ema": 0.5, "robot.max_episode_steps": 40,
    "actor.intervention": "none", "transport.snapshot_dtype": "bfloat16",
    "transport.timeout_s": 5.0, "learner.batch_size": 8, "learner.pretrain_steps": 10, "learner.warmup_episodes": 2,
    "learner.max_steps": 1_000_000, "learner.steps_per_update": 5, "learner.checkpoint_period": 10,
    "learner.log_period": 5,
}  # fmt: skip


def flags(settings):
    return [f"--config.{name}={value}" for name, value in settings.items()]


def texts_of(settings):
    return [(name, str(value)) for name, value in settings.items()]


@pytest.mark.slow
def test_two_texts_a_base_in_a_file_and_kills_of_both_sides(processes, tmp_path):
    plain = load(EXPERIMENT, texts_of(SIZES)).agent.pi0
    export(tmp_path / "openpi", plain, tree.initial(plain, jax.random.key(3)), {})
    weights, run = tmp_path / "weights.npz", tmp_path / "run"
    more = ["--exp_name", EXPERIMENT, *flags(SIZES | LORA)]
    processes.start("pi0", "import", str(tmp_path / "openpi"), str(weights), *more).ends()
    demos = [str(tmp_path / side) for side in TASKS]  # of equal starts, which differ in their texts alone
    for folder, text in zip(demos, TASKS.values(), strict=True):
        where = ("--n_demos", "2", "--task", text, "--out", folder)
        processes.start("record", *more, "--policy", "scripted", *where).ends()

    settings = SIZES | LORA | RUN | {"agent.pi0.weights": str(weights)}
    shared = ["--exp_name", EXPERIMENT, "--port", str(processes.port), *flags(settings)]

    def learner():
        data = [f"--demo_path={folder}" for folder in demos]
        where = ("--task", TASKS["left"], "--checkpoint_path", str(run))
        return processes.start(*shared, "--learner", "--debug", *where, *data)

    def actor(side):
        spool = str(tmp_path / f"spool_{side}")
        return processes.start(*shared, "--actor", "--actor_id", side, "--task", TASKS[side], "--spool_path", spool)

    def trained_beyond(step):
        return lambda: max(checkpoints(run), default=0) > step

    def episodes():
        rows = read_metrics(run)["episode"] if (run / "metrics.jsonl").exists() else []
        return Counter(row["actor_id"] for row in rows)

    first, actors = learner(), {side: actor(side) for side in TASKS}
    first.until(lambda: set(episodes()) == set(TASKS), "no episodes of both actors")
    first.until(trained_beyond(10), "no training online")

    # What is kept are the trained leaves alone.
    config = load(EXPERIMENT, texts_of(settings | {"robot.task": TASKS["left"]}))
    spec = spec_of(config)
    agent = make_agent(config, spec)
    leaves = jax.tree.leaves(jax.eval_shape(agent.init, jax.random.key(0)).policy)
    trained = sum(int(np.prod(leaf.shape)) for leaf in leaves)

    actors["left"].kill()
    actors["left"] = actor("left")
    before = episodes()["left"]
    first.until(lambda: episodes()["left"] > before, "the actor that was killed does not go on")
    first.kill()
    reached = max(checkpoints(run))
    second = learner()
    second.says("resumed at step")
    step, put_back = resumed_at(second.output)
    assert step >= reached
    assert put_back > 0
    before = episodes()
    second.until(trained_beyond(step), "no training after the resume")
    second.until(lambda: all(episodes()[side] > before[side] for side in TASKS), "an actor does not go on")
    second.signal(signal.SIGTERM)
    updates, steps = learner_totals(second.ends())
    own = {side: actor_totals(process.ends())[1] for side, process in actors.items()}

    for text in TASKS.values():
        assert f"{text!r} (2 episodes)" in first.output
    assert read_metrics(run)["train"][-1]["replay/tasks"] == len(TASKS)
    assert steps > sum(own.values()), "with those of the actor that was killed"

    newest = checkpoints(run)[-1]
    assert newest == updates
    policy = CheckpointStore(run).restore_policy(newest).params
    assert sum(leaf.size for name, leaf in policy.items() if "pi0" in name) == trained
    assert not [name for name in policy if name.startswith("base")]
    base = weights.stat().st_size - 4 * trained
    kept = sum(f.stat().st_size for f in (run / "checkpoints" / str(newest)).rglob("*") if f.is_file())
    assert kept < 0.3 * base, (kept, base)
