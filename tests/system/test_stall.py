"""An actor stands still within an episode: the journal has the gap, and no window of training goes across."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections import defaultdict

import numpy as np
import pytest
from counting_robot import HZ, LENGTH
from lab import ROBOT
from system_accounts import journal_rows

from serl_chunk.config.loader import load_experiment
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.replay.replay import Replay
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import StepBlock

STALL = 1.5  # seconds
BROKEN = 1.0  # seconds between two steps that no busy machine takes


@pytest.mark.slow
def test_no_window_goes_across_a_stall_of_the_actor(lab):
    learner, actor = lab.learner(), lab.actor()
    lab.goes_on(LENGTH, actor)
    actor.until(lambda: LENGTH // 4 < lab.executed() % LENGTH < LENGTH // 2, "no episode is under way")
    actor.signal(signal.SIGSTOP)
    time.sleep(STALL)
    actor.signal(signal.SIGCONT)
    lab.goes_on(LENGTH, actor)
    _, said, _ = lab.stop(learner, actor)

    config = load_experiment(ROBOT)
    one, zero = np.ones((5, 2), np.float32), np.zeros((5, 2), np.float32)
    absolute = np.full(2, -1, np.int32)
    plain = Normaliser("absolute_range", np.zeros(4, np.float32), np.ones(4, np.float32), zero, one, absolute)
    replay = Replay(robot_spec(config.robot), config, Preprocess(plain))
    stamps: dict[tuple[float, float], dict[int, float]] = defaultdict(dict)  # by life and episode
    marked: set[tuple[float, float, int]] = set()
    for session, record in ((row.session, row.record) for row in journal_rows(lab.run) if row.record is not None):
        replay.insert(session, record)
        if isinstance(record, StepBlock):
            for i, (life, episode, tick, _) in enumerate(record.observation["state"].tolist()):
                stamps[life, episode][int(tick)] = float(record.stamp[i])
                if getattr(record, "lost_ticks", np.zeros(record.n))[i]:
                    marked.add((life, episode, int(tick)))
    apart = {(*key, t): at[t] - at[t - 1] for key, at in stamps.items() for t in at if t}
    stalls = {step for step, seconds in apart.items() if seconds > BROKEN}
    assert len(stalls) == 1, "the stall came between two episodes"
    seen = set()
    for _ in range(20):
        batch = replay.sample(np.random.default_rng(len(seen)), 1_000)
        starts, ends = batch.observations["state"], batch.next_observations["state"]
        for (life, episode, first, _), (*_, last, _) in zip(starts.tolist(), ends.tolist(), strict=True):
            longest = max(apart.get((life, episode, t), 0.0) for t in range(int(first) + 1, int(last) + 1))
            assert longest < BROKEN, f"a window spans a stall of {longest:.2f} s"
            seen.add((life, episode, int(first)))
    assert len(seen) > LENGTH  # those of whole episodes, and those before and after the gap
    assert stalls <= marked
    ((life, episode, tick),) = stalls
    own = [t for *key, t in seen if key == [life, episode]]
    assert min(own) < tick < max(own)
    logged = re.findall(r"WARNING the control loop stalled in episode \S+ \(gaps=\d+, longest (\d+\.\d+) s\)", said)
    assert max(map(float, logged), default=0.0) > STALL - 2 / HZ  # late by the stall, less what was left of a tick


UNREAD = """
import os, sys
reader, writer = os.pipe()
os.set_inheritable(reader, True)  # never read, and never closed
os.set_blocking(writer, False)
try:
    while True:
        os.write(writer, bytes(4096))
except BlockingIOError:
    pass
os.set_blocking(writer, True)
os.dup2(writer, 1), os.dup2(writer, 2)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.slow
def test_a_terminal_that_takes_nothing_does_not_stop_the_ticks(lab):
    """As after Ctrl-S, or in a pager that shows its first page: the actor's first line finds no room already."""
    learner, actor = lab.learner(), lab.actor(prefix=[sys.executable, "-c", UNREAD])
    lab.goes_on(2 * LENGTH, actor)
    _, said, account = lab.stop(learner, actor)
    assert said == ""
    assert account.steps >= 2 * LENGTH
