"""What learners of the point robot share: demonstrations, agents that are compiled once, and what was published."""

from __future__ import annotations

from typing import NamedTuple

import compiles
import pytest
from learner_tools import quick_agents
from point_robot import record_demos

from serl_chunk.cli.local import LocalLink

few_optimisations = compiles.few_optimisations
quick = pytest.fixture(quick_agents)


class Published(NamedTuple):
    """A snapshot that the actor got."""

    version: int
    step: int
    chooses: bool | None  # whether the critic chooses among candidates


@pytest.fixture(scope="session")
def demos(tmp_path_factory: pytest.TempPathFactory) -> str:
    return record_demos(tmp_path_factory.mktemp("demos"), 12)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[Published]:
    """In the order in which the actor got them."""
    found: list[Published] = []
    publish = LocalLink.publish

    def record(self, snapshot, info):
        chooses = snapshot.params.get("critic_chooses")
        found.append(Published(snapshot.version, info["step"], None if chooses is None else bool(chooses)))
        publish(self, snapshot, info)

    monkeypatch.setattr(LocalLink, "publish", record)
    return found
