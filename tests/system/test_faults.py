"""Kills, freezes, cuts, stalls, clocks that jump, lost sectors: every step is in the store exactly once, in order."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from counting_robot import HZ
from flaky_proxy import flaky
from lab import LENGTH, ROBOT, TAIL, Lab
from ports import free_port
from processes import actor_totals
from system_accounts import journal_rows

from serl_chunk.config.loader import load_experiment
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.replay.replay import Replay
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import StepBlock

DAY = 86_400.0


def test_nothing_is_lost_or_doubled_when_each_side_is_killed(lab):
    learner, actor = lab.learner(), lab.actor()
    lab.trains(learner)
    actor.until(lambda: LENGTH // 4 < lab.executed() % LENGTH < LENGTH // 2, "no episode is under way")
    actor.kill()  # between two episodes there would be nothing to end
    actor = lab.actor()
    actor.says("of a previous actor are sent")
    assert "another live session" not in actor.output  # it is let in at once
    lab.goes_on(LENGTH, actor)
    learner.kill()
    lab.goes_on(2 * LENGTH, actor)  # the robot is not held up
    learner = lab.learner()
    learner.says("online steps put back")
    lab.trains(learner)
    lab.goes_on(LENGTH, actor)
    output, said, account = lab.stop(learner, actor)
    assert "online replay is empty" not in output
    assert account.died == 1
    assert sum(account.cut.values()) <= TAIL
    assert len(account.cut) <= 1
    assert actor_totals(said)[1] > 3 * LENGTH


@pytest.mark.slow
def test_a_learner_on_another_port_is_found_by_a_restarted_actor(lab):
    """What an actor had kept for a learner reaches it wherever it is started again."""
    learner, actor = lab.learner(), lab.actor()
    lab.trains(learner)
    learner.kill()
    lab.goes_on(2 * LENGTH, actor)
    actor.kill()
    lab.move()
    learner, actor = lab.learner(), lab.actor()
    lab.goes_on(LENGTH, actor)
    _, _, account = lab.stop(learner, actor)
    assert sum(account.cut.values()) <= TAIL


@pytest.mark.slow
def test_a_thin_line_for_everything_carries_policies_and_records(lab):
    """Both take several time-outs: 60 kB of policy and a backlog of steps at 10 kB/s, heartbeats on the same line."""
    port = free_port()
    thin = ("--config.transport.timeout_s=0.8", "--config.agent.flow.hidden=96,96")
    with flaky(port, lab.port, shared=True, buffer=8192) as line:
        line.rate = 1e4
        learner, actor = lab.learner(*thin), lab.actor(*thin, "--port", str(port))
        lab.goes_on(6 * LENGTH, actor)  # which begins with the first policy
        _, said, account = lab.stop(learner, actor)
    assert actor_totals(said)[1] == account.steps == account.executed


@pytest.mark.slow
def test_a_bad_link_loses_and_doubles_nothing(lab):
    """Slow, halved and halved again, broken again and again, and away, in turn, while the robot goes on at its rate."""
    port = free_port()
    with flaky(port, lab.port) as link:
        learner, actor = lab.learner(), lab.actor("--port", str(port))
        lab.trains(learner)
        for delay, rate in ((0.0, 0.0), (0.1, 0.0), (0.0, 40e3), (0.0, 20e3), (0.0, 0.0)):
            link.delay, link.rate = delay, rate
            lab.goes_on(2 * LENGTH, actor)
            for _ in range(5):
                link.break_connections()
                lab.goes_on(LENGTH // 4, actor)
            link.cut = True
            link.break_connections()
            lab.goes_on(4 * LENGTH, actor)
            link.cut = False
        lab.trains(learner)
        _, said, account = lab.stop(learner, actor)
    assert link.broken > 20
    assert account.cut == {}
    assert account.died == 0
    assert "connection to the learner at" in said


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_when_clocks_jump(tmp_path, environment):
    """By days, on both sides; nothing that counts depends on them."""
    path = os.pathsep.join([str(Path(__file__).with_name("wrong_clock")), environment.get("PYTHONPATH", "")])
    clock, days = tmp_path / "clock", "--config.transport.journal_days=0.5"
    jumping = {**environment, "PYTHONPATH": path.rstrip(os.pathsep), "WRONG_CLOCK": str(clock)}
    with contextlib.closing(Lab(tmp_path, jumping)) as lab:
        learner, actor = lab.learner(days), lab.actor()
        lab.trains(learner)
        for offset in (3 * DAY, -30 * DAY, 0.0):  # a learner sees its journal age at once, then come from the future
            clock.write_text(str(offset))
            lab.goes_on(LENGTH, actor)
            lab.trains(learner)
            actor.kill()
            actor = lab.actor()
            lab.goes_on(LENGTH, actor)
            learner.kill()
            lab.goes_on(LENGTH, actor)
            learner = lab.learner(days)
            learner.says("online steps put back")
            lab.trains(learner)
        _, said, account = lab.stop(learner, actor)
    assert account.died <= 3
    assert max(account.cut.values(), default=0) <= TAIL
    assert "late" in said


@pytest.mark.slow  # what each file needs is tested in tests/transport/storage
def test_a_bad_first_sector_of_a_journal_or_a_spool_loses_nothing(lab):
    """Of an older and the newest segment of the journal, and of the spool with records that no learner has yet."""
    journal = lab.run / "journal" / "online"
    learner, actor = lab.learner(), lab.actor()
    lab.trains(learner)
    learner.kill()
    learner = lab.learner()
    learner.says("online steps put back")
    lab.goes_on(LENGTH, actor)
    learner.kill()
    lab.goes_on(LENGTH, actor)
    actor.kill()
    older, newest = sorted(journal.glob("*.journal"))
    [*_, spool] = sorted(lab.spool.rglob("*.journal"))
    for file in (older, newest, spool):
        data = file.read_bytes()
        assert len(data) > 4096
        file.write_bytes(bytes(4096) + data[4096:])
    learner, actor = lab.learner(), lab.actor()
    lab.trains(learner)
    lab.goes_on(LENGTH, actor)
    output, said, account = lab.stop(learner, actor)
    for file, lines in ((older, output), (newest, output), (spool, said)):
        assert f"the damaged first sector of {file.name} was mended, no entry is lost" in lines
    assert sum(account.cut.values()) <= TAIL
    assert account.died == 1
    after = sorted(journal.glob("*.journal"))
    assert (after[:2], len(after)) == ([older, newest], 3)


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
