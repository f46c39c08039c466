"""No collection of garbage within a realtime episode, one between two of them, and a warm-up before the first reset."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref

import numpy as np
import pytest
from actor_helpers import (
    SPEC,
    HumanOnTicks,
    LineEnv,
    ListSink,
    NoisyAgent,
    SimClock,
    SimInference,
    make_config,
    make_policy,
)

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.config.experiment import ActorConfig


class Cyclic:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.own = self


class WastefulEnv(LineEnv):
    """Each step leaves more cycles than start a collection; the newest is watched."""

    def step(self, action):
        for _ in range(2 * gc.get_threshold()[0]):
            last = Cyclic()
        self.newest = weakref.ref(last)
        return super().step(action)


@pytest.fixture
def collections():
    """What is noted by tests, and every collection."""
    events: list[str] = []

    def note(phase: str, info: dict) -> None:
        if phase == "start":
            events.append("collection")

    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # the interpreter's: the suite's own is higher, which takes as much more garbage
    gc.callbacks.append(note)
    yield events
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


def runner_of(env, *, intervention=None, agent=None, image_keys=()):
    """On the environment's clock, or on the machine's own, with a thread of its own for inference."""
    policy = make_policy(agent or NoisyAgent(8), image_keys=image_keys)
    inference = env.clock and SimInference(policy, env.clock, itertools.repeat(0.005))
    config = make_config(horizon=8, actor=ActorConfig(clock="realtime", inference="async"))
    return EpisodeRunner(
        env, policy, ListSink(), config=config, clock=env.clock, inference=inference, intervention=intervention
    )


def test_nothing_is_collected_within_an_episode_and_all_of_it_between_two(collections):
    env = WastefulEnv(length=30)
    runner = runner_of(env)
    before = gc.isenabled(), gc.get_freeze_count()
    reset, step = env.reset, env.step
    env.reset = lambda **kw: collections.append("reset") or reset(**kw)
    env.step = lambda action: collections.append("step") or step(action)
    try:
        for _ in range(3):
            runner.run_episode(0, explore=True)
            assert env.newest() is None  # collected before the next reset
        assert gc.get_freeze_count() > before[1]
    finally:
        runner.close()
    assert gc.isenabled() == before[0]
    assert before[1] or not gc.get_freeze_count()
    within = collections[collections.index("reset") :]
    apart = itertools.groupby(within, lambda event: event == "collection")
    assert [list(events) for collected, events in apart if not collected] == [["reset", *["step"] * 30]] * 3


def test_a_long_episode_collects_at_a_hold(collections):
    """Ten minutes and more, at one tick a second; a human keeps still on three ticks."""
    still = frozenset({500, 650, 660})
    env = LineEnv(length=700, clock=SimClock(), spec=dataclasses.replace(SPEC, control_hz=1.0))
    runner = runner_of(env, intervention=HumanOnTicks(still, idle=still))
    step = env.step
    env.step = lambda action: collections.append(f"step {env.tick}") or step(action)
    runner.run_episode(0, explore=True)
    runner.close()
    within = collections[collections.index("step 0") : collections.index("step 699")]
    at = within.index("collection")
    assert within.count("collection") == 1
    assert within[at - 1] in ("step 650", "step 651")  # the human's hold, or the tick without a plan behind it


def test_an_error_leaves_the_interpreter_as_it_was():
    runner = runner_of(LineEnv(length=30, crash_at=5, clock=SimClock()))
    with pytest.raises(RuntimeError, match="motor"):
        runner.run_episode(0, explore=True)
    runner.close()
    assert gc.isenabled()


def test_the_robot_is_reset_after_the_warm_up():
    """Between a reset and the first tick nothing commands a robot, and compiling takes seconds."""
    events: list[str] = []

    class Telling(NoisyAgent):
        def sample(self, params, observation, key, **kw):
            events.append("decision")
            shapes = {name: (value.dtype, value.shape) for name, value in observation.items()}
            assert shapes == {"state": (np.float32, (3,)), "images/wrist": (np.uint8, (6, 5, 3))}
            return super().sample(params, observation, key, **kw)

    env = LineEnv(length=10, clock=SimClock())
    reset, look = env.reset, env.read_images
    env.reset = lambda **kw: events.append("reset") or reset(**kw)
    env.read_images = lambda *a: events.append("look") or look(*a)
    runner = runner_of(env, agent=Telling(8), image_keys=("wrist",))
    for seed in range(2):
        runner.run_episode(seed, explore=True)
    first = events.index("reset")
    assert events[: first + 2] == ["decision"] * 53 + ["reset", "look"]
    assert "decision" in events[first:]
    assert events.count("reset") == 2
    runner.close()
