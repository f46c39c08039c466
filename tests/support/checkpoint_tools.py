"""Small checkpoints for tests, and how to damage one."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.runs.checkpoints import CheckpointStore, Restored

NORMALISER = {"state_mean": np.arange(3, dtype=np.float32), "joint": np.array([0, -1], np.int32)}


def state_of(number: int) -> dict:
    """A small state whose every leaf tells which it is."""
    return {
        "rng": jax.random.key(number),
        "updates": jnp.int32(number),
        "net": {"kernel": jnp.full((64, 8), number, jnp.float32), "bias": jnp.arange(8, dtype=jnp.float32) * number},
        "empty": {},
    }


def save(store: CheckpointStore, step: int, **more: int) -> bool:
    """Checkpoint `step`, complete on return; `more`: further fields of its meta data."""
    policy, meta = {"policy/kernel": np.full(4, step, np.float32)}, {"n": step, "updates": step, **more}
    store.save(step, state_of(step), policy, NORMALISER, meta)
    return store.wait()


def saved_run(folder: Path, steps: list[int]) -> Path:
    store = CheckpointStore(folder)
    assert all(save(store, step) for step in steps)
    store.close()
    return folder


def restore(run: Path) -> Restored | None:
    """The newest state that verifies."""
    return CheckpointStore(run).restore_state(jax.eval_shape(lambda: state_of(0)))


def flip_a_byte(step: Path, item: str) -> None:
    file = max((p for p in (step / item).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    for i in range(len(data) // 2, len(data) // 2 + 8):
        data[i] ^= 0xFF
    file.write_bytes(bytes(data))
