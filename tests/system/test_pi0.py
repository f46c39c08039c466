"""A pi0 with LoRA as processes: two texts, a base that stays in its file, and both sides killed."""

from __future__ import annotations

import re
import signal
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from fold_box import write_small
from ports import free_port
from processes import PATIENCE, actor_totals, checkpoints, learner_totals, resumed_at

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.process import load
from serl_chunk.models.pi0 import tree
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.runs.openpi_checkpoints import Checkpoint as CheckpointOfOpenpi
from serl_chunk.runs.openpi_checkpoints import export

ROOT = Path(__file__).resolve().parents[2]
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


class Page:
    """The commands of docs/pi0.md from a checkpoint to a better one, run in `folder` in their order."""

    WORDS = (("GPU_BOX", "127.0.0.1"), ("=gello", "=scripted"), ("--eval_n_trajs 20", "--eval_n_trajs 2"))

    def __init__(self, folder, processes):
        text = (ROOT / "docs" / "pi0.md").read_text()
        section = re.search(r"^## From a checkpoint to a better one$(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1]
        self.left = re.findall(r"^\$ serl-chunk (.*)$", section, re.MULTILINE)
        self._folder, self._processes = folder, processes

    def start(self, begins, *more):
        """Start the next command, which has the words `begins`."""
        line = self.left.pop(0)
        for shown, ours in self.WORDS:
            line = line.replace(shown, ours)
        words = line.split()
        assert [word for word in begins.split() if word not in words] == []
        return self._processes.start(*words, *more, cwd=self._folder)

    def run(self, begins, *more):
        """Start the next command, and return what it printed once it has ended."""
        return ended(self.start(begins, *more))


def ended(process):
    process.until(lambda: not process.running, "it does not end", at_work="INFO")
    return process.ends()


@pytest.mark.slow
def test_the_page_leads_from_a_checkpoint_to_a_better_one(processes, tmp_path):
    openpi = pytest.importorskip("openpi_client.websocket_client_policy")
    write_small(tmp_path)
    page, learns, acts = Page(tmp_path, processes), ("--debug",), ("--port", str(processes.port))
    for begins in ("pi0 import", "data convert", "data stats"):
        page.run(begins)
    assert "data: 12 episodes, 36 windows" in page.run("--learner --dry_run")
    run = tmp_path / "runs" / "fold_box"
    assert not run.exists()
    page.run("--learner --online_steps", *learns)
    assert checkpoints(run) == [0, 4, 8]
    learner = page.start("--learner", *learns, *acts)
    episodes, steps = actor_totals(page.run("--actor", *acts))
    output = ended(learner)
    assert episodes > 1
    assert (resumed_at(output), learner_totals(output)) == ((8, 0), (16, steps))
    assert checkpoints(run)[-1] == 16
    base = CheckpointOfOpenpi(tmp_path / "checkpoints" / "pi0_base").stored
    evaluated = page.run("--actor --eval_arm")
    assert [f"arm={arm}" in evaluated for arm in ("one", "best")] == [True, True]
    page.run("pi0 export")
    better = CheckpointOfOpenpi(tmp_path / "openpi" / "fold_box")
    assert better.stored.keys() == base.keys()
    changed = {
        better.group_of(path)
        for path, leaf in better.stored.items()
        if not np.array_equal(leaf.read("float32"), base[path].read("float32"))
    }
    assert changed == {"expert", "projections"}
    assert list(better.norm_stats()) == ["aloha_fold_box"]
    assert sorted(folder.name for folder in (run / "exports").iterdir()) == ["16", "8"]
    port = free_port()
    served = page.start("serve", "--port", str(port))
    assert page.left == []
    served.says("serving pi0_fold_box")
    client = openpi.WebsocketClientPolicy("127.0.0.1", port)
    robot = client.get_server_metadata()
    images = {name: np.zeros(size, np.uint8) for name, size in robot["images"].items()}
    reply = client.infer({"state": np.zeros(14), "images": images, "prompt": "fold the box"})
    assert (reply["actions"].shape, reply["policy_version"]) == ((20, 14), 16)
