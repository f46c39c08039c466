"""Networks and disks of their own for a test, made with the system's commands. Needs root, else the test is skipped."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE, THERE = "198.18.77.1", "198.18.77.2"  # of the range that is set aside for tests of networks (RFC 2544)

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")


def command(*words: str) -> None:
    """Run a system command; skips the test with what it says where this machine does not permit it."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs the command {words[0]}")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")


class Cable:
    """What joins a network namespace to this machine, from THERE to HERE."""

    def __init__(self, namespace: str, near: str, far: str) -> None:
        self.prefix = ("ip", "netns", "exec", namespace)  # of a command that runs there
        self._ends = (("ip", "-n", namespace, "link"), far), (("ip", "link"), near)

    def cut(self) -> None:
        """Nothing passes, and neither side is notified."""
        for words, device in self._ends:
            command(*words, "set", device, "down")

    def mend(self) -> None:
        """Join it again."""
        for words, device in self._ends:
            command(*words, "set", device, "up")


@contextlib.contextmanager
def cable() -> Iterator[Cable]:
    """A network namespace whose only way out is a cable."""
    name = f"serl-chunk-{os.getpid()}"
    near, far = f"sc{os.getpid()}a"[:15], f"sc{os.getpid()}b"[:15]
    with contextlib.ExitStack() as stack:
        command("ip", "netns", "add", name)
        stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=True)
        command("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        stack.callback(subprocess.run, ["ip", "link", "delete", near], check=True)
        command("ip", "link", "set", far, "netns", name)
        command("ip", "address", "add", f"{HERE}/30", "dev", near)
        command("ip", "-n", name, "address", "add", f"{THERE}/30", "dev", far)
        made = Cable(name, near, far)
        made.mend()
        yield made


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "24m") -> Iterator[Path]:
    """A file system of a few megabytes at `folder`."""
    folder.mkdir()
    command("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file: Path) -> None:
    """Take all the room there is."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as f:
        while f.write(b"\x00" * 4096):
            pass
