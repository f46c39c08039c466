"""The actor's end of a learner: what a session needs of it, and what it takes out of a learner's welcome."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from serl_chunk.agents.base import Agent
from serl_chunk.config.compatibility import contract
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.data.prompts import tokens_digest
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.wire.handshake import Welcome
from serl_chunk.types import (
    Amend,
    DataError,
    Grant,
    PolicyOrigin,
    RecordSink,
    RobotSpec,
    SerlChunkError,
    SnapshotSource,
)


class ActorLink(RecordSink, SnapshotSource, Protocol):
    """The actor's end of a learner, over a network or as here in the same process. Nothing blocks but `flush`."""

    @property
    def allowance(self) -> int | None:
        """Steps this session may have recorded in all; None: no limit."""
        return None

    @property
    def steps_recorded(self) -> int: ...

    @property
    def finished(self) -> str | None:
        """Why training is over; None while it is not."""

    @property
    def error(self) -> SerlChunkError | None:
        """What broke the link permanently."""
        return None

    @property
    def away(self) -> float:
        """Seconds since the learner was lost; 0 while it is there."""
        return 0.0

    @property
    def busy(self) -> str:
        """What takes the learner minutes, in which no more steps are allowed; empty otherwise."""
        return ""

    @property
    def unacknowledged(self) -> int:
        """Records that the learner lacks."""
        return 0

    def amend(self, record: Amend) -> None:
        """Send a correction of an episode that has ended."""

    @property
    def grant(self) -> Grant | None:
        """The learner's newest answer to `request_tickets`; see `LearnerLink.grant`."""
        return None

    def request_tickets(self, held: Sequence[str], capacity: int) -> None:
        """See `LearnerLink.request_tickets`."""
        return

    def can_begin(self) -> tuple[bool, str]:
        """Return whether an episode may begin, and the reason where not."""
        return True, ""

    def backlog(self, *, begun: bool) -> str:
        """Describe what waits for the learner; empty where it keeps up. `begun`: an episode is about to begin."""
        return ""

    def flush(self, timeout: float) -> bool:
        """Wait until the learner has every record; False where it has not after `timeout` seconds."""
        return True

    def close(self) -> None:
        """Close it, but not a learner in the same process."""
        return


class RunProgress(NamedTuple):
    """Counts of a run when a session begins, so that the session repeats nothing of it."""

    run: str = ""  # whose snapshots act; empty: those of any run
    episodes: int = 0  # number of the first episode: seeds, exploration and recorded interventions go on from it
    env_steps: int = 0  # count for `learner.random_steps`
    human_ticks: int = 0  # count for the actor's `human_limit`
    episode_prefix: str = ""  # of episode ids, which differ between sessions of a run; empty: the actor's id

    @classmethod
    def of(cls, welcome: Welcome, actor_id: str) -> RunProgress:
        fields = welcome.fields
        so_far = (int(fields["episodes"]), int(fields["env_steps"]), int(fields["human_ticks"]))
        return cls(welcome.run, *so_far, f"{actor_id}-{uuid.uuid4().hex[:8]}")


def open_link(
    config: ExperimentConfig, spec: RobotSpec, agent: Agent, host: str, port: int, actor_id: str, **options: Any
) -> LearnerLink:
    """Return a link to the learner at `host`, with what both must agree on; `options` as of `LearnerLink`."""
    digests = {"base": agent.base_digest, "tokens": tokens_digest(config)}
    agreed = contract(config, spec, agent.network_shape(), **digests)
    return LearnerLink(
        config.transport, host=host, port=port, actor_id=actor_id, contract=agreed, block_steps=config.block_steps,
        **options,
    )  # fmt: skip


def replacement(link: LearnerLink, origin: PolicyOrigin) -> str | None:
    """Describe the learner where its snapshots are no longer of `origin`, else None."""
    if link.run != origin.run:
        return f"the learner is of run {link.run} now, it was of run {origin.run}"
    welcome = link.welcome
    if welcome is not None and welcome.origin != origin:
        now, before = welcome.origin.normaliser, origin.normaliser
        return f"the learner of run {origin.run} has normaliser {now} now, it had {before}"
    return None


def preprocess_of(welcome: Welcome, config: ExperimentConfig, spec: RobotSpec) -> Preprocess:
    """Return an experiment's transforms with the normaliser of a learner's welcome.

    Raises DataError where it is not the announced one.
    """
    preprocess = Preprocess.restored(config, spec, welcome.fields, welcome.arrays)
    if preprocess.digest() != welcome.origin.normaliser:
        raise DataError(
            f"the learner's welcome names normaliser {welcome.origin.normaliser!r} and holds {preprocess.digest()}. "
            "Install the same version of serl-chunk on both machines"
        )
    return preprocess
