"""Episodes by tickets: each begun once and under its version, withdrawn ones dropped, at any number of robots."""

from __future__ import annotations

import dataclasses
import re
from unittest.mock import Mock

import numpy as np
import pytest
from actor_helpers import LineEnv, LineOfTasks, NoisyAgent, identity, make_config
from fake_link import FakeLink
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.actor import service
from serl_chunk.actor.service import ActorService
from serl_chunk.actor.tickets import Tickets
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.types import Begin, End, Grant, Snapshot, Step, Ticket

TASKS = LineOfTasks.tasks


def ticket(slot: int, version: int = 1) -> Ticket:
    return Ticket(version, 0, slot, 0, TASKS[slot % 3 == 0], f"seed-{slot}", version, 100 + slot, 60.0)


@dataclasses.dataclass(frozen=True)
class Iterating(BcConfig):
    iterates = True


class Granting(FakeLink):
    """Grants the tickets of two iterations; from the first one `withdrawn` go, once it lacks nothing else."""

    def __init__(self, withdrawn: int) -> None:
        super().__init__()
        self.tickets = {1: [ticket(i) for i in range(6)], 2: [ticket(i, 2) for i in range(5)]}
        self.version, self._withdrawn, self.requests = 1, withdrawn, []

    def latest(self):
        return Snapshot(self.version, {"bias": np.float32(0)})

    def request_tickets(self, held, capacity):
        self.requests.append((tuple(held), capacity))

    @property
    def grant(self):
        ended = {r.ticket for r in self.records if isinstance(r, Begin)}
        if self.version == 1 and len(ended) >= 6 - self._withdrawn:
            self.version = 2
        if ended >= {t.id for t in self.tickets[2]}:
            self.finished = "training is complete"
        left = [t for t in self.tickets[self.version] if t.id not in ended]
        return Grant(tuple(left[: self.requests[-1][1] if self.requests else 0]))


@pytest.mark.parametrize(("n_envs", "withdrawn"), [(1, 0), (3, 0), (3, 2), (8, 1)])
def test_each_ticket_is_run_once_under_its_version_and_a_withdrawn_one_leaves_no_record(
    n_envs, withdrawn, monkeypatch, caplog
):
    caplog.set_level("INFO", "serl_chunk.actor")
    link, config = Granting(withdrawn), make_config(horizon=8, execute=3, actor=ActorConfig())
    for name, value in (("POLL_SECONDS", 0), ("STATUS_SECONDS", 0), ("RECENT", 2)):
        monkeypatch.setattr(service, name, value)
    monkeypatch.setattr(service, "make_env", lambda *_, **__: LineOfTasks(length=9))
    config = dataclasses.replace(config, agent=Iterating())
    with ActorService(config, link=link, agent=NoisyAgent(8), n_envs=n_envs, report_every=1) as actor:
        summary = actor.run(identity(8))
    counted = [*map(int, re.findall(r"of the last (\d+)", caplog.text))]
    assert counted == [min(k, 2) * n_envs for k in range(1, summary.episodes // n_envs + 1)]
    begins = [record for record in link.records if isinstance(record, Begin)]
    assert len({b.ticket for b in begins}) == len(begins) >= 11 - withdrawn
    slots = [int(b.ticket.split(".")[2]) for b in begins]
    assert [(b.init_state, b.task) for b in begins] == [(f"seed-{slot}", TASKS[slot % 3 == 0]) for slot in slots]
    versions = {}
    for record in link.records:
        if isinstance(record, Begin):
            name = record.ticket
        elif isinstance(record, Step):
            versions.setdefault(name, set()).add(record.policy_version)
        elif isinstance(record, End) and name in versions:
            assert versions[name] == {int(name.split(".")[0])}


def test_a_wait_for_a_ticket_names_a_learner_that_is_away(monkeypatch, caplog):
    class Away(FakeLink):
        """It has not taken in the one episode that it granted."""

        grant, request_tickets = Grant((ticket(0),)), Mock()

        def backlog(self, *, begun):
            return "learner away for 9 s" if self.records else ""

    link, config = Away(), dataclasses.replace(make_config(horizon=8, actor=ActorConfig()), agent=Iterating())
    stop = Mock(is_set=lambda: "waiting" in caplog.text, wait=lambda _: None)
    monkeypatch.setattr(service, "LOG_SECONDS", 0)
    caplog.set_level("INFO", "serl_chunk.actor")
    with ActorService(config, env=LineEnv(length=9), link=link, agent=NoisyAgent(8), stop=stop) as actor:
        assert actor.run(identity(8)).episodes == 1
    assert re.search(r"waiting for a ticket: .*last episode.*; learner away for 9 s", caplog.text)


class Lossy:
    """A learner's end that loses requests and answers."""

    grant: Grant | None = None

    def __init__(self) -> None:
        self.newest: tuple[list[str], int] = ([], 0)

    def request_tickets(self, held, capacity):
        self.newest = (list(held), capacity)


@given(st.lists(st.sampled_from(["answer", "begin", "end", "settle", "lose"]), max_size=60), st.integers(1, 5))
def test_no_ticket_is_begun_twice_whatever_is_lost(events, robots):
    link = Lossy()
    tickets, given, open_, settled, begun = Tickets(link, robots), 0, [], set(), []
    for event in events:
        if event == "answer":  # the learner keeps what it granted until it is settled, and fills up
            kept = [] if link.grant is None else [t for t in link.grant.tickets if t.id not in settled]
            while len(kept) < link.newest[1]:
                kept.append(ticket(given))
                given += 1
            link.grant = Grant(tuple(kept))
        elif event == "end" and open_:
            open_.pop(0)
        elif event == "settle":
            settled |= {t.id for t in begun if t.id not in open_}
        tickets.update(open_, 1)
        if event == "begin" and len(open_) < robots and (new := tickets.begin(1)) is not None:
            assert new not in begun
            begun.append(new)
            open_.append(new.id)
        assert set(open_) <= set(link.newest[0]) | ({new.id} if event == "begin" and open_ else set())
        assert link.newest[1] >= robots
