"""Learners of the point robot for tests: without sockets, with agents that are compiled once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import builder_of
from serl_chunk.agents.spec import agent_spec
from serl_chunk.cli.learner import make_learner
from serl_chunk.cli.local import LocalLink
from serl_chunk.data.demos import load_demos
from serl_chunk.evaluation.open_loop import CheckOfLearner
from serl_chunk.learner import building
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.intake import Entry
from serl_chunk.learner.learner import Learner, Publish
from serl_chunk.learner.schedule import Phase
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.checkpoints import host_leaves
from serl_chunk.runs.folder import open_run
from serl_chunk.runs.metrics import read_metrics

TIMED = ("wall", "rates/", "timer/", "wait/", "seconds")
Rows = list[tuple[int, str, Any]]  # a journal's: entry, session, record


@functools.cache
def agent_of(config: Any, spec: Any) -> Agent:
    """The agent, the same one for the same configuration."""
    return builder_of(config)(config, spec)


def quick_agent(config: Any, spec: Any) -> Agent:
    # What is imitated the replay alone decides: runs that differ in that share an agent.
    return agent_of(dataclasses.replace(config.agent, bc_on="all"), agent_spec(config, spec))


def quick_agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Agents hold no state, so runs of one configuration share one, and its compilations. Nothing is checked."""
    monkeypatch.setattr(building, "make_agent", quick_agent)
    monkeypatch.setattr(CheckOfLearner, "__call__", lambda self, learner, snapshot: None)
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


class Published(NamedTuple):
    """A snapshot that the actor got."""

    version: int
    step: int
    chooses: bool | None  # whether the critic chooses among candidates


def recorded(patch: pytest.MonkeyPatch) -> list[Published]:
    """What the actor of a local run gets from now on, in order."""
    found: list[Published] = []
    publish = LocalLink.publish

    def record(self, snapshot, info):
        chooses = snapshot.params.get("critic_chooses")
        found.append(Published(snapshot.version, info["step"], None if chooses is None else bool(chooses)))
        publish(self, snapshot, info)

    patch.setattr(LocalLink, "publish", record)
    return found


def reproducible(run: Path) -> list[dict[str, Any]]:
    """All rows of a run without what time decides."""
    rows = sorted((r for kind in read_metrics(run).values() for r in kind), key=lambda r: (r["wall"], r["kind"]))
    return [{k: v for k, v in r.items() if not k.startswith(TIMED)} for r in rows]


def by_kind(run: Path) -> dict[str, list[dict[str, Any]]]:
    """`reproducible` by kind."""
    out: dict[str, list[dict[str, Any]]] = {}
    for row in reproducible(run):
        out.setdefault(row["kind"], []).append(row)
    return out


def phases(run: Path) -> list[str]:
    return [r["text"].removeprefix("phase: ") for r in by_kind(run)["event"] if r["text"].startswith("phase: ")]


def learner_of(
    config, demos: str | None, run: Path, publish: Publish = lambda snapshot, info: None, *, threaded: bool = False
) -> Learner:
    """A learner on its own, without an actor."""
    spec = robot_spec(config.robot)
    options, folder = RunOptions([demos] if demos else []), open_run(config, spec, str(run))
    return make_learner(config, options, folder, spec, publish=publish, threaded=threaded)


def let_go(learner: Learner) -> None:
    learner.close()
    learner.metrics.close()


def until(learner: Learner, phase: Phase, updates: int = 0, *, busy: bool = False) -> None:
    """Work up to a point of a phase, without an actor; `busy`: there is work all the time."""
    for _ in range(1000):
        if learner.trainer.phase is phase and learner.trainer.phase_updates >= updates:
            return
        assert learner.work() or not busy
    raise AssertionError(f"{learner.trainer.phase} {learner.trainer.phase_updates} instead of {phase} {updates}")


def feed(learner: Learner, rows: Rows) -> None:
    """Hand a learner what it receives, and journals, of an actor; a record None is the end of a session."""
    for number, session, record in rows:
        assert not learner.router.insert_all([Entry(session, record, number + 1)])


def journal_of(config, demos: str, steps: int, name: str = "x") -> Rows:
    """A journal of episodes with at least so many steps: those of the demonstrations, again and again."""
    out: Rows = []
    episodes = load_demos([demos], robot_spec(config.robot)).episodes
    while steps > 0:
        begin, block, end = episodes[len(out) // 3 % len(episodes)]
        of = f"{name}{len(out)}"
        records = begin._replace(episode_id=of), dataclasses.replace(block, episode_id=of), end._replace(episode_id=of)
        out += [(len(out) + i, "actor/s", record) for i, record in enumerate(records)]
        steps -= block.n
    return out


def assert_same_state(a: Learner, b: Learner) -> None:
    """Bit for bit."""
    one, other = host_leaves(a.state), host_leaves(b.state)
    assert one.keys() == other.keys()
    for path in one:
        np.testing.assert_array_equal(one[path], other[path], err_msg=path)
