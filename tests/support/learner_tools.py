"""Learners of the point robot for tests: without sockets, with agents that are compiled once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import builder_of
from serl_chunk.agents.spec import agent_spec
from serl_chunk.cli import learner as learner_command
from serl_chunk.cli.learner import make_learner
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.publisher import Publish
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.folder import open_run
from serl_chunk.runs.metrics import read_metrics

TIMED = ("wall", "rates/", "timer/", "wait/", "seconds")


@functools.cache
def agent_of(config: Any, spec: Any) -> Agent:
    """The agent, the same one for the same configuration."""
    return builder_of(config)(config, spec)


def quick_agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Agents hold no state, so runs of one configuration share one, and its compilations."""
    monkeypatch.setattr(learner_command, "make_agent", lambda c, s: agent_of(c.agent, agent_spec(c, s)))
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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


def learner_of(config, demos: str, run: Path, publish: Publish = lambda snapshot, info: None) -> Learner:
    """A learner on its own, without an actor."""
    spec = robot_spec(config.robot)
    return make_learner(
        config, RunOptions([demos]), open_run(config, spec, str(run)), spec,
        publish=publish, threaded=False,
    )  # fmt: skip


def let_go(learner: Learner) -> None:
    learner.close()
    learner.metrics.close()
