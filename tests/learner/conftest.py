"""What learners of the point robot share: demonstrations, and agents that are compiled once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from learner_tools import Published, quick_agent, quick_agents, recorded
from point_robot import experiment, record_demos

from serl_chunk.actor.service import ActorSummary
from serl_chunk.cli.local import train_local
from serl_chunk.learner import building
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.learner import Learner

quick = pytest.fixture(quick_agents)


@pytest.fixture(scope="session")
def demos(tmp_path_factory: pytest.TempPathFactory) -> str:
    return record_demos(tmp_path_factory.mktemp("demos"), 12)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[Published]:
    return recorded(monkeypatch)


class Finished(NamedTuple):
    """A run that is over: its folder, its learner, its actor's summary, and what the actor got."""

    run: Path
    learner: Learner
    summary: ActorSummary
    published: list[Published]


@pytest.fixture(scope="module")
def once(demos: str, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run, config = tmp_path_factory.mktemp("finished") / "run", experiment(critic_pretrain_steps=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_agent", quick_agent)
        found = recorded(patch)
        return Finished(run, *train_local(config, RunOptions([demos], str(run))), found)


@pytest.fixture
def finished(once: Finished, tmp_path: Path) -> Finished:
    """With a copy of its folder."""
    return once._replace(run=Path(shutil.copytree(once.run, tmp_path / "run")))
