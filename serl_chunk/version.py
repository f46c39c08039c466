"""Version and commit of the package, as run folders, checkpoints and `--version` show them."""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
from pathlib import Path
from typing import NamedTuple

_GIT_TIMEOUT = 5.0  # seconds


class VersionInfo(NamedTuple):
    """A version of the package. `commit` is empty where the package does not run from a git checkout."""

    version: str
    commit: str  # 12 hex digits, with `-dirty` behind them where tracked files were changed

    @property
    def text(self) -> str:
        """`serl_chunk 0.1.0 (commit 4b0ad4412345)`."""
        return f"serl_chunk {self.version}" + (f" (commit {self.commit})" if self.commit else "")


@functools.cache
def version_info() -> VersionInfo:
    """Return the version of the installed package, and the commit of its checkout."""
    try:
        version = importlib.metadata.version("serl_chunk")
    except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
        version = "unknown"
    return VersionInfo(version, _commit(Path(__file__).resolve().parents[1]))


def _commit(root: Path) -> str:
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout that it refuses to read
        return ""
    return done.stdout.strip()
