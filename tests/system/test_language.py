"""Two tasks of opposite goals in one replay, as processes: a policy that reads their texts learns both."""

from __future__ import annotations

import re
import signal

import line_tasks
import pytest
from line_tasks import EPISODES, TEXTS, record_demos
from processes import PATIENCE

from serl_chunk.runs.metrics import read_metrics

pytestmark = pytest.mark.timeout(4 * PATIENCE)


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return {side: record_demos(tmp_path_factory.mktemp(side), side, 10) for side in TEXTS}


def trained(processes, demos, run, tokenizer):
    """Train by both folders with an actor of each text; returns the actors' shares of success."""
    port, language = ("--port", str(processes.port)), f"--config.agent.language.tokenizer={tokenizer}"
    data = [word for folder in demos.values() for word in ("--demo_path", folder)]
    file = line_tasks.__file__
    learner = processes.start(
        "--exp_name", file, "--learner", "--debug", *port, *data, "--checkpoint_path", str(run), language
    )
    actors = {
        side: processes.start(
            "--exp_name", f"{file}:{side}", "--actor", "--actor_id", side, *port, language,
            f"--config.actor.max_episodes={EPISODES}", "--spool_path", str(run.parent / f"{run.name}_{side}"),
        )
        for side in demos
    }  # fmt: skip
    shares = {}
    for side, actor in actors.items():
        [successes] = re.findall(rf": {EPISODES} episodes, \d+ steps, (\d+) successes", actor.ends())
        shares[side] = int(successes) / EPISODES
    learner.signal(signal.SIGTERM)
    learner.ends()
    return shares, learner.output


@pytest.mark.slow
def test_a_clone_follows_the_text_of_its_task_and_without_it_cannot(processes, demos, tmp_path):
    reading, output = trained(processes, demos, tmp_path / "reading", "bytes")
    assert all(f"{text!r} (10 episodes)" in output for text in TEXTS.values())
    assert min(reading.values()) >= 0.9, reading
    assert read_metrics(tmp_path / "reading")["train"][-1]["replay/tasks"] == len(TEXTS)
    blind, output = trained(processes, demos, tmp_path / "blind", "none")
    assert "language" not in output
    assert sum(blind.values()) <= 1.5, blind  # an end is the goal of one text alone: what helps one harms the other

    # The text decides, not the robot: with the right's text the left's goes to the wrong end.
    evaluation = processes.start(
        "--exp_name", f"{line_tasks.__file__}:left", "--actor", "--eval_checkpoint_step", "latest",
        "--eval_n_trajs", "10", "--checkpoint_path", str(tmp_path / "reading"), "--task", TEXTS["right"],
    )  # fmt: skip
    assert "success_rate=0.00 n=10" in evaluation.ends()
