"""The training actor's start: what the learner's welcome tells it about the run, and about the next one."""

from __future__ import annotations

import dataclasses
import types

import pytest
from errors import naming

from serl_chunk.actor.clock import Lateness
from serl_chunk.actor.policy import PolicyError
from serl_chunk.actor.session import ActorSummary
from serl_chunk.cli import actor, evaluate
from serl_chunk.cli.process import load, spec_of
from serl_chunk.config.agents import BcConfig, FlowConfig
from serl_chunk.data.normalise.normaliser import Normaliser, fit_normaliser
from serl_chunk.learner.service import welcome_of
from serl_chunk.transport.wire.handshake import Welcome
from serl_chunk.types import DataError, PolicyOrigin, Snapshot

SUMMARY = ActorSummary("operator", 0, 0, 0, 0, 0, 0, 0, 0.0, delivered=True, lateness=Lateness())


class Link:
    """Of a learner that gets no requests; a test puts another welcome in the place of the first."""

    def __init__(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self.acted_for: list[str] = []

    @property
    def run(self) -> str:
        return self.welcome.run

    def act_for(self, run: str) -> None:
        self.acted_for.append(run)

    def wait_until(self, condition, timeout: float) -> bool:
        return condition()

    def stats(self) -> dict[str, float]:
        return {"inherited": 0.0}

    def fetch_checkpoint(self, step: str, timeout: float):
        return Snapshot(40, {}, origin=PolicyOrigin("another", "its own")), {}

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def config():
    config = load("fake_aloha", [("actor.intervention", "none")])
    return dataclasses.replace(config, agent=BcConfig(flow=FlowConfig(hidden=(8,))))


@pytest.fixture(scope="module")
def normaliser(config):
    return fit_normaliser(spec_of(config), config.normaliser, config.chunk.carried, [])


def welcome(normaliser: Normaliser, run: str = "run", *, episodes: int = 3, env_steps: int = 90, human_ticks: int = 27):
    """What a learner that has come this far sends."""
    learner = types.SimpleNamespace(
        normaliser=normaliser, episodes=episodes, env_steps=env_steps, human_ticks=human_ticks
    )
    return Welcome(*welcome_of(learner), run, 1)


def start(monkeypatch, tmp_path, config, link, run_actor) -> int:
    """The command with `run_actor` in the place of the control loop."""
    monkeypatch.setattr(actor, "connect_to_learner", lambda *_: (link, link.welcome))
    monkeypatch.setattr(actor, "run_actor", run_actor)
    monkeypatch.setattr(actor, "stop_on_signals", lambda *_: None)
    return actor.run_training_actor(config, ip="127.0.0.1", port=1, actor_id="a", spool_path=str(tmp_path))


@pytest.mark.parametrize("told", [True, False])
def test_a_restarted_actor_goes_on_where_the_run_is(tmp_path, monkeypatch, capsys, config, normaliser, told):
    first = welcome(normaliser)
    if not told:  # by a learner of before
        del first.fields["human_ticks"]
    handed_over = {}

    def run_actor(*args, **kwargs):
        handed_over.update(kwargs)
        return SUMMARY

    assert start(monkeypatch, tmp_path, config, Link(first), run_actor) == 0
    so_far = [handed_over[k] for k in ("first_episode", "steps_before", "human_ticks_before")]
    assert so_far == [3, 90, 27 if told else 0]
    capsys.readouterr()


@pytest.mark.parametrize("run", ["second", "first"])
def test_another_runs_welcome_begins_everything_anew(tmp_path, monkeypatch, capsys, config, normaliser, run):
    """Or the same run's, with another normaliser."""
    other = dataclasses.replace(normaliser, scale=2 * normaliser.scale)
    link = Link(welcome(normaliser, "first"))
    sessions = []

    def run_actor(config, link, env, agent, normaliser, **kwargs):
        sessions.append((normaliser.digest(), kwargs))
        if len(sessions) == 2:
            assert kwargs["replaced"]() is None
            return SUMMARY
        assert kwargs["replaced"]() is None
        link.welcome = welcome(other, run, episodes=1, env_steps=40, human_ticks=5)
        return SUMMARY._replace(reason=kwargs["replaced"](), episodes=8, steps=99, delivered=False, replaced=True)

    assert start(monkeypatch, tmp_path, config, link, run_actor) == 0
    names = ("run", "first_episode", "steps_before", "human_ticks_before")
    assert [[kwargs[k] for k in names] for _, kwargs in sessions] == [["first", 3, 90, 27], [run, 1, 40, 5]]
    assert [digest for digest, _ in sessions] == [normaliser.digest(), other.digest()]
    assert len({kwargs["episode_prefix"] for _, kwargs in sessions}) == 2
    assert link.acted_for == ["first", run]
    said = capsys.readouterr().out
    assert "first" in said
    assert (run if run == "second" else other.digest()) in said
    assert "8 episodes, 99 steps" in said


@pytest.mark.parametrize(("limit", "then"), [(0, 0), (10, 2), (8, None)])
def test_the_limit_of_episodes_holds_over_both_runs(tmp_path, monkeypatch, capsys, config, normaliser, limit, then):
    config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, max_episodes=limit))
    link, limits = Link(welcome(normaliser, "first")), []

    def run_actor(config, *args, **kwargs):
        limits.append(config.actor.max_episodes)
        link.welcome = welcome(normaliser, "second")
        return SUMMARY._replace(reason="another run", episodes=8, replaced=len(limits) == 1)

    start(monkeypatch, tmp_path, config, link, run_actor)
    assert limits == ([limit] if then is None else [limit, then])
    capsys.readouterr()


def test_a_normaliser_that_is_not_the_one_its_welcome_names_is_refused(normaliser):
    sent = welcome(normaliser)
    sent.fields["normaliser_digest"] = "another"
    with pytest.raises(DataError, match=naming("normaliser", "another", normaliser.digest())):
        actor.normaliser_of(sent)


def test_an_evaluation_decodes_no_checkpoint_with_another_ones_normaliser(monkeypatch, config, normaliser):
    """The learner was replaced between its welcome and the checkpoint."""
    link = Link(welcome(normaliser))
    monkeypatch.setattr(evaluate, "connect_to_learner", lambda *_, **__: (link, link.welcome))
    with pytest.raises(PolicyError, match=naming("normaliser", "its own", normaliser.digest(), 40)):
        evaluate.run_evaluation(
            config, "latest", 1, checkpoint_path=None, ip="127.0.0.1", port=1, actor_id="a", save_video=False,
            stochastic=False, validation=False,
        )  # fmt: skip
