"""A base with a source is in memory once: in no state that is made, donated, published or saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE, LEAVES = 3_000_000_000, 300  # bytes; peaks of the same run differ by 0.1 GB

RUN = f"""
import gc, re, sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
from learner_tools import learner_of, let_go
from small_bases import FROZEN, experiment, use_small_backbones, write_weights

from serl_chunk.agents.vision import Vision
from serl_chunk.cli.record import run_record

folder, more = Path(sys.argv[1]), int(sys.argv[2])
patch = pytest.MonkeyPatch()
use_small_backbones(patch)
small = Vision.base
if more:  # leaves that nothing reads: they are loaded, digested and passed on as the others are
    leaves = lambda: {{str(i): jnp.ones(more // 4 // {LEAVES}, jnp.float32) for i in range({LEAVES})}}
    patch.setattr(Vision, "base", lambda self, key, place: small(self, key, place) | {{"more": leaves()}})

config = experiment(replace(FROZEN, weights=write_weights(folder / "weights.npz")))
config = replace(config, robot=replace(config.robot, max_episode_steps=240))
config = replace(config, replay=replace(config.replay, image_capacity=500))
config = replace(config, agent=replace(config.agent, critic=replace(config.agent.critic, hidden=(512, 512))))
config = replace(config, learner=replace(config.learner, offline_steps=6, online_steps=0))
run_record(config, 2, str(folder / "demos"), policy="scripted", noise=None, cameras=("top",))
for resumed in (False, True):
    learner = learner_of(config, str(folder / "demos"), folder / "run")
    while learner.work() and not learner.trainer.done:
        pass
    assert learner.updates == 6
    learner.checkpoint()
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(learner.state) if hasattr(leaf, "nbytes"))
    let_go(learner)
    del learner
    gc.collect()
own = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())  # ru_maxrss has the parent's at first
print(int(own[1]) * 1024, state)
"""


def peak(folder: Path, base: int) -> tuple[int, int]:
    """Largest resident memory of a learner with a base of so many bytes, and the bytes of its state."""
    folder.mkdir()
    command = [sys.executable, "-c", RUN, str(folder), str(base)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    resident, state = map(int, done.stdout.split()[-2:])
    return resident, state


@pytest.mark.slow
def test_a_base_is_held_once_from_the_start_to_a_resumed_run(tmp_path):
    without, state = peak(tmp_path / "without", 0)
    with_base, same = peak(tmp_path / "with", BASE)
    assert state == same
    more = with_base - without
    assert 0.8 * BASE < more < 1.05 * BASE + 0.3 * state, (with_base, without, state)
