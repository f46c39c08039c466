"""Checkpoints of a run: the agent's state, the policy alone, and what a resume must know. Only orbax user.

It lives beside the agents because the learner writes checkpoints and the actor evaluates them, and the two
never import each other. Every leaf is saved under its path with a checksum, and these with what else a resume must
know under a checksum of their own, so that a restore names what is missing, misshapen or damaged.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from serl_chunk.types import SerlChunkError

Flat = dict[str, np.ndarray]


class CheckpointError(SerlChunkError):
    """No usable checkpoint, or one that does not fit."""


class PolicyCheckpoint(NamedTuple):
    """What evaluation needs."""

    step: int
    params: Flat
    normaliser: Flat
    meta: dict[str, Any]


class Restored(NamedTuple):
    """What a resume needs."""

    step: int
    state: Any
    meta: dict[str, Any]
    normaliser: Flat


def host_leaves(tree: Any) -> Flat:
    """`path -> array`, copied to the host (a view would alias memory that the next update donates)."""
    out = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        out[jax.tree_util.keystr(path)] = np.array(leaf)
    return out


def _checksums(flat: Flat) -> dict[str, int]:
    return {k: zlib.crc32(np.ascontiguousarray(v).tobytes()) for k, v in flat.items()}


def _seal(meta: dict[str, Any]) -> dict[str, Any]:
    return {"content": meta, "crc32": _text_checksum(meta)}


def _unseal(record: Any) -> dict[str, Any]:
    """The inverse of `_seal`; raises ValueError where any value or key changed."""
    if isinstance(record, dict) and set(record) == {"content", "crc32"}:
        if record["crc32"] != _text_checksum(record["content"]):
            raise ValueError("its checksum differs")
        return record["content"]
    if isinstance(record, dict) and "checksums" in record:  # written before meta had a checksum of its own
        return record
    raise ValueError("it has no checksums")


def _text_checksum(meta: Any) -> int:
    """Of the JSON text in one canonical form, because what is read back is not the dictionary that was written."""
    return zlib.crc32(json.dumps(json.loads(json.dumps(meta)), sort_keys=True).encode())


class CheckpointStore:
    """`<run>/checkpoints/<step>/`, newest `keep` kept, written asynchronously and atomically."""

    def __init__(self, run_dir: Path, *, keep: int = 20, say: Callable[[str], None] = print) -> None:
        self.run_dir = Path(run_dir).absolute()
        self._dir = self.run_dir / "checkpoints"
        self._say = say
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._writing = 0  # the step whose write is or was under way
        self.failed_saves = 0

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._manager = ocp.CheckpointManager(
                self._dir,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=self._keep,
                    create=True,
                    enable_async_checkpointing=True,
                    cleanup_tmp_directories=True,  # a killed learner's half checkpoint; the run's lock says it is gone
                ),
            )
        return self._manager

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending (orbax renames a folder to its step when it is complete)."""
        if not self._dir.is_dir():
            return []
        return sorted(int(p.name) for p in self._dir.iterdir() if p.name.isdigit())

    def save(self, step: int, state: Any, policy: Flat, normaliser: Flat, meta: Mapping[str, Any]) -> bool:
        """Copy to the host and write in the background; False (said, counted) where writing failed.

        A full disk must not end a training run whose data is still in memory: the failure is reported, and
        the next period tries again.
        """
        leaves = host_leaves(state)
        items = {"state": leaves, "policy": policy, "normaliser": normaliser}
        info = {**meta, "step": step, "checksums": {name: _checksums(flat) for name, flat in items.items()}}
        # Orbax would wait here too, but lose this step with the one before it where that one's write failed.
        self.wait()
        try:
            if step in self._open().all_steps():
                return True
            self._writing = step
            self._open().save(
                step,
                args=ocp.args.Composite(
                    **{name: ocp.args.StandardSave(flat) for name, flat in items.items()},
                    meta=ocp.args.JsonSave(_seal(info)),
                ),
            )
        except (OSError, ValueError, RuntimeError) as error:  # what orbax raises for a failed (earlier) write
            self._failed(step, error)
            return False
        return True

    def wait(self) -> bool:
        """Wait for the background write; False where it failed."""
        if self._manager is None:
            return True
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            self._failed(self._writing, error)
            return False
        return True

    def close(self) -> None:
        """Finish writing and release orbax's threads."""
        self.wait()
        if self._manager is not None:  # a failed write has let go of it
            self._manager.close()
            self._manager = None

    def _failed(self, step: int, error: Exception) -> None:
        self.failed_saves += 1
        self._say(
            f"WARNING: checkpoint {step} could not be written to {self._dir} ({type(error).__name__}: {error}). "
            "Training goes on, and the next checkpoint_period tries again; if the disk is full, free some space."
        )
        self._manager = None  # orbax keeps raising an asynchronous error until it is opened anew

    def restore_state(self, template: Any) -> Restored | None:
        """The newest checkpoint that verifies, or None where there is none.

        A damaged checkpoint is said, and the one before it is tried; once one verifies, the damaged ones are moved to
        `checkpoints_damaged/`. Raises CheckpointError if all are damaged (nothing is moved then), or if one does not
        fit this agent (another network shape is a mistake, not damage).
        """
        steps, damaged = self.steps(), []
        for step in reversed(steps):
            try:
                leaves, meta = self._read(step, "state")
                normaliser, _ = self._read(step, "normaliser")
            except CheckpointError as error:
                self._say(f"WARNING: {error}. Falling back to the checkpoint before it.")
                damaged.append(step)
                continue
            self._move_aside(damaged)
            return Restored(step, self._assemble(template, leaves, step), meta, normaliser)
        if steps:
            raise CheckpointError(
                f"none of the checkpoints {steps} in {self._dir} could be read; try again where the disk may have been "
                "away, restore the folder from a backup, or give another --checkpoint_path to start afresh"
            )
        return None

    def _move_aside(self, damaged: list[int]) -> None:
        aside = self._dir.parent / "checkpoints_damaged"
        for step in damaged:
            aside.mkdir(exist_ok=True)
            (self._dir / str(step)).rename(aside / f"{step}_{time.time_ns()}")
        if damaged:
            self._say(f"moved to {aside}: checkpoints {', '.join(map(str, sorted(damaged)))}")

    def restore_policy(self, step: int) -> PolicyCheckpoint:
        """The policy of one checkpoint; raises CheckpointError listing those that exist."""
        steps = self.steps()
        if step not in steps:
            raise CheckpointError(
                f"there is no checkpoint {step} in {self._dir}; there are: {', '.join(map(str, steps)) or 'none'}"
            )
        params, meta = self._read(step, "policy")
        normaliser, _ = self._read(step, "normaliser")
        return PolicyCheckpoint(step, params, normaliser, meta)

    def _read(self, step: int, item: str) -> tuple[Flat, dict[str, Any]]:
        try:
            # A reader of its own: the manager caches what it saw, and may belong to a run still being written.
            checkpointer = ocp.StandardCheckpointer()
            restored = checkpointer.restore(self._dir / str(step) / item)
            record = ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(self._dir / str(step) / "meta")
        except Exception as error:  # damage surfaces as any of a dozen types of orbax, tensorstore and json
            raise CheckpointError(
                f"checkpoint {step} in {self._dir} cannot be read ({type(error).__name__})"
            ) from error
        try:
            meta = _unseal(record)
            sums = meta["checksums"][item]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint {step} in {self._dir} is damaged (meta: {error})") from error
        flat = {k: np.asarray(v) for k, v in restored.items()}
        if sums != _checksums(flat):
            bad = [k for k in sums if k not in flat or zlib.crc32(flat[k].tobytes()) != sums[k]]
            raise CheckpointError(
                f"checkpoint {step} in {self._dir} is damaged (checksum of {bad[:1] or 'a new leaf'})"
            )
        return flat, meta

    def _assemble(self, template: Any, leaves: Flat, step: int) -> Any:
        paths, treedef = jax.tree_util.tree_flatten_with_path(template)
        advice = (
            f"Resume with the configuration of {self._dir.parent / 'config.json'}, or give another --checkpoint_path."
        )
        unknown = sorted(set(leaves) - {jax.tree_util.keystr(path) for path, _ in paths})
        out = []
        for path, leaf in paths:
            key = jax.tree_util.keystr(path)
            is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            expected = jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf
            if key not in leaves or leaves[key].shape != expected.shape or leaves[key].dtype != expected.dtype:
                found = f"{leaves[key].dtype}{leaves[key].shape}" if key in leaves else "absent"
                raise CheckpointError(
                    f"checkpoint {step} in {self._dir} does not fit this agent: {key} is {found}, expected "
                    f"{expected.dtype}{expected.shape}. {advice}"
                )
            value = jax.numpy.array(leaves[key])
            out.append(jax.random.wrap_key_data(value) if is_key else value)
        if unknown:
            raise CheckpointError(
                f"checkpoint {step} in {self._dir} does not fit this agent, which has no {unknown[0]}. {advice}"
            )
        return jax.tree_util.tree_unflatten(treedef, out)
