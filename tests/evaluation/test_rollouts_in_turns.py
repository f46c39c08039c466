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
from serl_chunk.evaluation.results import paired_difference, results_table, summary_line, wilson_interval
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


def shown(results) -> str:
    text = io.StringIO()
    rich.console.Console(file=text, width=120).print(results_table(results))
    return text.getvalue()


def test_each_result_is_that_of_an_evaluation_alone():
    results, *_ = in_turns(6)
    env = Told(length=15)
    alone = [evaluate(env, p, make_config(), n=6, deterministic=False) for p in policies([], env)]
    ours, theirs = ([[(e.seed, e.length, e.success) for e in r.summaries] for r in found] for found in (results, alone))
    assert ours == theirs
    assert [r.policy_version for r in results] == [0, 10, 20]
    assert len({r.successes for r in results}) > 1
    result = results[2]
    before, gone = result.successes, result.summaries[1]
    result.take_back(result.turns[1])  # it counts no more
    assert (result.episodes, result.successes, result.repeated) == (5, before - gone.success, [gone])
    assert gone not in result.summaries
    assert result.steps == sum(e.length for e in result.summaries)


@pytest.mark.parametrize("finished", [0, 2, 5])
def test_what_was_finished_before_a_stop_counts(finished):
    done: list[int] = []

    def stop() -> str | None:
        return "interrupted" if len(done) == finished else None

    results, log, _ = in_turns(2, progress=lambda results: done.append(len(results)), stop=stop)
    assert sum(r.episodes for r in results) == finished == sum(len(r.turns) for r in results)
    assert len(log) <= finished + 1
    assert [r.interrupted and r.to_json()["interrupted"] for r in results] == [True] * 3
    assert not in_turns(1)[0][0].interrupted


def test_two_policies_are_compared_on_the_starts_of_both():
    results, *_ = in_turns(20, count=2)
    first, second = (np.array([e.success for e in r.summaries]) for r in results)
    assert f"10 against 0, paired: {100 * (second.mean() - first.mean()):+.1f} % (95 % interval" in shown(results)
    assert "sampled (version 10)" in shown(results)
    assert json.loads(json.dumps(results[0].to_json()))["n"] == 20


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
    assert "best against one, paired" in shown(results)
    assert "mean (version 3, one)" in shown(results)


@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [(97, 100, (0.9155, 0.9897)), (0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (0, 0, (0.0, 1.0))],
)
def test_wilson_interval(successes, n, interval):
    assert wilson_interval(successes, n) == pytest.approx(interval, abs=6e-5)


def pairs(both: int, first: int, second: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    table = ((both, 1, 1), (first, 1, 0), (second, 0, 1), (neither, 0, 0))
    return tuple(np.concatenate([np.full(n, values[k], bool) for n, *values in table]) for k in (0, 1))


def test_the_paired_interval_holds_the_difference_in_95_of_100_cases():
    rng, held, n = np.random.default_rng(0), 0, 100
    for _ in range(400):
        luck = rng.random((2, n))
        first = luck[0] < 0.95
        second = np.where(rng.random(n) < 0.5, luck[0], luck[1]) < 0.88
        difference, low, high = paired_difference(first, second)
        assert difference == pytest.approx(second.mean() - first.mean())
        assert low <= difference <= high
        held += low <= -0.07 <= high
    assert 0.92 * 400 <= held <= 0.99 * 400
    assert paired_difference(second, first) == pytest.approx((-difference, -high, -low))


def test_the_interval_of_a_table_of_newcombe():
    """Published: 0.2000 (0.0569, 0.3404)."""
    assert paired_difference(*pairs(36, 2, 12, 0)) == pytest.approx((0.2, 0.0569, 0.3404), abs=6e-5)
