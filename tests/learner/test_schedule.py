"""Updates and steps keep step, also at the end and after a resume; phases, and what a checkpoint notes of them."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from serl_chunk.config.experiment import LearnerConfig
from serl_chunk.learner.schedule import Phase, TrainingProgress, TrainingSchedule, phases_of
from serl_chunk.learner.trainers.phases import PIECE_BYTES, SCAN, updates_at_once
from serl_chunk.types import CameraSpec


class Steps:
    """An ingest that only counts."""

    def __init__(self, env_steps: int = 0, resumed_steps: int = 0) -> None:
        self.env_steps, self.resumed_steps = env_steps, resumed_steps

    @property
    def fresh_steps(self) -> int:
        return self.env_steps - self.resumed_steps


def schedule(ingest: Steps, **config) -> TrainingSchedule:
    settings = {"utd_ratio": 0.5, "max_lag_steps": 40, "training_starts": 20, "warmup_episodes": 2, **config}
    return TrainingSchedule(LearnerConfig(**settings), ingest)  # type: ignore[arg-type]


def test_nothing_is_limited_before_training_but_an_offline_phase_stops_the_actors():
    p = schedule(Steps(10))
    assert [p.steps_allowed(phase) for phase in (Phase.PRETRAIN, Phase.OFFLINE, Phase.WARMUP)] == [None, 0, None]
    assert (p.may_update, p.updates_due, p.limiter.owed(10)) == (False, 0, None)
    # The warm-up waits for steps after its episodes.
    p = schedule(Steps(5))
    assert [p.steps_missing(Phase.WARMUP, episodes) for episodes in (1, 2)] == [0, 15]


def test_steps_since_the_warm_up_entitle_to_updates_until_max_steps():
    ingest = Steps(100)
    p = schedule(ingest, max_steps=7)
    p.begin(0)
    assert p.steps_missing(Phase.TRAIN, 2) == 2
    ingest.env_steps = 110
    assert (p.updates_due, p.may_update, p.steps_allowed(Phase.TRAIN)) == (5, True, 30)
    for _ in range(5):
        p.did_update()
    assert (p.updates_due, p.may_update, p.steps_allowed(Phase.TRAIN)) == (0, False, 40)
    assert [p.is_over(n) for n in (6, 7)] == [False, True]


@pytest.mark.parametrize("steps", [100, 300])
def test_a_warm_up_that_took_every_step_leaves_updates_for_them(steps):
    p = schedule(Steps(steps), online_steps=100)
    assert p.steps_over
    p.begin(0)  # counts from training_starts
    assert (p.updates_wanted(0), p.updates_due, p.steps_allowed(Phase.TRAIN)) == (40, 40, 0)
    assert not p.is_over(0)
    for _ in range(40):
        p.did_update()
    assert p.is_over(40)


@pytest.mark.parametrize(
    ("before", "after", "keeps", "due", "allowed"),
    [(0.5, 0.5, True, 7, 40 - 15), (0.5, 0.5, False, 0, 40), (None, 0.5, True, 0, 40), (0.5, None, True, 0, None)],
)
def test_a_resume_goes_on_where_it_was_with_or_without_a_ratio(before, after, keeps, due, allowed):
    ingest = Steps(200)
    first = schedule(ingest, utd_ratio=before)
    first.begin(0)
    ingest.env_steps = 221
    for _ in range(3):
        first.did_update()
    second = schedule(Steps(221, resumed_steps=221), utd_ratio=after)
    # A checkpoint of before anything was owed notes none.
    second.resume(3, first.limiter.owed(221) if keeps else None)
    second.begin(3)  # of a warm-up that gathered what was lost: changes nothing
    assert (second.updates_due, second.may_update) == (due, due > 0 or after is None)
    assert second.steps_allowed(Phase.TRAIN) == allowed
    assert not (before and after and keeps) or first.steps_allowed(Phase.TRAIN) == allowed


def test_without_a_ratio_no_side_waits_from_the_warm_up_on():
    p = schedule(Steps(100), utd_ratio=None, max_steps=1_000)
    assert not p.may_update
    p.begin(0)
    for _ in range(500):
        assert p.may_update
        p.did_update()
    assert (p.steps_allowed(Phase.TRAIN), p.steps_missing(Phase.TRAIN, 9), p.updates_due) == (None, 0, 0)
    assert p.progress(500) == (500, 1_000)
    assert [p.is_over(n) for n in (999, 1_000)] == [False, True]


def test_without_a_ratio_the_last_online_step_ends_training():
    ingest = Steps(60)
    p = schedule(ingest, utd_ratio=None, online_steps=100)
    p.begin(0)
    assert (p.progress(7), p.is_over(7), p.steps_allowed(Phase.TRAIN)) == ((60, 100), False, 40)
    ingest.env_steps = 130  # of realtime actors
    assert (p.progress(9), p.is_over(9), p.steps_allowed(Phase.TRAIN)) == ((100, 100), True, 0)
    done = {"offline_updates": 0, "online_updates": 9, "missed": False}
    assert p.resumed_phase("train", **done) is Phase.DONE
    assert "learner.online_steps" in p.resume_hint(9)
    ingest.env_steps = 60
    assert p.resumed_phase("train", **done) is Phase.WARMUP


def of(**settings) -> TrainingSchedule:
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
        ("offline", {"missed": True}, Phase.OFFLINE),
        ("train", {"online_updates": 3, "missed": True}, Phase.TRAIN),
        ("done", {"online_updates": 3, "missed": True}, Phase.DONE),
    ],
)
def test_where_a_run_goes_on(saved, changes, expected):
    state = {"offline_updates": 10, "online_updates": 0, "missed": False} | changes
    assert of(offline_steps=10, max_steps=3).resumed_phase(saved, **state) is expected


OFFLINE = {"offline_steps": 10, "online_steps": 0}


@pytest.mark.parametrize(
    ("remedy", "settings", "online_updates"),
    [
        ("raise learner.offline_steps", OFFLINE, 0),
        ("do not set learner.online_steps=0", OFFLINE, 4),
        ("raise learner.online_steps", {"online_steps": 500}, 4),
        ("learner.max_steps", {}, 4),
    ],
)
def test_how_to_go_on_names_what_to_raise(remedy, settings, online_updates):
    assert remedy in of(**settings).resume_hint(online_updates)


@pytest.mark.parametrize(
    ("settings", "has_critic", "expected"),
    [
        ({}, True, ["pretrain", "critic pretrain", "warm-up", "train"]),
        ({}, False, ["pretrain", "warm-up", "train"]),
        ({"pretrain_steps": 0, "offline_steps": 9, "online_steps": 0}, True, ["critic pretrain", "offline"]),
        ({"online_steps": 900}, True, ["pretrain", "critic pretrain", "warm-up", "train"]),
    ],
)
def test_a_run_has_the_phases_whose_lengths_are_set(settings, has_critic, expected):
    config = LearnerConfig(**{"pretrain_steps": 1, "critic_pretrain_steps": 1} | settings)
    assert phases_of(config, has_critic=has_critic) == expected


@pytest.mark.parametrize(("size", "batch", "expected"), [(48, 64, SCAN), (128, 256, 10), (480, 256, 1), (0, 256, SCAN)])
def test_large_images_come_in_smaller_pieces(size, batch, expected):
    assert updates_at_once(batch, [CameraSpec("top", size, size)] if size else []) == expected
    assert expected == 1 or 2 * expected * batch * size * size * 3 <= PIECE_BYTES
