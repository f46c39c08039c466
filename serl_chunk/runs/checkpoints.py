"""Checkpoints of a run by orbax: the agent's state, and in it the policy, and a resume's meta data, with checksums.

No array is gathered: where a state lies on several devices, each process writes what it has of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict

from serl_chunk.io import bytes_in, folder_fault, plural
from serl_chunk.runs.folder import RUN_LOCK, lock_run, read_config
from serl_chunk.runs.metrics import MetricsLog
from serl_chunk.types import ConfigError, SerlChunkError
from serl_chunk.version import version_info

logger = logging.getLogger(__name__)

Flat = dict[str, np.ndarray]
_TIMED = "checkpoints_timed"  # folder of the run in which `TimedCheckpoints` keeps the newest state
EXPORTS = "exports"  # folder of the run that has pi0 for openpi
UNDONE = "checkpoints_undone"  # folder of the run that takes the checkpoints after the one that it goes back to


class CheckpointError(SerlChunkError):
    """No usable checkpoint, or one that does not fit."""


class PolicyCheckpoint(NamedTuple):
    """The part of a checkpoint that evaluation needs."""

    step: int
    params: Flat
    normaliser: Flat
    meta: dict[str, Any]


class Restored(NamedTuple):
    """The part of a checkpoint that a resume needs."""

    step: int
    state: Any
    meta: dict[str, Any]
    normaliser: Flat


def _leaves(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def numbers_of(leaf: Any) -> Any:
    """Return an array of numbers, a random key's as its data."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def host_leaves(tree: Any) -> Flat:
    """`path -> array`, copied to the host (a view would alias memory that the next update donates)."""
    return {path: np.array(numbers_of(leaf)) for path, leaf in _leaves(tree).items()}


_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}  # of an item's bytes
_BLOCK = 1 << 20  # words that are summed at once


def _checksum(x: np.ndarray) -> int:
    """Sum of an array's words, each times an odd number that its place gives, mod 2^32.

    Unlike a CRC it is the same in every order of summation, and so on every mesh of devices. An even factor would miss
    a change of a word's highest bit.
    """
    words, total = np.ascontiguousarray(x).reshape(-1).view(_WORDS[x.dtype.itemsize]), 0
    for at in range(0, len(words), _BLOCK):
        block = words[at : at + _BLOCK].astype(np.uint32)
        places = np.arange(at, at + len(block), dtype=np.uint64).astype(np.uint32)
        total += int(np.sum(block * (2 * places + 1), dtype=np.uint32))
    return total % 2**32


def device_checksums(flat: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The checksum of each array, uint32[], where it lies."""

    def checksum(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        words = jax.lax.bitcast_convert_type(x, jnp.dtype(_WORDS[x.dtype.itemsize])).astype(jnp.uint32)
        place, step = jnp.zeros(x.shape, jnp.uint32), 1
        for axis in reversed(range(x.ndim)):
            place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(step % 2**32)
            step *= x.shape[axis]
        return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)

    return jax.tree.map(checksum, flat)


_compiled_checksums = jax.jit(device_checksums)


def _checksums_of_devices(flat: dict[str, Any]) -> dict[str, int]:
    return {k: int(v) for k, v in jax.device_get(_compiled_checksums(flat)).items()}


def _copies(flat: dict[str, Any]) -> dict[str, Any]:
    # A GPU's array is copied to the host at the begin of orbax's save; a CPU's is that memory itself.
    copy = jnp.copy if jax.default_backend() == "cpu" else lambda x: x
    return {name: copy(numbers_of(leaf)) for name, leaf in flat.items()}


def _unseal(record: Any) -> dict[str, Any]:
    """Return the content of a sealed record; raises ValueError where any value or key changed."""
    if isinstance(record, dict) and set(record) == {"content", "crc32"}:
        if record["crc32"] != _text_checksum(record["content"]):
            raise ValueError("its checksum differs")
        return record["content"]
    raise ValueError("it has no checksums")


def _text_checksum(meta: Any) -> int:
    # In one canonical form, because what is read back is not the dictionary that was written.
    return zlib.crc32(json.dumps(json.loads(json.dumps(meta)), sort_keys=True).encode())


class Content(NamedTuple):
    """What a checkpoint holds, as it was at its moment."""

    items: dict[str, dict[str, Any]]  # arrays by path
    meta: dict[str, Any]
    on_devices: bool  # whether the state's arrays lie on several; else all are copies on the host

    @classmethod
    def of(cls, step: int, state: Any, policy: Any, normaliser: Flat, meta: Mapping[str, Any], saves: Saves) -> Content:
        """Copy what updates donate. Of the policy's arrays those of the state are named, and no array is twice."""
        leaves = _leaves(state)
        places = {id(leaf): path for path, leaf in leaves.items()}
        acting = flatten_dict(policy, sep="/")
        named = {name: places[id(leaf)] for name, leaf in acting.items() if id(leaf) in places}
        others = {name: np.array(leaf) for name, leaf in acting.items() if name not in named}
        several = any(isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 for x in leaves.values())
        held = saves.copied(leaves) if several else host_leaves(state)
        items = {"state": held, "normaliser": normaliser} | ({"policy": others} if others else {})
        info = {**meta, "step": step, "serl_chunk": version_info()._asdict(), "policy": named}
        return cls(items, info, several)


# Threads of one save of orbax's wait for folders by a number that the newest save of the process sets. Two at once, as
# one of the period and a timed one, would write into folders that the other's threads have not made.
_SAVES_ALONE = threading.Lock()
_SLOWEST = 24 * 3600  # seconds; orbax gives a write up after 20 minutes, which 50 GB to a shared disk may take


def begin_write(path: Path, items: Mapping[str, Flat], info: Mapping[str, Any]) -> Callable[[], None]:
    """Begin to write `path`; the result waits for its end. What lies on devices is copied before this returns."""
    arrays = {name: ocp.args.StandardSave(flat) for name, flat in items.items()}
    meta = ocp.args.JsonSave({"content": info, "crc32": _text_checksum(info)})
    with contextlib.ExitStack() as stack:
        stack.enter_context(_SAVES_ALONE)
        writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), timeout_secs=_SLOWEST)
        checkpointer = stack.enter_context(writer)
        checkpointer.save(path, args=ocp.args.Composite(**arrays, meta=meta))
        begun = stack.pop_all()

    def finish() -> None:
        with begun:
            checkpointer.wait_until_finished()

    return finish


class Saves(NamedTuple):
    """How arrays that lie on several devices are written; with several processes, those of all."""

    copied: Callable[[dict[str, Any]], dict[str, Any]] = _copies  # what updates donate, random keys as numbers
    checksums: Callable[[dict[str, Any]], dict[str, int]] = _checksums_of_devices
    begin: Callable[[Path, Mapping[str, Flat], Mapping[str, Any]], Callable[[], None]] = begin_write

    def begin_save(self, path: Path, content: Content) -> Callable[[], None]:
        """As `begin_write`, with the checksums of all arrays."""

        def sums(flat: dict[str, Any]) -> dict[str, int]:
            on_devices = any(isinstance(x, jax.Array) for x in flat.values())
            return self.checksums(flat) if on_devices else {k: _checksum(v) for k, v in flat.items()}

        checksums = {name: sums(flat) for name, flat in content.items.items()}
        return self.begin(path, content.items, {**content.meta, "checksums": checksums})


def _finished(folder: Path) -> list[str]:
    # Orbax renames a checkpoint to its number at its end.
    return [p.name for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []


def alone(handler: Callable[..., Any]) -> ocp.Checkpointer:
    """Return what reads and writes in this process alone, without waiting for others of its learner."""
    own = jax.process_index()
    options = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
    return ocp.Checkpointer(handler(multiprocessing_options=options), multiprocessing_options=options)


def read_item(path: Path, item: str, only: Collection[str] | None = None) -> tuple[Flat, dict[str, Any]]:
    """Read one item of the checkpoint `path`, all of it or `only` some arrays, and the checkpoint's meta.

    Raises CheckpointError where it is damaged.
    """
    where = f"checkpoint {path.name} in {path.parent}"
    jax.devices()  # raises where JAX cannot use its platform, which is no damage
    try:
        # A reader of its own: the manager caches what it saw, and may belong to a run still being written.
        record = alone(ocp.JsonCheckpointHandler).restore(path / "meta")
    except Exception as error:  # damage surfaces as any of a dozen types of orbax, tensorstore and json
        raise CheckpointError(f"{where} is truncated or damaged ({type(error).__name__})") from error
    try:
        meta = _unseal(record)
        sums = meta["checksums"].get(item, {})
        sums = {name: sums[name] for name in (sums if only is None else only)}
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{where} is damaged (meta: {error})") from error
    if not sums:
        return {}, meta
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in sums}  # from whatever devices they came
    args = ocp.args.PyTreeRestore(item=dict.fromkeys(sums, 0), restore_args=how, partial_restore=True)
    try:
        restored = alone(ocp.PyTreeCheckpointHandler).restore(path / item, args=args)
        flat = {name: np.asarray(restored[name]) for name in sums}
    except Exception as error:  # as above
        raise CheckpointError(f"{where} is truncated or damaged ({type(error).__name__})") from error
    if wrong := [name for name, total in sums.items() if _checksum(flat[name]) != total]:
        raise CheckpointError(f"{where} is damaged (checksum of {wrong[:1]})")
    return flat, meta


class Entry(NamedTuple):
    """A finished checkpoint on disk; they sort by age."""

    step: float  # infinite for a timed one with damaged meta, so that it is tried, and reported, first
    updates: int  # of every kind since the run began: what two of the same step differ in
    periodic: bool
    path: Path
    version: int = -1  # newest published snapshot when it was written; -1: not recorded

    @classmethod
    def of(cls, path: Path, *, periodic: bool) -> Entry:
        try:
            meta = _unseal(json.loads((path / "meta" / "metadata").read_text()))
            step, updates, version = float(meta["step"]), int(meta["updates"]), int(meta.get("version", -1))
        except (OSError, ValueError, LookupError, TypeError):
            step, updates, version = math.inf, -1, -1
        return cls(int(path.name) if periodic else step, updates, periodic, path, version)

    @property
    def label(self) -> str:
        return self.path.name if self.periodic else f"timed_{self.path.name}"


class _Writer:
    """Writes checkpoints into a folder on a thread, one at a time; a failure, which must not end a run, is logged."""

    def __init__(self, folder: Path, saves: Saves) -> None:
        self._dir, self._saves = folder, saves
        self._thread: threading.Thread | None = None
        self._succeeded = True  # the newest write, once it is over
        self.failed_saves = 0

    @property
    def writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> bool:
        """Wait for the background write; False where it failed."""
        if self._thread is not None:
            self._thread.join()
        return self._succeeded

    def _start(
        self, path: Path, content: Content | None, then: Callable[[], None], what: str, again: str,
        over: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Write `path`, unless None, and call `then`, in the background; then `over`, after a failure too.

        `again`: when `what` is tried again.
        """

        def begin() -> Callable[[], None]:
            self._dir.mkdir(parents=True, exist_ok=True)
            return (lambda: None) if content is None else self._saves.begin_save(path, content)

        def run() -> None:
            with self._logged(path, what, again):
                (begun or begin())()
                then()
            over()

        self._succeeded, begun = True, None
        if content is not None and content.on_devices:  # copied before an update donates it
            with self._logged(path, what, again):
                begun = begin()
        if not self._succeeded:
            return over()
        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    @contextlib.contextmanager
    def _logged(self, path: Path, what: str, again: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the disk, of orbax and tensorstore, or what was written does not verify
            self._succeeded = False
            self.failed_saves += 1
            shutil.rmtree(path, ignore_errors=True)
            logger.warning(
                f"{what} could not be written to {self._dir} ({type(error).__name__}: {error}). Training goes on, "
                f"and {again}. If the disk is full, free some space."
            )


class CheckpointStore(_Writer):
    """`<run>/checkpoints/<step>/`, written in the background; reads timed ones too.

    The newest `keep` stay, fewer where they, the timed one and exports take more than `most_bytes` (0: any): then the
    newest of them that fit, but always the last.
    """

    def __init__(self, run_dir: Path, *, keep: int = 20, most_bytes: int = 0, saves: Saves = Saves()) -> None:  # noqa: B008 - immutable
        self.run_dir = Path(run_dir).absolute()
        self._keep, self._most_bytes = keep, most_bytes or math.inf
        super().__init__(self.run_dir / "checkpoints", saves)

    def steps(self) -> list[int]:
        """Return the steps of the finished periodic checkpoints, ascending."""
        return sorted(map(int, _finished(self._dir)))

    def newest(self) -> int | None:
        """Return the step of the newest finished checkpoint, timed or not; None without any."""
        return max((int(e.step) for e in self.entries() if e.step < math.inf), default=None)

    def entries(self) -> list[Entry]:
        """Return the finished checkpoints, oldest first."""
        folders = ((self._dir, True), (self.run_dir / _TIMED, False))
        return sorted(Entry.of(f / name, periodic=periodic) for f, periodic in folders for name in _finished(f))

    def save(self, step: int, state: Any, policy: Any, normaliser: Flat, meta: Mapping[str, Any]) -> None:
        """Copy what updates donate, and write in the background. The first checkpoint of a step stays.

        `policy` is a tree of arrays, of which those that are the state's are written once.
        """
        content = Content.of(step, state, policy, normaliser, meta, self._saves)
        self.wait()
        path = self._dir / str(step)

        def tidy() -> None:
            stay = self._staying()
            for other in self._dir.iterdir():  # also what a killed learner left unfinished: the run's lock shows that
                if other.name not in stay:
                    shutil.rmtree(other, ignore_errors=True)

        again = "the next checkpoint_period tries again"
        self._start(path, None if path.exists() else content, tidy, f"checkpoint {step}", again)

    def _staying(self) -> set[str]:
        stay: set[str] = set()
        left = self._most_bytes - sum(bytes_in(self.run_dir / other) for other in (_TIMED, EXPORTS))
        for step in reversed(self.steps()[-self._keep :]):
            left -= bytes_in(self._dir / str(step))
            if stay and left < 0:
                break
            stay.add(str(step))
        return stay

    def close(self) -> None:
        self.wait()

    def restore_state(self, *templates: Any, place: Callable[[Any], Any] = jnp.array) -> Restored | None:
        """Restore the newest checkpoint that verifies, as the first of the templates that has its leaves; None: none.

        `place` takes each array from the host to where it is to lie.
        Damaged checkpoints are moved to `checkpoints_damaged/` once an older one verifies. Raises CheckpointError where
        all are damaged (nothing is moved then), or the one that verifies does not fit this agent.
        """
        entries, damaged = self.entries(), []
        for entry in reversed(entries):
            try:
                leaves, meta = read_item(entry.path, "state")
                normaliser, _ = read_item(entry.path, "normaliser")
            except CheckpointError as error:
                logger.warning(f"{error}. Falling back to the checkpoint before it.")
                damaged.append(entry)
                continue
            self._move_aside(damaged)
            fitting = [t for t in templates if _leaves(t).keys() == leaves.keys()]
            state = self._assemble([*fitting, *templates][0], leaves, entry.path, place)
            return Restored(int(entry.step), state, meta, normaliser)
        if not entries:
            return None
        labels = ", ".join(e.label for e in entries)
        remedy = "Check the disk, restore the folder from a backup, or start afresh in another one"
        text = f"none of the checkpoints [{labels}] in {self._dir} can be read. {remedy}"
        raise CheckpointError(text, parameter="checkpoint_path")

    def _move_aside(self, damaged: list[Entry]) -> None:
        aside = self.run_dir / "checkpoints_damaged"
        for entry in damaged:
            aside.mkdir(exist_ok=True)
            entry.path.rename(aside / f"{entry.label}_{time.time_ns()}")
        if damaged:
            logger.info(f"moved to {aside}: checkpoints {', '.join(e.label for e in sorted(damaged))}")

    def policies(self) -> Iterator[PolicyCheckpoint]:
        """Yield the policies of all checkpoints that can be read, newest first."""
        for entry in reversed(self.entries()):
            with contextlib.suppress(CheckpointError):
                yield self._policy(entry)

    def restore_policy(self, step: int) -> PolicyCheckpoint:
        """Read the policy of one checkpoint; raises CheckpointError with those that are there, or can be read."""
        found = [e for e in self.entries() if e.step == step]
        if not found:
            steps = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"there is no checkpoint {step} in {self._dir}; there are: {steps}")
        try:
            return self._policy(max(found, key=lambda e: e.periodic))
        except CheckpointError as error:
            good = sorted({policy.step for policy in self.policies()})
            remedy = "No other one can be read. Restore the folder from a backup"
            if good:
                remedy = f"Checkpoints that can be read: {', '.join(map(str, good))}. Choose {good[-1]}"
            raise CheckpointError(f"{error}. {remedy}", parameter="eval_checkpoint_step") from error

    def _policy(self, entry: Entry) -> PolicyCheckpoint:
        params, meta = read_item(entry.path, "policy")
        leaves, _ = read_item(entry.path, "state", meta["policy"].values())
        normaliser, _ = read_item(entry.path, "normaliser")
        params |= {name: leaves[path] for name, path in meta["policy"].items()}
        return PolicyCheckpoint(int(entry.step), params, normaliser, meta)

    def _assemble(self, template: Any, leaves: Flat, path: Path, place: Callable[[Any], Any]) -> Any:
        misfit = f"checkpoint {path.name} in {path.parent} does not fit this agent"
        advice = f"Resume with the configuration of {self.run_dir / 'config.json'}, or choose another run folder"

        def restored(leaf_path: Any, leaf: Any) -> Any:
            key = jax.tree_util.keystr(leaf_path)
            is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            expected = jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf
            value = leaves.pop(key, None)
            if value is None or value.shape != expected.shape or value.dtype != expected.dtype:
                found = "absent" if value is None else f"{value.dtype}{value.shape}"
                wanted = f"{expected.dtype}{expected.shape}"
                raise CheckpointError(f"{misfit}: {key} is {found}, expected {wanted}. {advice}")
            return place(jax.random.wrap_key_data(jnp.array(value)) if is_key else value)

        state = jax.tree_util.tree_map_with_path(restored, template)
        if leaves:
            raise CheckpointError(f"{misfit}, which has no {min(leaves)}. {advice}")
        return state


class TimedCheckpoints(_Writer):
    """`<run>/checkpoints_timed/<number>/`; the one before is removed once the new one verifies.

    Between two are `period` seconds, or more where they would take more than `share` (0..1) of wall time.
    """

    def __init__(
        self, run_dir: Path, *, period: float = 60.0, share: float = 0.05, now: Callable[[], float] = time.monotonic,
        saves: Saves = Saves(),  # noqa: B008 - immutable
    ) -> None:  # fmt: skip
        super().__init__(Path(run_dir).absolute() / _TIMED, saves)
        self._period, self._share, self._now = period, share, now
        self._next = now() + period

    @property
    def due(self) -> bool:
        return self._now() >= self._next and not self.writing

    def postpone(self) -> None:
        """Begin the period anew: another checkpoint of the current state is written."""
        self._next = max(self._next, self._now() + self._period)

    def save(self, step: int, state: Any, policy: Any, normaliser: Flat, meta: Mapping[str, Any]) -> None:
        """As `CheckpointStore.save`; after a failure, which is logged, the one before stays."""
        self.wait()
        began = self._now()
        content = Content.of(step, state, policy, normaliser, meta, self._saves)
        path = self._dir / str(max(map(int, _finished(self._dir)), default=0) + 1)

        def replace() -> None:
            for name in content.items:
                read_item(path, name)
            for other in self._dir.iterdir():  # also what a killed learner left unfinished
                if other != path:
                    shutil.rmtree(other, ignore_errors=True)

        def over() -> None:
            self._next = began + max(self._period, (self._now() - began) / self._share)

        what, again = f"the timed checkpoint of step {step}", "it is tried again after a while"
        self._start(path, content, replace, what, again, over)


class LearnerCheckpoints(CheckpointStore):
    """A learner's: the periodic ones, the timed one, and whether anything was learnt since the newest."""

    def __init__(self, run_dir: Path, *, keep: int, most_bytes: int = 0, saves: Saves = Saves()) -> None:  # noqa: B008
        super().__init__(run_dir, keep=keep, most_bytes=most_bytes, saves=saves)
        self.timed, self.unsaved = TimedCheckpoints(run_dir, saves=saves), False

    @property
    def timed_due(self) -> bool:
        # While another is written, the begin of a save on several devices would wait for it, and training with it.
        return (self.unsaved or not self._succeeded) and self.timed.due and not self.writing

    def save(self, step: int, state: Any, policy: Any, normaliser: Flat, meta: Mapping[str, Any]) -> None:
        self.timed.postpone()
        super().save(step, state, policy, normaliser, meta)
        self.unsaved = False

    def save_timed(self, step: int, state: Any, policy: Any, normaliser: Flat, meta: Mapping[str, Any]) -> None:
        """Write it in the background, in the place of the timed one before."""
        self.timed.save(step, state, policy, normaliser, meta)
        self.unsaved = False

    def close(self) -> None:
        super().close()
        self.timed.wait()


class RolledBack(NamedTuple):
    """What a run goes on from."""

    version: int
    step: int
    undone: int  # checkpoints that were moved

    def __str__(self) -> str:
        where = f"policy version {self.version}, checkpoint {self.step}"
        if not self.undone:
            return f"{where} is the newest one: nothing was moved"
        return f"goes on from {where}; {plural(self.undone, 'newer checkpoint')} moved to {UNDONE}"


def kept_versions(run: Path) -> dict[int, Entry]:
    """Return the policy versions of a run that have a checkpoint, ascending, each with its newest checkpoint.

    A checkpoint's version is the newest one that was published when it was written. Raises ConfigError for a folder
    that is no run's.
    """
    read_config(run)
    return {entry.version: entry for entry in CheckpointStore(run).entries() if entry.version >= 0}


def roll_back(run: Path, version: int) -> RolledBack:
    """Move the checkpoints after that of `version` aside, so that a resume goes on from that one.

    Raises, before anything is moved, ConfigError where a learner uses the run, and CheckpointError for a version
    without a checkpoint, or with a damaged one.
    """
    kept = kept_versions(run)
    try:
        with (run / RUN_LOCK).open("a") as lock:
            lock_run(run, lock)
            if version not in kept:
                raise CheckpointError(_gone(run, version, kept), parameter="to")
            target = kept[version]
            for item in ("state", "policy", "normaliser"):  # an absent one is empty
                read_item(target.path, item)
            entries = CheckpointStore(run).entries()
            newer = entries[entries.index(target) + 1 :]
            for entry in reversed(newer):  # newest first: what a kill leaves is a run that goes on from between
                (run / UNDONE).mkdir(exist_ok=True)
                entry.path.rename(run / UNDONE / f"{entry.label}_{time.time_ns()}")
            result = RolledBack(version, int(target.step), len(newer))
            if newer:
                with MetricsLog(run, wandb_project=None, wandb_name="", config={}) as metrics:
                    metrics.event(f"rollback: {result}")
            return result
    except OSError as error:
        raise ConfigError(folder_fault(run, error), parameter="run") from error


def _gone(run: Path, version: int, kept: dict[int, Entry]) -> str:
    there = ", ".join(f"{v} (checkpoint {int(e.step)})" for v, e in kept.items())
    if not there:
        return f"policy version {version} of {run} is gone, as no version has a checkpoint. Start a new run"
    before = [v for v in kept if v < version]
    remedy = f"Give {before[-1] if before else min(kept)}, the nearest one" + (" before it" if before else "")
    return f"policy version {version} of {run} has no checkpoint. There are: {there}. {remedy}"
