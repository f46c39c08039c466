"""Updates and steps keep step, also at the end and after a resume."""

from __future__ import annotations

import pytest

from serl_chunk.config.learner import LearnerConfig
from serl_chunk.learner.schedule import Phase, TrainingSchedule


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


def test_steps_since_the_warm_up_entitle_to_updates():
    ingest = Steps(100)
    p = schedule(ingest)
    p.begin(0)
    assert p.steps_missing(Phase.TRAIN, 2) == 2
    ingest.env_steps = 110
    assert (p.updates_due, p.may_update, p.steps_allowed(Phase.TRAIN)) == (5, True, 30)
    for _ in range(5):
        p.did_update()
    assert (p.updates_due, p.may_update, p.steps_allowed(Phase.TRAIN)) == (0, False, 40)


def test_the_warm_up_waits_for_steps_after_its_episodes():
    p = schedule(Steps(5))
    assert [p.steps_missing(Phase.WARMUP, episodes) for episodes in (1, 2)] == [0, 15]


@pytest.mark.parametrize(("steps", "wanted"), [(100, 40), (300, 40)])
def test_a_warm_up_that_took_every_step_leaves_updates_for_them(steps, wanted):
    ingest = Steps(steps)
    p = schedule(ingest, online_steps=100)
    assert p.steps_over
    p.begin(0)  # counts from training_starts
    assert (p.updates_wanted(0), p.updates_due, p.steps_allowed(Phase.TRAIN)) == (wanted, wanted, 0)
    assert not p.is_over(0)
    for _ in range(wanted):
        p.did_update()
    assert p.is_over(wanted)


def test_max_steps_ends_training():
    p = schedule(Steps(1_000), max_steps=7)
    p.begin(0)
    assert [p.is_over(n) for n in (6, 7)] == [False, True]


def test_a_resume_goes_on_where_it_was():
    ingest = Steps(200)
    first = schedule(ingest)
    first.begin(0)
    ingest.env_steps = 221
    for _ in range(3):
        first.did_update()
    owed = first.limiter.owed(ingest.env_steps)
    second = schedule(Steps(221, resumed_steps=221))
    second.resume(3, owed)
    second.begin(3)  # of a warm-up that gathered what was lost: changes nothing
    assert second.updates_due == first.updates_due == 7
    assert second.steps_allowed(Phase.TRAIN) == first.steps_allowed(Phase.TRAIN)


def test_a_checkpoint_of_before_anything_was_owed():
    p = schedule(Steps(221, resumed_steps=221))
    p.resume(3, None)
    p.begin(3)
    assert p.updates_due == 0


def test_without_a_ratio_no_side_waits_from_the_warm_up_on():
    ingest = Steps(100)
    p = schedule(ingest, utd_ratio=None, max_steps=1_000)
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


@pytest.mark.parametrize(("before", "after", "due"), [(None, 0.5, 0), (0.5, None, 0)])
def test_a_run_resumes_with_or_without_a_ratio(before, after, due):
    ingest = Steps(200)
    first = schedule(ingest, utd_ratio=before)
    first.begin(0)
    ingest.env_steps = 221
    for _ in range(3):
        first.did_update()
    second = schedule(Steps(221, resumed_steps=221), utd_ratio=after)
    second.resume(3, first.limiter.owed(221))
    second.begin(3)
    assert (second.updates_due, second.may_update) == (due, after is None)
    assert second.steps_allowed(Phase.TRAIN) == (None if after is None else 40)
