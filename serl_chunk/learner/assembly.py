"""Joins the records of a session's episodes, as they arrive, into whole episodes."""

from __future__ import annotations

import dataclasses

from serl_chunk.runs.episodes import assembled
from serl_chunk.types import Begin, DataError, End, Episode, StepBlock
from serl_chunk_robot.wire.codec import WireError


@dataclasses.dataclass
class OpenEpisode:
    """An episode whose end has not come."""

    begin: Begin
    blocks: list[StepBlock] = dataclasses.field(default_factory=list)
    length: int = 0  # steps


class EpisodeAssembler:
    """Keeps the records of each session's open episode until its end. For one thread.

    Args:
        name: of an episode, in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: dict[str, OpenEpisode] = {}  # by session

    def insert(self, session: str, record: Begin | StepBlock | End) -> Episode | None:
        """Take the next record; return the episode that became complete with it.

        One of an episode that did not begin here is left out. Raises DataError where records are missing.
        """
        if isinstance(record, Begin):
            self._open[session] = OpenEpisode(record)  # the end of one before will never come
            return None
        opened = self._open.get(session)
        if opened is None or opened.begin.episode_id != record.episode_id:
            return None
        if isinstance(record, StepBlock):
            if record.first_tick != opened.length:
                raise DataError(
                    f"{self._name} {record.episode_id}: steps from tick {record.first_tick} on arrived, expected tick "
                    f"{opened.length}"
                )
            opened.blocks.append(record)
            opened.length += record.n
            return None
        del self._open[session]
        if not opened.length or record.length != opened.length:
            raise DataError(
                f"{self._name} {record.episode_id} ended with {record.length} steps, {opened.length} arrived"
            )
        try:
            return assembled(opened.begin, opened.blocks, record)
        except WireError as error:
            raise DataError(f"{self._name} {record.episode_id}: {error}") from error

    def close(self, session: str) -> OpenEpisode | None:
        """Drop the open episode of a session, whose end will never come; return it."""
        return self._open.pop(session, None)
