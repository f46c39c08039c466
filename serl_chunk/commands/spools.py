"""Where an actor keeps what the learner does not have yet."""

from __future__ import annotations

import os
import re
from pathlib import Path

from serl_chunk.commands.checks import Check
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport import files
from serl_chunk.transport.disk_spool import DiskSpool
from serl_chunk.transport.spool import Spool
from serl_chunk.transport.stats import in_words
from serl_chunk.transport.wire import Limits
from serl_chunk.types import ConfigError, DataError, RobotSpec

DEFAULT_ROOT = Path("runs") / "spool"
_MESSAGE_BYTES = 2048  # of a step beside its arrays


class SpoolFolders:
    """The spools of one actor, a folder for each run under `root/<experiment>/<actor id>`.

    Raises ConfigError for an actor id that is no folder's name.
    """

    def __init__(self, config: ExperimentConfig, actor_id: str, root: Path | None = None) -> None:
        if not re.fullmatch(r"[\w.-]{1,100}", actor_id) or actor_id.startswith("."):
            raise ConfigError(
                f"--actor_id={actor_id!r} names a folder too: use 1 to 100 letters, digits, '_', '-' and '.', and "
                "begin with none of the last"
            )
        self.folder = (root or DEFAULT_ROOT) / config.name / actor_id
        self._transport: TransportConfig = config.transport
        self._run = ""

    def open(self, run: str) -> Spool:
        """The spool of a run; what an actor before this one left in it is sent first."""
        if not re.fullmatch(r"[\w-]{1,64}", run):  # it came over the network and becomes a folder
            raise DataError(f"the learner calls its run {run!r}, which cannot name a folder")
        self._run = run
        t = self._transport
        return DiskSpool(self.folder / run, Limits(t.max_message_bytes, t.max_arrays), sync_interval=t.sync_interval)

    def left_behind(self) -> list[tuple[Path, int]]:
        """Spools of other runs that hold something, with their bytes."""
        found = []
        for folder in sorted(self.folder.glob("*")) if self.folder.is_dir() else []:
            nbytes = sum(f.stat().st_size for f in folder.glob("*.journal"))
            if folder.name != self._run and nbytes:
                found.append((folder, nbytes))
        return found


def largest_episode_bytes(spec: RobotSpec, config: ExperimentConfig) -> int:
    """Bytes one episode may take in a spool: the longest, with a frame of every used camera on every tick."""
    images = sum(c.height * c.width * 3 for c in map(spec.camera, config.agent.image_keys))
    return spec.max_episode_steps * (_MESSAGE_BYTES + 4 * (spec.state_dim + spec.action_dim) + images)


def check_spool(config: ExperimentConfig, spec: RobotSpec, actor_id: str, root: str | None) -> Check:
    """Whether an actor could keep its records here; `root` is its `--spool_path`."""
    try:
        spools = SpoolFolders(config, actor_id, None if root is None else Path(root).expanduser())
    except ConfigError as e:
        return Check("spool", "FAIL", str(e), "choose another --actor_id")
    folder, size, episode = spools.folder, config.transport.spool_bytes, largest_episode_bytes(spec, config)
    disk = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))
    free = files.free_bytes(disk)
    figures = {"spool_free_bytes": free, "largest_episode_bytes": episode, "spool_bytes": size}
    said = (
        f"{folder}: {in_words(free)} free; an episode may take {in_words(episode)}, all that is kept {in_words(size)}"
    )
    if episode > size:
        remedy = f"--config.transport.spool_bytes={2 * episode} on the actor, or shorter episodes, or smaller cameras"
        return Check("spool", "FAIL", said, remedy, figures)
    if not os.access(disk, os.W_OK | os.X_OK):
        remedy = "start the actor where this user may write, or give another --spool_path"
        return Check("spool", "FAIL", f"{folder}: {disk} cannot be written", remedy, figures)
    if free < 2 * episode:  # as Outbox.no_room has it
        remedy = "make room, or give a --spool_path on another disk: no episode would begin"
        return Check("spool", "FAIL", said, remedy, figures)
    if free < size:
        remedy = "make room, or give a --spool_path on another disk: a long absence of the learner would fill it"
        return Check("spool", "warning", said, remedy, figures)
    return Check("spool", "ok", said, figures=figures)
