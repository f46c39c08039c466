"""`serl-chunk record --ip`: streams the demonstrations of a folder into a running learner."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.data.demos import NoEpisodesError, load_demos, short_digest
from serl_chunk.data.formats.hdf5_io import close_files
from serl_chunk.data.source import sorted_files
from serl_chunk.io import plural
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.wire.handshake import DEMONSTRATIONS, UnreachableError, Welcome
from serl_chunk.types import (
    DECISION_PREFIX,
    HUMAN_DIMS,
    ConfigError,
    DataError,
    Episode,
    Outcome,
    SerlChunkError,
    Source,
    Step,
    StepBlock,
)

logger = logging.getLogger(__name__)

CONNECT_S = 5.0  # seconds that a recording waits for the learner before its first episode
FINISH_S = 30.0  # seconds without progress after which the end of a recording stops waiting for the learner
_LOOK_S = 0.2  # seconds between looks at a link that is away
_QUEUED = 64  # steps that wait for the spool: an episode with images is not in memory twice


class _Demonstration(NamedTuple):
    file: Path
    digest: bytes  # of its numbers, as the learner names it


class DemonstrationStream:
    """Sends every successful demonstration of a folder that the learner lacks, from a thread of its own.

    The files are what is kept: each is sent after it was written, one at a time, and again where the learner does not
    have it. The learner leaves out what it has. Without a learner the stream waits, and the recording goes on.

    `link` is closed with the stream; `where` names the learner in messages.
    """

    def __init__(self, link: LearnerLink, cameras: tuple[str, ...], spec: Any, where: str) -> None:
        self._link, self._cameras, self._spec, self._where = link, cameras, spec, where
        self._wanted: list[_Demonstration] = []
        self._files: list[Path] = []  # not read yet
        self._welcome: Welcome | None = None
        self._held: set[bytes] = set()  # what the learner of `_welcome` has
        self._stopped, self._news = threading.Event(), threading.Event()
        self._moved_at = time.monotonic()  # when the learner last got one
        self._sent = 0
        self._ended = ""  # why nothing more is sent
        self._thread = threading.Thread(target=self._run, name="serl-chunk-demonstrations", daemon=True)

    def start(self, folder: Path) -> None:
        """Send the demonstrations in `folder` from now on; those that are there first.

        Raises RefusedError where the learner runs another experiment, and ConfigError where it takes no demonstrations.
        """
        try:
            self._connected(CONNECT_S)
            logger.info(f"demonstrations are streamed to the learner at {self._where}")
        except UnreachableError:
            logger.warning(
                f"no learner answers at {self._where}: demonstrations are written to {folder}, and streamed once it "
                "answers, or by the next run of this command"
            )
        if folder.is_dir():
            self._files += sorted_files(folder.glob("episode_*.hdf5"))
        self._thread.start()

    def add(self, file: Path) -> None:
        self._files.append(file)
        self._news.set()

    def close(self, *, wait: bool = True) -> bool:
        """Wait for what the learner still lacks, as long as it takes something; return whether it has everything."""
        started = self._thread.ident is not None
        self._moved_at = time.monotonic()
        try:
            while wait and started and self._waits_for_learner():
                time.sleep(0.05)
        finally:
            self._stopped.set()
            self._news.set()
            if started:
                self._thread.join()
            self._link.close()
        if not started:
            return True
        lacks = sum(d.digest not in self._held for d in self._wanted) + len(self._files)
        if lacks:
            why = self._ended or f"the learner at {self._where} does not answer"
            logger.warning(
                f"{plural(self._sent, 'demonstration')} streamed; the learner lacks {lacks} of those on disk ({why}). "
                "Nothing is lost: run the same command again once it answers, or give the folder as --demo_path"
            )
        elif self._wanted:
            logger.info(f"{plural(self._sent, 'demonstration')} streamed; the learner has all {len(self._wanted)}")
        return not lacks

    def _waits_for_learner(self) -> bool:
        lacks = bool(self._files) or any(d.digest not in self._held for d in self._wanted)
        waited = time.monotonic() - self._moved_at
        there = self._welcome is not None and self._link.away < CONNECT_S
        return lacks and not self._ended and there and waited < FINISH_S

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._news.clear()
                try:
                    welcome = self._connected(_LOOK_S)
                except UnreachableError:
                    continue
                while self._files:
                    file = self._files[0]
                    if (episode := self._load(file)) is not None:
                        self._wanted.append(_Demonstration(file, short_digest(episode)))
                    self._files.pop(0)  # now, as it counts as lacking until then
                lacking = next((d for d in self._wanted if d.digest not in self._held), None)
                if lacking is None:
                    self._news.wait(_LOOK_S)
                elif not self._send(lacking, welcome):
                    self._stopped.wait(_LOOK_S)
        except SerlChunkError as error:
            self._end(str(error))
        except BaseException as error:
            self._end(f"{type(error).__name__}: {error}")
            raise

    def _end(self, why: str) -> None:
        self._ended = why
        logger.error(f"demonstrations are not streamed any more, and go on being written: {why}")

    def _connected(self, timeout: float) -> Welcome:
        """Return the current welcome. Raises UnreachableError, and what ends the link."""
        if self._link.error is not None:
            raise self._link.error
        if self._welcome is None:
            self._link.connect(timeout, on_waiting=lambda why: None)
        welcome = self._link.welcome
        if welcome is None:  # another run answers
            self._stopped.wait(timeout)
            raise UnreachableError("the learner was replaced")
        if welcome is not self._welcome:
            if DEMONSTRATIONS not in welcome.arrays:
                raise ConfigError(
                    f"the learner at {self._where} takes no demonstrations. Install the same version of serl-chunk on "
                    "both machines, or leave --ip out"
                )
            self._held = {digest.tobytes() for digest in welcome.arrays[DEMONSTRATIONS]}
            self._welcome = welcome
        return welcome

    def _load(self, file: Path) -> Episode | None:
        """Read a demonstration as `--demo_path` does; None for a failure, and for a file that cannot be read."""
        try:
            episode = load_demos([file], self._spec, cameras=self._cameras).episodes[0]
        except NoEpisodesError:  # removed or discarded since
            return None
        except SerlChunkError as error:
            logger.warning(f"not streamed: {error}")
            return None
        return episode if episode.end.outcome is Outcome.SUCCESS else None

    def _send(self, demonstration: _Demonstration, welcome: Welcome) -> bool:
        """Send one demonstration and wait until the learner has it; False where that was not possible."""
        if self._link.finished is not None:
            raise DataError(f"the learner takes nothing more: {self._link.finished}")
        if not self._link.can_begin()[0]:
            return False
        file, digest = demonstration
        episode = self._load(file)
        if episode is None:
            self._wanted.remove(demonstration)
            return True
        try:
            self._hand_over(episode, digest, welcome.run)
        finally:
            close_files(file)
        while not self._link.flush(_LOOK_S):
            if self._stopped.is_set() or self._link.welcome is not welcome:
                return False
        if self._link.welcome is welcome:  # else what it has is in the next one
            self._held.add(digest)
            self._sent += 1
            self._moved_at = time.monotonic()
            logger.info(f"{file.name} is at the learner")
        return True

    def _hand_over(self, episode: Episode, digest: bytes, run: str) -> None:
        begin, steps, end = episode
        # The content is in the name: several folders may count their episodes from 0.
        name = f"{begin.episode_id}-{digest.hex()[:12]}"
        self._link.act_for(run)
        self._link.begin(begin._replace(episode_id=name, demonstration=True))
        for step in steps_of(steps):
            self._link.step(step)
            while step.tick % 16 == 15 and self._link.stats()["queued"] > _QUEUED and not self._stopped.wait(0.002):
                pass
        final = end.final_observation
        if final is not None:
            final = {key: np.asarray(value) for key, value in final.items()}
        self._link.end(end._replace(episode_id=name, final_observation=final))


def steps_of(block: StepBlock) -> Iterator[Step]:
    """Yield the steps of a whole episode without repeated frames: the inverse of `StepBlock.from_steps`."""
    at = {key: {int(i): k for k, i in enumerate(rows.index)} for key, rows in block.sparse.items()}
    for i in range(block.n):
        there = {key: block.sparse[key].values[index[i]] for key, index in at.items() if i in index}
        decision = {k.removeprefix(DECISION_PREFIX): v for k, v in there.items() if k.startswith(DECISION_PREFIX)}
        dims = there.get(HUMAN_DIMS)
        yield Step(
            block.first_tick + i, {key: np.asarray(value) for key, value in block.observation_at(i).items()},
            block.action[i], float(block.reward[i]), Source(int(block.source[i])), int(block.decision_tick[i]),
            int(block.policy_version[i]), float(block.stamp[i]),
            decision={k: np.asarray(v) for k, v in decision.items()} or None, policy_age=float(block.policy_age[i]),
            lost_ticks=int(block.lost_ticks[i]), human_dims=None if dims is None else np.asarray(dims, np.bool_),
        )  # fmt: skip
