"""The training actor's start: what the learner's welcome tells it about the run so far."""

from __future__ import annotations

import dataclasses
import types

import pytest

from serl_chunk.actor.clock import Lateness
from serl_chunk.actor.session import ActorSummary
from serl_chunk.cli import actor
from serl_chunk.cli.learner import welcome_of
from serl_chunk.cli.process import load
from serl_chunk.config.agents import BcConfig, FlowConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.transport.wire.handshake import Welcome

SUMMARY = ActorSummary("operator", 0, 0, 0, 0, 0, 0, 0, 0.0, delivered=True, lateness=Lateness())


class Link:
    """Of a learner that gets no requests."""

    def stats(self) -> dict[str, float]:
        return {"inherited": 0.0}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("told", [True, False])
def test_a_restarted_actor_goes_on_where_the_run_is(tmp_path, monkeypatch, capsys, told):
    normaliser = types.SimpleNamespace(mode="relative", digest=lambda: "d", to_arrays=dict)
    learner = types.SimpleNamespace(normaliser=normaliser, episodes=3, env_steps=90, human_ticks=27)
    fields, arrays = welcome_of(learner)
    if not told:  # by a learner of before
        del fields["human_ticks"]
    handed_over = {}

    def run_actor(*args, **kwargs):
        handed_over.update(kwargs)
        return SUMMARY

    monkeypatch.setattr(actor, "connect_to_learner", lambda *_: (Link(), Welcome(fields, arrays, "run", 1)))
    monkeypatch.setattr(actor, "run_actor", run_actor)
    monkeypatch.setattr(actor, "stop_on_signals", lambda *_: None)
    monkeypatch.setattr(Normaliser, "from_arrays", lambda *_: None)
    config = load("fake_aloha", [("actor.intervention", "none")])
    config = dataclasses.replace(config, agent=BcConfig(flow=FlowConfig(hidden=(8,))))
    assert actor.run_training_actor(config, ip="127.0.0.1", port=1, actor_id="a", spool_path=str(tmp_path)) == 0
    so_far = [handed_over[k] for k in ("first_episode", "steps_before", "human_ticks_before")]
    assert so_far == [3, 90, 27 if told else 0]
    capsys.readouterr()
