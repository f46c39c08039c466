"""What a checkpoint notes, and where a run goes on."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from serl_chunk.config.learner import LearnerConfig
from serl_chunk.learner.schedule import Phase, TrainingProgress, TrainingSchedule, phases_of


def schedule(**settings) -> TrainingSchedule:
    return TrainingSchedule(LearnerConfig(**settings), SimpleNamespace(env_steps=500))  # type: ignore[arg-type]


def test_notes_survive_a_file_and_other_notes():
    progress = TrainingProgress(9, 2, 1, 4, 0, {"phase": "train", "updates_owed": 1.5})
    notes = json.loads(json.dumps({"agent": "acfql", **dataclasses.asdict(progress)}))
    assert TrainingProgress.of(notes) == progress


@pytest.mark.parametrize(
    ("saved", "changes", "expected"),
    [
        ("train", {}, Phase.WARMUP),
        ("offline", {"offline_updates": 5}, Phase.OFFLINE),
        ("train", {"offline_updates": 5, "online_updates": 3}, Phase.DONE),
        ("offline", {"offline_updates": 10, "missed": True}, Phase.OFFLINE),
        ("train", {"online_updates": 3, "missed": True}, Phase.TRAIN),
        ("done", {"online_updates": 3, "missed": True}, Phase.DONE),
    ],
)
def test_where_a_run_goes_on(saved, changes, expected):
    state = {"offline_updates": 10, "online_updates": 0, "missed": False} | changes
    assert schedule(offline_steps=10, max_steps=3).resumed_phase(saved, **state) is expected


def test_how_to_go_on_names_what_to_raise():
    offline = {"offline_steps": 10, "online_steps": 0}
    for remedy, settings, online_updates in (
        ("raise learner.offline_steps", offline, 0),
        ("do not set learner.online_steps=0", offline, 4),
        ("raise learner.online_steps", {"online_steps": 500}, 4),
        ("learner.max_steps", {}, 4),
    ):
        assert remedy in schedule(**settings).resume_hint(online_updates)


@pytest.mark.parametrize(
    ("settings", "has_critic", "expected"),
    [
        ({}, True, ["pretrain", "critic pretrain", "warm-up", "critic warm-up", "train"]),
        ({}, False, ["pretrain", "warm-up", "train"]),
        ({"pretrain_steps": 0, "offline_steps": 9, "online_steps": 0}, True, ["critic pretrain", "offline"]),
        ({"critic_warmup_steps": 0, "online_steps": 900}, True, ["pretrain", "critic pretrain", "warm-up", "train"]),
    ],
)
def test_a_run_has_the_phases_whose_lengths_are_set(settings, has_critic, expected):
    config = LearnerConfig(**{"pretrain_steps": 1, "critic_pretrain_steps": 1, "critic_warmup_steps": 1} | settings)
    assert phases_of(config, has_critic=has_critic) == expected
