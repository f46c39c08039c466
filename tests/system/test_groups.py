"""Iterations on groups by real processes: kills change nothing of what is trained, and no run goes on for ever."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from point_robot import record_demos
from processes import PATIENCE, Cluster, Process, checkpoints

from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.episodes import RunSource
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import Outcome

pytestmark = [pytest.mark.timeout(4 * PATIENCE), pytest.mark.slow]
ITERATIONS = 6
EXPERIMENT = """
import dataclasses
import sys

sys.path.insert(0, {support!r})
from point_robot import experiment as base

from serl_chunk.config.presets import configured


def experiment():
    config = configured(base(pretrain_steps={pretrain}), preset="ript-flow-sde")
    group = dataclasses.replace(
        config.group, groups=4, max_groups=8, size=4, minibatch=64, iterations={iterations}, eval_every=0, noise=0.5
    )
    return dataclasses.replace(config, group=group)
"""


class Training:
    """One run of a learner and of actors with three environments each."""

    def __init__(self, cluster: Cluster, folder: Path, pretrain: int) -> None:
        folder.mkdir()
        self._cluster, self.run, self._folder = cluster, folder / "run", folder
        self._demos, self._file = record_demos(folder / "demos", 8), folder / "points.py"
        support = str(Path(__file__).parents[1] / "support")
        text = EXPERIMENT.format(support=support, pretrain=pretrain, iterations=ITERATIONS)
        self._file.write_text(text)

    def start(self, name: str) -> Process:
        """Start the learner, or an actor of this name."""
        flags = ["--exp_name", str(self._file), "--port", str(self._cluster.port)]
        if name == "learner":
            of = ["--learner", "--debug", "--demo_path", self._demos, "--checkpoint_path", str(self.run)]
        else:
            of = ["--actor", "--actor_id", name, "--n_envs", "3", "--spool_path", str(self._folder / "spool")]
        return self._cluster.start(*flags, *of)

    def policies(self) -> list[dict[str, np.ndarray]]:
        """Of all checkpoints, in their order."""
        store = CheckpointStore(self.run)
        return [store.restore_policy(step).params for step in store.steps()]


def test_kills_change_nothing_of_what_is_trained(processes, tmp_path):
    quiet = Training(processes, tmp_path / "quiet", 1_000)
    both = [quiet.start(name) for name in ("learner", "one")]
    for process in both:
        process.ends()

    killed = Training(processes, tmp_path / "killed", 1_000)
    running = {name: killed.start(name) for name in ("learner", "one", "two", "three")}
    names, seen, learner_killed = itertools.cycle(["one", "two", "three"]), 0, False
    while running["learner"].running:
        time.sleep(0.05)
        if (newest := max(checkpoints(killed.run), default=0)) == seen:
            continue
        seen = newest  # what is killed is in the next iteration, or starts one
        if seen == 3:
            running["learner"].kill()
            running["learner"], learner_killed = killed.start("learner"), True
        else:
            running[name := next(names)].kill()
            running[name] = killed.start(name)
    assert learner_killed
    running["learner"].ends()
    assert checkpoints(killed.run) == checkpoints(quiet.run) == [*range(ITERATIONS + 1)]
    for ours, theirs in zip(killed.policies(), quiet.policies(), strict=True):
        assert all(np.array_equal(ours[path], theirs[path]) for path in theirs)
    first, last = (quiet.policies()[i] for i in (0, -1))
    assert any(not np.array_equal(first[path], last[path]) for path in first)
    source = RunSource(killed.run)
    judged = [source.read(key) for key in source.keys()]
    slots = Counter(
        e.begin.ticket.rpartition(".")[0]
        for e in judged
        if e.end.outcome is not Outcome.UNKNOWN or e.end.outcome_by == "environment"
    )
    settled = sum(4 * row["group/groups"] for row in read_metrics(killed.run)["train"] if "group/groups" in row)
    assert len(slots) >= settled  # those that only hid stragglers come on top


def test_a_run_without_a_mixed_group_ends_by_itself(processes, tmp_path):
    training = Training(processes, tmp_path / "uniform", 40)
    learner, actor = (training.start(name) for name in ("learner", "one"))
    assert "training ends: 3 iterations in a row without an update (group.patience)" in learner.ends()
    assert "actor ended (training is complete)" in actor.ends()
    assert checkpoints(training.run) == [0, 1, 2, 3]
