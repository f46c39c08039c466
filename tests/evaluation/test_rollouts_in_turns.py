"""Several policies in turns: from the same starts, in a drawn order, and with the results of an evaluation alone."""

from __future__ import annotations

import dataclasses
import io
import json

import numpy as np
import pytest
import rich.console
from actor_helpers import LineEnv, NoisyAgent, make_config, make_policy

from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.evaluation.results import results_table, summary_line
from serl_chunk.evaluation.rollouts import EVAL_SEED_BASE, Entry, evaluate, evaluate_in_turns
from serl_chunk.robots.base import RobotEnv
from serl_chunk.types import Snapshot


class Told(LineEnv):
    """Succeeds where the policy's noise pushes the first joint far enough, and notes who acted."""

    def step(self, action):
        self.success_at = self.tick if action[0] > 0.15 else None
        return super().step(action)


class Named(NoisyAgent):
    """Notes the episodes in which it acts, by their first decision."""

    def __init__(self, name: str, log: list[str], spread: float) -> None:
        super().__init__(8, spread)
        self._name, self._log = name, log

    def sample(self, params, observation, key, *, explore, committed=None, alone=False):
        if observation["state"][2] == 0:
            self._log.append(self._name)
        return super().sample(params, observation, key, explore=explore, committed=committed)


def policies(log: list[str], env: RobotEnv) -> list[ChunkPolicy]:
    found = []
    for number, (name, spread) in enumerate((("a", 0.05), ("b", 0.1), ("c", 0.2))):
        policy = make_policy(Named(name, log, spread))
        policy.swap(Snapshot(10 * number, {"bias": np.float32(0)}))
        found.append(policy)
    return found


def in_turns(n: int, *, seed: int = 0, count: int = 3, **more):
    log: list[str] = []
    env = Told(length=15)
    entries = [Entry(p, deterministic=False) for p in policies(log, env)[:count]]
    results = evaluate_in_turns(env, entries, dataclasses.replace(make_config(), seed=seed), n=n, **more)
    return results, log, env.seeds[2:]  # the first two are compared


def test_each_start_is_played_by_every_policy_before_the_next_one_in_a_drawn_order():
    results, log, seeds = in_turns(20)
    blocks = [log[k : k + 3] for k in range(0, 60, 3)]
    assert all(sorted(block) == ["a", "b", "c"] for block in blocks)
    assert {tuple(block) for block in blocks} >= {("a", "b", "c"), ("c", "b", "a")}
    assert seeds == [EVAL_SEED_BASE + k // 3 for k in range(60)]
    assert in_turns(20)[1] == log
    assert in_turns(20, seed=1)[1] != log
    turns = [turn for result in results for turn in result.turns]
    assert sorted(turns) == list(range(60))
    assert [log[turn] for turn in results[1].turns] == ["b"] * 20


def test_each_result_is_that_of_an_evaluation_alone():
    results, *_ = in_turns(6)
    env = Told(length=15)
    alone = [evaluate(env, p, make_config(), n=6, deterministic=False) for p in policies([], env)]
    for one, other in zip(results, alone, strict=True):
        assert [(e.seed, e.length, e.success) for e in one.summaries] == [
            (e.seed, e.length, e.success) for e in other.summaries
        ]
    assert [r.policy_version for r in results] == [0, 10, 20]
    assert len({r.successes for r in results}) > 1


@pytest.mark.parametrize("finished", [0, 1, 2, 4, 5])
def test_what_was_finished_before_a_stop_counts(finished):
    done: list[int] = []

    def stop() -> str | None:
        return "interrupted" if len(done) == finished else None

    results, log, _ = in_turns(2, progress=lambda results: done.append(len(results)), stop=stop)
    assert sum(r.episodes for r in results) == finished == sum(len(r.turns) for r in results)
    assert {r.interrupted for r in results} == {True}
    assert len(log) <= finished + 1
    assert [bool(r.to_json().get("interrupted")) for r in results] == [True] * 3
    assert not in_turns(1)[0][0].interrupted


def test_two_policies_are_compared_on_the_starts_of_both():
    results, *_ = in_turns(20, count=2)
    text = io.StringIO()
    rich.console.Console(file=text, width=120).print(results_table(results))
    first, second = (np.array([e.success for e in r.summaries]) for r in results)
    assert f"10 against 0, paired: {100 * (second.mean() - first.mean()):+.1f} % (95 % interval" in text.getvalue()
    assert "sampled (version 10)" in text.getvalue()
    assert json.loads(json.dumps(results[0].to_json()))["n"] == 20


def test_an_episode_that_is_taken_back_counts_no_more():
    result = in_turns(4)[0][2]
    before, gone = result.successes, result.summaries[1]
    result.take_back(result.turns[1])
    assert (result.episodes, result.successes) == (3, before - gone.success)
    assert gone not in result.summaries
    assert result.repeated == [gone]
    assert result.steps == sum(e.length for e in result.summaries)


def test_both_arms_of_one_policy_are_compared():
    """An entry's arm reaches every decision; without one the parameters decide."""
    env, agents = Told(length=15), [NoisyAgent(8) for _ in range(4)]
    made = [make_policy(agent) for agent in agents]
    made[3].swap(Snapshot(3, {"bias": np.float32(3), "critic_chooses": np.bool_(False)}))
    entries = [Entry(policy, arm=arm) for policy, arm in zip(made, ("one", "best", "", ""), strict=True)]
    evaluate_in_turns(env, entries, make_config(), n=2)
    assert [set(agent.alone) for agent in agents] == [{True}, {False}, {False}, {True}]

    results = evaluate_in_turns(env, entries[:2], make_config(), n=2)
    assert [r.to_json()["arm"] for r in results] == ["one", "best"]
    assert "arm" not in evaluate(env, made[2], make_config(), n=1).to_json()
    assert [summary_line(r, "x").split()[-1] for r in results] == ["arm=one", "arm=best"]
    text = io.StringIO()
    rich.console.Console(file=text, width=120).print(results_table(results))
    assert "best against one, paired" in text.getvalue()
    assert "mean (version 3, one)" in text.getvalue()
