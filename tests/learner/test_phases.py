"""What a checkpoint notes, and where a run goes on."""

from __future__ import annotations

import dataclasses
import json

import pytest

from serl_chunk.config.learner import LearnerConfig
from serl_chunk.learner.schedule import Phase, TrainingProgress, phases_of, resume_hint, resumed_phase


def test_notes_survive_a_file_and_other_notes():
    progress = TrainingProgress(9, 2, 1, {"state": 5}, journal_position=4, phase="train", updates_owed=1.5)
    notes = json.loads(json.dumps({"agent": "acfql", **dataclasses.asdict(progress)}))
    assert TrainingProgress.of(notes) == progress


def test_notes_of_an_older_run():
    notes = {"env_steps": 9, "human_ticks": 2, "episodes": 1, "sampler_rng": {}}
    assert TrainingProgress.of(notes) == TrainingProgress(9, 2, 1, {})


@pytest.mark.parametrize(
    ("saved", "changes", "expected"),
    [
        ("train", {}, Phase.WARMUP),
        ("offline", {"offline_updates": 5}, Phase.OFFLINE),
        ("train", {"offline_updates": 5, "online_updates": 1, "over": True}, Phase.DONE),
        ("offline", {"offline_updates": 10, "missed": True}, Phase.OFFLINE),
        ("train", {"online_updates": 3, "over": True, "missed": True}, Phase.TRAIN),
        ("done", {"online_updates": 3, "over": True, "missed": True}, Phase.DONE),
    ],
)
def test_where_a_run_goes_on(saved, changes, expected):
    state = {"offline_updates": 10, "online_updates": 0, "over": False, "missed": False} | changes
    assert resumed_phase(LearnerConfig(offline_steps=10), saved, **state) is expected


def test_how_to_go_on_names_what_to_raise():
    config = LearnerConfig(offline_steps=10, online_steps=0)
    told = {
        "raise learner.offline_steps": resume_hint(config, online_updates=0, steps_over=True),
        "do not set learner.online_steps=0": resume_hint(config, online_updates=4, steps_over=True),
        "raise learner.online_steps": resume_hint(
            dataclasses.replace(config, online_steps=500), online_updates=4, steps_over=True
        ),
        "learner.max_steps": resume_hint(LearnerConfig(), online_updates=4, steps_over=False),
    }
    for remedy, text in told.items():
        assert remedy in text


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
