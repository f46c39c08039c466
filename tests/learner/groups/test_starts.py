"""Init states: where they come from, what is remembered of them, and how often each is drawn."""

from __future__ import annotations

import itertools
import json
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
from errors import naming

from serl_chunk.cli.learner import _tasks_of
from serl_chunk.config.groups import GroupConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.learner.groups.starts import Memory, StartRecord, Starts, make_starts
from serl_chunk.types import EVAL_SEED_BASE, TRAINING_SEED_BASE, VALIDATION_SEED_BASE, Begin, ConfigError

TASK = "push"
DEMOS = [Begin(f"d{i}", task, init_state=start) for i, (task, start) in enumerate([
    (TASK, "seed-4"), ("lift", "seed-5"), ("", "seed-6"), (TASK, "seed-4"), (TASK, ""),
    (TASK, f"seed-{EVAL_SEED_BASE}"), (TASK, f"seed-{VALIDATION_SEED_BASE + 9}"),
])]  # fmt: skip


def starts_of(setting: str, tasks=(TASK,), **given) -> Starts:
    return make_starts(GroupConfig(init_states=setting), tasks, 42, **given)


def first(starts: Starts, n: int, memory: Memory | None = None, iteration: int = 0, **changes) -> list[str]:
    return list(itertools.islice(starts.draws(TASK, iteration, memory or Memory(), GroupConfig(**changes)), n))


def remembering(**records: StartRecord) -> Memory:
    return Memory({(TASK, name): record for name, record in records.items()})


ABC = Starts(42, {TASK: ["a", "b", "c"]})


@pytest.mark.parametrize(("setting", "distinct"), [("seeds", 40), ("seeds:3", 3)])
def test_seeds_are_trainings_own_and_none_of_evaluations(setting, distinct):
    drawn = first(starts_of(setting), 40)
    assert len(set(drawn)) == distinct
    assert {name[:5] for name in drawn} == {"seed-"}
    assert min(int(name[5:]) for name in drawn) >= TRAINING_SEED_BASE
    assert drawn == first(starts_of(setting), 40)
    assert drawn != first(starts_of(setting), 40, iteration=1)


def test_demonstrations_give_their_starts_to_their_tasks_but_those_of_evaluations():
    starts = starts_of("demos", (TASK, "lift"), demos=DEMOS)
    assert set(first(starts, 10)) == {"seed-4", "seed-6"}
    assert set(itertools.islice(starts.draws("lift", 0, Memory(), GroupConfig()), 9)) == {"seed-5", "seed-6"}


def test_saved_states_are_those_that_the_robot_offers():
    assert sorted(first(starts_of("saved", saved={TASK: ["x", "y"]}), 2)) == ["x", "y"]


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("tasks", [(), ("push", "lift")])
def test_a_robot_of_ones_own_names_its_slots_and_tasks_and_is_not_opened(real, tasks):
    opened = []

    class Slots(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        init_states = ("left", "right")

        def __init__(self, fake_env):
            self.tasks = tasks
            opened.append(not fake_env)

    robot = GymConfig(make=Slots, is_real=real, task="tidy")
    config = Mock(robot=robot, agent=Mock(iterates=True), group=GroupConfig(init_states="saved"))
    assert _tasks_of(config) == dict.fromkeys(tasks or ["tidy"], ("left", "right"))
    assert opened == [False]


@pytest.mark.parametrize(("setting", "given", "named"), [
    ("demos", {"demos": DEMOS[4:]}, ("group.init_states", "push", "seeds")),
    ("saved", {}, ("group.init_states", "no saved states", "demos")),
    ("saved", {"saved": {TASK: ["x" * 501]}}, ("group.init_states", 501, 500)),
])  # fmt: skip
def test_a_set_without_a_start_is_refused(setting, given, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        starts_of(setting, **given)


def test_the_digest_is_of_the_set():
    sets = [Starts(1), Starts(2), ABC, Starts(7, {TASK: ["a", "b"]}), Starts(42, {"lift": ["a", "b", "c"]})]
    assert len({s.digest() for s in sets}) == len(sets)
    assert Starts(7, {TASK: ["a", "b", "c"]}).digest() == ABC.digest()


def test_each_start_comes_once_before_one_comes_again():
    drawn = first(ABC, 9)
    assert [sorted(drawn[i : i + 3]) for i in (0, 3, 6)] == [["a", "b", "c"]] * 3


def test_mastered_starts_are_a_tenth_of_the_draws_and_all_where_no_other_is_left():
    memory = remembering(a=StartRecord(16, True), b=StartRecord(15, True))
    drawn = first(ABC, 2000, memory)
    assert 140 < drawn.count("a") < 260
    assert "a" not in first(ABC, 200, memory, retest=0.0)
    assert set(first(ABC, 30, memory, mastered=0, retest=0.0)) == {"a", "b", "c"}
    assert set(first(ABC, 30, remembering(**dict.fromkeys("abc", StartRecord(16, True))), retest=0.0)) == {*"abc"}


def test_starts_that_were_never_solved_rest_longer_and_longer():
    memory, tried = Memory(), []
    for iteration in range(24):
        if "a" in (drawn := first(ABC, 3, memory, iteration)):
            tried.append(iteration)
        memory = memory.after(iteration, [((TASK, n), [n != "a", False]) for n in set(drawn)], barren=False)
    assert tried == [0, 2, 5, 10, 19]
    assert set(first(ABC, 3, remembering(**dict.fromkeys("abc", StartRecord(rests_until=9))))) == {*"abc"}


def test_memory_counts_successes_in_a_row_over_groups_and_survives_json():
    start = (TASK, "a")
    memory = Memory().after(0, [(start, [True, False, True, True]), (start, [True])], barren=True)
    memory = memory.after(1, [((TASK, "b"), [False])], barren=True)
    assert memory.starts == {start: StartRecord(3, True, 0, 0), (TASK, "b"): StartRecord(0, False, 1, 3)}
    assert memory.barren == 2
    assert Memory.from_json(json.loads(json.dumps(memory.to_json()))) == memory
    assert memory.after(2, [], barren=False).barren == 0
