"""Machines as they are: an actor on another network, a disk that is full. Need root; slow."""

import contextlib
import os
import shutil
import signal
import subprocess

import pytest
from processes import PATIENCE, actor_totals, checkpoints, learner_totals

from serl_chunk.learner.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(4 * PATIENCE),
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root"),
]
HERE, THERE = "198.18.77.1", "198.18.77.2"  # of the range that is set aside for tests of networks (RFC 2544)


def command(*words: str) -> None:
    """Run a system command; skips the test with what it says where this machine does not permit it."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs the command {words[0]}")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def namespace():
    """The name of a network namespace whose only way out is a cable from THERE to HERE."""
    name = f"serl-chunk-{os.getpid()}"
    near, far = f"sc{os.getpid()}a"[:15], f"sc{os.getpid()}b"[:15]
    with contextlib.ExitStack() as stack:
        command("ip", "netns", "add", name)
        stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=True)
        command("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        stack.callback(subprocess.run, ["ip", "link", "delete", near], check=True)
        command("ip", "link", "set", far, "netns", name)
        command("ip", "address", "add", f"{HERE}/30", "dev", near)
        command("ip", "link", "set", near, "up")
        command("ip", "-n", name, "address", "add", f"{THERE}/30", "dev", far)
        command("ip", "-n", name, "link", "set", far, "up")
        yield name


def test_an_actor_in_another_network(processes, tmp_path, namespace):
    run = tmp_path / "run"
    learner = processes.learner(run, "--bind", HERE, "--insecure")
    actor = processes.actor("--ip", HERE, prefix=("ip", "netns", "exec", namespace))
    episodes, steps = actor_totals(actor.ends())
    output = learner.ends()
    assert f"WARNING: --insecure: everybody who reaches {HERE}:{processes.port}" in output
    assert learner_totals(output) == (40, steps)
    assert len(read_metrics(run)["episode"]) == episodes > 2


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file) -> None:
    """Take all the room there is."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as f:
        while f.write(b"\x00" * 4096):
            pass


def test_a_disk_that_stays_full_ends_the_learner_with_its_reasons(processes, small_disk):
    run = small_disk / "run"
    learner = processes.learner(run, learner__max_steps=1_000_000, transport__journal=False)
    actor = processes.actor(learner__max_steps=1_000_000)
    learner.until(lambda: max(checkpoints(run), default=0) >= 20, "no checkpoint of the training appeared")
    fill(small_disk / "filler")
    learner.says("could not be written")
    learner.signal(signal.SIGTERM)
    output = learner.ends(1)
    assert "WARNING: the report could not be written" in output
    assert "checkpoints could not be written; newest: " in output
    assert actor_totals(actor.ends())[1] == learner_totals(output)[1]


def test_a_full_disk_costs_checkpoints_and_not_the_run(processes, small_disk):
    run = small_disk / "run"
    # Rarely published and few kept: the disk is filled by this test alone.
    settings = {"learner__max_steps": 1_000_000, "learner__keep_checkpoints": 3, "learner__checkpoint_period": 100}
    learner = processes.learner(run, transport__journal=False, **settings)
    actor = processes.actor(**settings)
    learner.until(lambda: max(checkpoints(run), default=0) >= 100, "no checkpoint of the training appeared")
    fill(small_disk / "filler")
    learner.says("Training goes on, and the next checkpoint_period tries again; if the disk is full, free some space.")
    assert f"could not be written to {run / 'checkpoints'}" in learner.output
    full = max(checkpoints(run))
    (small_disk / "filler").unlink()
    learner.until(lambda: max(checkpoints(run)) > full, "no checkpoint after the disk had room again")
    learner.signal(signal.SIGTERM)
    output = learner.ends(1)  # the run is whole, but whoever looks at the status alone is to know
    assert "checkpoints could not be written; newest: " in output
    updates, steps = learner_totals(output)
    assert checkpoints(run)[-1] == updates
    assert actor_totals(actor.ends())[1] == steps
