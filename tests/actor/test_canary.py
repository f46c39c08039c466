"""A newer snapshot earns the robot, in whole sessions of an actor."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import re

import numpy as np
import pytest
from actor_helpers import LineEnv, NoisyAgent, identity, make_config
from errors import naming
from fake_link import FakeLink
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import hypergeom

from serl_chunk.actor import canary
from serl_chunk.actor.canary import EVERY, KNOWN, LEAST, Canary, Counts, chance, check_signal, succeeded_alone
from serl_chunk.actor.link import RunProgress
from serl_chunk.actor.service import ActorService
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.config.robots import AlohaConfig, GymConfig
from serl_chunk.types import Amend, Begin, ConfigError, End, Outcome, Snapshot

LENGTH = 4


def counts(least: int) -> st.SearchStrategy[Counts]:
    return st.integers(least, 40).flatmap(lambda n: st.builds(Counts, st.integers(0, n), st.just(n)))


@given(counts(1), counts(0))
def test_the_chance_is_that_of_a_fisher_test(candidate, acting):
    total, good = candidate.episodes + acting.episodes, candidate.successes + acting.successes
    expected = hypergeom(total, good, candidate.episodes).cdf(candidate.successes)
    assert math.isclose(chance(candidate, acting), expected, abs_tol=1e-9)


def snapshot(version: int, **params: float) -> Snapshot:
    return Snapshot(version, {"bias": np.float32(version), **params})


class Learning(FakeLink):
    """A learner that publishes `snapshots`, one more before each episode."""

    def __init__(self, snapshots: list[Snapshot]) -> None:
        super().__init__()
        self.snapshots = snapshots

    def latest(self):
        episodes = len([r for r in self.records if isinstance(r, End)])
        return self.snapshots[min(episodes, len(self.snapshots) - 1)]

    @property
    def versions(self) -> list[int]:
        """Of each episode, all of whose steps have it."""
        found: list[int] = []
        for record in self.records:
            if isinstance(record, Begin):
                steps = self.records[self.records.index(record) + 1 :][:LENGTH]
                assert len({s.policy_version for s in steps}) == 1
                found.append(steps[0].policy_version)
        return found


class Judged(LineEnv):
    """Succeeds on its last tick where `succeeds(version, alone)`, as the agent decided last."""

    def __init__(self, agent: NoisyAgent, succeeds) -> None:
        super().__init__(length=LENGTH)
        self._agent, self._succeeds = agent, succeeds

    def step(self, action):
        good = self._succeeds(self._agent.acting, bool(self._agent.alone[-1]))
        self.success_at = LENGTH - 1 if good else None
        self.failure_at = None if good else LENGTH - 1
        return super().step(action)


class Remembering(NoisyAgent):
    """Knows which version decided last."""

    acting = 0

    def sample(self, params, *args, **kwargs):
        self.acting = int(params)
        return super().sample(params, *args, **kwargs)


def run(link: Learning, succeeds, *, episodes: int, config=None, gate: str = "none", **kwargs) -> Remembering:
    agent = Remembering(LENGTH)
    config = config or make_config(horizon=LENGTH)
    config = dataclasses.replace(config, actor=ActorConfig(max_episodes=episodes, gate=gate))
    env = Judged(agent, succeeds)
    with ActorService(config, env=env, agent=agent, link=link, **kwargs) as actor:
        actor.run(identity(LENGTH), RunProgress())
    return agent


@pytest.mark.parametrize(("params", "alone"), [({"critic_chooses": np.bool_(False)}, True), ({}, False)])
def test_the_best_acts_once_the_critic_may_choose(params, alone):
    agent = run(Learning([snapshot(1, **params)]), lambda *_: True, episodes=5)
    assert set(agent.alone) == {alone}


def test_a_broken_snapshot_is_dropped(caplog):
    """It has every fourth episode until that is certain; the next one is the newest, and is promoted."""
    caplog.set_level(logging.INFO, "serl_chunk.actor.canary")
    link = Learning([snapshot(1)] * 40 + [snapshot(2)] * 4 + [snapshot(3)] * 2 + [snapshot(4)])
    run(link, lambda version, alone: version != 2, episodes=110, gate="canary")
    versions = link.versions
    assert versions.count(2) == LEAST
    first = versions.index(2)
    assert versions[first : first + 2 * EVERY + 1] == [2, 1, 1, 1, 2, 1, 1, 1, 2]
    assert 3 not in versions  # version 4 had come meanwhile
    healthy = versions.index(4)
    assert versions[healthy : healthy + EVERY * (KNOWN - 1) + 1] == ([4, 1, 1, 1] * KNOWN)[: -EVERY + 1]
    assert set(versions[healthy + EVERY * (KNOWN - 1) :]) == {4}
    dropped, promoted = (r.getMessage() for r in caplog.records if r.name == canary.__name__)
    assert re.match(naming("snapshot dropped", "version=2", "alone=0/3", "acting=1"), dropped)
    assert re.match(naming("snapshot promoted", "version=4", "alone=8/8", "acting=1"), promoted)


@given(st.lists(st.sampled_from([True, False]), max_size=300), st.floats(0, 1))
def test_a_candidate_has_no_more_than_every_fourth_episode_and_an_end(successes, share):
    gate, since, seen = Canary(), EVERY, 0
    gate.offer(snapshot(1))
    for i, success in enumerate(successes):
        gate.offer(snapshot(1 + i // 7))
        chosen = gate.draw()
        candidate = gate.candidate
        on_trial = candidate is not None and chosen is candidate
        assert on_trial or chosen is gate.acting
        assert not on_trial or since >= EVERY - 1
        since = 0 if on_trial else since + 1
        verdict = gate.add(chosen.version, f"e{i}", success)
        seen = seen + 1 if on_trial else seen
        assert (verdict is None) or on_trial
        if verdict is not None:
            assert LEAST <= seen <= KNOWN
            assert verdict.promoted == (chance(verdict.counts, verdict.former_counts) >= 0.05)
            assert gate.acting.version == (verdict.version if verdict.promoted else verdict.former)
            seen = 0


def test_a_discarded_episode_and_an_undone_label_count_nowhere():
    link, agent = Learning([snapshot(1)]), Remembering(LENGTH)
    config = dataclasses.replace(make_config(horizon=LENGTH), actor=ActorConfig(max_episodes=6, gate="canary"))
    with ActorService(config, env=Judged(agent, lambda *_: True), agent=agent, link=link) as actor:
        summary = actor.run(identity(LENGTH), RunProgress())
        ids = [r.episode_id for r in link.records if isinstance(r, Begin)]
        assert (summary.successes, summary.success_steps) == (6, 6 * LENGTH)
        counted = actor._session.policy.gate._of_acting
        assert str(counted.counts) == "6/6"
        actor.amend(Amend(ids[0], discard=True))
        for k, outcome in ((1, Outcome.UNKNOWN), (2, Outcome.FAILURE), (4, Outcome.SUCCESS)):
            actor.amend(Amend(ids[k], outcome, "operator"))
        assert str(counted.counts) == "3/4"
        assert (summary.successes, summary.success_steps, summary.steps) == (3, 3 * LENGTH, 6 * LENGTH)
    assert len([r for r in link.records if isinstance(r, Amend)]) == 4


@pytest.mark.parametrize(
    ("robot", "outcome", "operator", "refused"),
    [
        (AlohaConfig(server="pc"), OutcomeConfig(), False, True),
        (GymConfig(make=print, server="pc"), OutcomeConfig(), False, True),
        (AlohaConfig(server="pc"), OutcomeConfig(), True, False),
        (AlohaConfig(server="pc"), OutcomeConfig(classifier="folder"), False, False),
        (GymConfig(make=print, is_real=True), OutcomeConfig(), False, False),  # as HIL-SERL's, which judges
    ],
)
def test_a_gate_needs_what_judges_episodes(robot, outcome, operator, refused):
    config = dataclasses.replace(make_config(), robot=robot, outcome=outcome)
    check_signal(config, operator=False)  # without a gate
    config = dataclasses.replace(config, actor=ActorConfig(gate="canary"))
    wrong = pytest.raises(ConfigError, match=naming("actor.gate", "canary", "outcome.classifier", "operator", "none"))
    with wrong if refused else contextlib.nullcontext():
        check_signal(config, operator=operator)


@pytest.mark.parametrize(
    ("outcome", "by", "segments", "counts"),
    [
        (Outcome.SUCCESS, "operator", 0, True),
        (Outcome.SUCCESS, "environment", 1, False),  # a helped one
        (Outcome.FAILURE, "operator", 0, False),
        (Outcome.UNKNOWN, "environment", 0, False),  # the time limit
        (Outcome.UNKNOWN, "fault", 0, False),
        (Outcome.UNKNOWN, "operator", 0, None),  # who stopped it said nothing
        (Outcome.UNKNOWN, "crash", 0, None),
    ],
)
def test_what_an_episode_counts_as(outcome, by, segments, counts):
    assert succeeded_alone(EpisodeSummary(seed=0, outcome=outcome, ended_by=by, segments=segments)) is counts
