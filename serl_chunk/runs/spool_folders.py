"""Folders of records that an actor keeps until the learner has them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.transport.storage.journal import DAMAGED, SUFFIX
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.types import ConfigError, DataError, RobotSpec
from serl_chunk_robot.wire.codec import Limits

DEFAULT_ROOT = Path("runs") / "spool"
_MESSAGE_BYTES = 2048  # of a step beside its arrays


class SpoolFolders:
    """The spools of one actor, `root/<experiment>/<actor id>/<run>`; raises ConfigError for an unsuitable actor id."""

    def __init__(self, config: ExperimentConfig, actor_id: str, root: Path | None = None) -> None:
        if not re.fullmatch(r"[\w.-]{1,100}", actor_id) or actor_id.startswith("."):
            valid = "1 to 100 letters, digits, '_', '-' and '.', not with '.' first"
            raise ConfigError(f"cannot name a folder, got {actor_id!r}. Use {valid}.", parameter="actor_id")
        self.folder = (root or DEFAULT_ROOT) / config.name / actor_id
        self._transport, self._run = config.transport, ""

    def open(self, run: str) -> Spool:
        """Open the spool of a run, whose content is sent first; raises ConfigError where another actor has it."""
        if not re.fullmatch(r"[\w-]{1,64}", run):  # it came over the network and becomes a folder
            raise DataError(f"the learner calls its run {run!r}, which cannot name a folder")
        self._run, t = run, self._transport
        try:
            return Spool(self.folder / run, Limits(t.max_message_bytes, t.max_arrays), sync_interval=t.sync_interval)
        except ConfigError as e:
            text = f"an actor {self.folder.name!r} runs already: {e}. Stop it, or give this one another name."
            raise ConfigError(text, parameter="actor_id") from e

    def left_behind(self) -> list[tuple[Path, int]]:
        """Return the spools of other runs that hold something, with their bytes."""
        found = []
        for folder in sorted(self.folder.glob("*")) if self.folder.is_dir() else []:
            # Files of the open spool go while they are counted; those moved aside wait for no learner.
            if folder.name == self._run or folder.name.endswith(DAMAGED):
                continue
            nbytes = 0
            for file in folder.glob(f"*{SUFFIX}"):
                with contextlib.suppress(FileNotFoundError):  # another process of this actor id may have it open
                    nbytes += file.stat().st_size
            if nbytes:
                found.append((folder, nbytes))
        return found


def largest_episode_bytes(spec: RobotSpec, config: ExperimentConfig, cameras: Iterable[str] = ()) -> int:
    """Return the most bytes of one episode in a spool: the longest, with a frame of every used camera on every tick.

    `cameras`: recorded in addition to those of the agent.
    """
    images = sum(c.height * c.width * 3 for c in map(spec.camera, {*config.agent.image_keys, *cameras}))
    return spec.max_episode_steps * (_MESSAGE_BYTES + 4 * (spec.state_dim + spec.action_dim) + images)
