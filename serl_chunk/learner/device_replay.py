"""A mirror of the replay's steps on the device, and updates that gather their windows there."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.agents.base import Agent
from serl_chunk.agents.state import AgentState, Metrics, Params, Updated
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.learner.devices import Devices
from serl_chunk.learner.profiling import free_device_bytes
from serl_chunk.replay.replay import Drawn, Half, Replay, Request
from serl_chunk.replay.windows import WindowColumns, with_moved_joints
from serl_chunk.types import STATE, ChunkBatch

logger = logging.getLogger(__name__)

CALLS = (8, 4)  # calls of updates that one program does, where so many are owed; each is compiled once
_OUTSIDE = "replay/outside"  # numbers of drawn actions beyond model space, and all: int32[2] of a call


def gathers(config: ExperimentConfig, agent: Agent, replay: Replay, devices: Devices) -> bool:
    """Whether updates gather their windows on the device (`replay.on_device`). Raises ConfigError where `on` cannot.

    `auto` is on wherever it can be, on CPUs too, where several calls take less processor time.
    """
    a, free = config.agent, free_device_bytes()
    lacks = {
        "an agent without cameras, language and relabelling": not (a.image_keys or a.language.reads or a.relabels),
        "no features of observations": not agent.cached_features(),
        "replay.windows=episode": config.replay.windows == "episode",
        "normaliser.robot=none": config.normaliser.robot == "none",
        "one device in one process": not devices.several,
        "twice its size of free device memory": free is None or 2 * replay.mirrored_bytes <= free,
    }
    missing = [need for need, met in lacks.items() if not met]
    wanted = config.replay.on_device
    require(wanted != "on" or not missing, "replay.on_device", f"on needs {', '.join(missing)}. Set auto")
    return not missing and (wanted == "on" or (wanted == "auto" and jax.default_backend() != "cpu"))


class Mirror(NamedTuple):
    """What windows are gathered from."""

    columns: WindowColumns
    normaliser: Mapping[str, Any]  # its arrays


class Program(NamedTuple):
    """Several calls of updates, compiled as one."""

    calls: int
    mirror: Any  # structure of the mirror that it takes
    run: Callable[..., Any]


class DeviceReplay:
    """Keeps a mirror equal to a replay and updates an agent on windows of it; for the training thread alone.

    Windows are those that `BatchLoader` draws with `prefetch=0`, number for number: the replay draws them, and what
    changed in it since the last draw is mirrored before they are gathered.

    Args:
        threaded: compile programs of several calls on a thread of their own, while one call at a time goes on.
    """

    def __init__(
        self, replay: Replay, agent: Agent, config: ExperimentConfig, preprocess: Preprocess, rng: np.random.Generator,
        *, threaded: bool,
    ) -> None:  # fmt: skip
        self._replay, self._rng = replay, rng
        self._config, self._preprocess = config, preprocess
        normaliser = preprocess.normaliser
        arrays = {n: jnp.array(a) for n, a in normaliser.to_arrays().items() if n != "joint"}  # which joints is static
        self._mirror = Mirror(jax.tree.map(_empty, replay.mirror()), arrays)
        self._later = {name: spec.next_observations for name, spec in agent.wants().items()}
        self._update = agent.updates_of(self._gathered)
        self._write = jax.jit(_written, donate_argnums=0)
        self._programs: dict[Any, Future[Any]] = {}
        self._thread, self._threaded = ThreadPoolExecutor(1, thread_name_prefix="compiler"), threaded

    def draw(self, calls: int, requests: Sequence[Request], half: Half | None) -> Mapping[str, Drawn]:
        """Draw the windows of so many calls, and mirror what changed. Raises DataError while there is none."""
        drawn, changed = self._replay.draw(self._rng, calls, requests, half)
        columns = self._mirror.columns
        for rows, values in changed:
            new = [x is not None and have is None for have, x in zip(columns, values, strict=True)]
            if any(new):  # the first step that a human had a part of
                columns = WindowColumns(*map(_begun, new, columns, values, [columns.live.size] * len(new)))
            columns = self._write(columns, rows, values)
        self._mirror = self._mirror._replace(columns=columns)
        return drawn

    def program(self, most: int, state: AgentState, base: Params, requests: Sequence[Request]) -> Program:
        """Return the program of as many calls, at most `most`, as one is compiled of.

        Programs of more calls are compiled from now on, in the background.
        """
        mirror = jax.tree.structure(self._mirror)
        for calls in (n for n in CALLS if n <= most):
            key = calls, tuple(requests), mirror
            if key not in self._programs:
                drawn = {r.name: Drawn.empty(calls, r, seeds=self._replay.moves) for r in requests}
                args = jax.tree.map(_abstract, (state, base, self._mirror, drawn))
                self._programs[key] = self._thread.submit(self._compiled, calls, args)
                if not self._threaded:
                    self._programs[key].result()
            if self._programs[key].done() and (run := self._programs[key].result()) is not None:
                return Program(calls, mirror, run)
        return Program(1, mirror, self._update)

    def _compiled(self, calls: int, args: Any) -> Any:
        """Return a program; None where none can be made, as where memory is short: fewer calls go on."""
        try:
            return self._update.lower(*args).compile()
        except Exception as error:
            logger.warning(f"no program of {calls} calls of updates: {type(error).__name__}: {error}")
            return None

    def update(self, state: AgentState, base: Params, drawn: Mapping[str, Drawn], program: Program) -> Updated:
        """Do the calls whose windows `draw` drew, as `Agent.update`; metrics have a leading axis, the calls."""
        # What was drawn may be the first that a human had a part of: that compiles the update once more.
        same = jax.tree.structure(self._mirror) == program.mirror
        state, metrics = (program.run if same else self._update)(state, base, self._mirror, drawn)
        self._replay.count_outside(metrics.pop(_OUTSIDE))
        return state, metrics

    @jax.numpy_rank_promotion("allow")  # code that NumPy runs too
    def _gathered(self, mirror: Mirror, drawn: Mapping[str, Drawn]) -> tuple[dict[str, ChunkBatch], Metrics]:
        normaliser, columns = self._preprocess.normaliser.traced(mirror.normaliser, _divided), mirror.columns
        preprocess, reach = dataclasses.replace(self._preprocess, normaliser=normaliser), self._replay.reach
        batches, outside = dict[str, ChunkBatch](), jnp.zeros(2, jnp.int32)
        for name, (starts, seed) in drawn.items():
            batch, state, ends = columns.windows(starts.ravel(), self._config, normaliser.encode)
            seen = {STATE: normaliser.observe(state)}
            after = {STATE: normaliser.observe(columns.state[ends])} if self._later[name] else {}
            batch = batch._replace(observations=seen, next_observations=after)
            if seed is not None:
                moves = jax.random.normal(jax.random.key(seed), (starts.size, len(reach)))
                batch = with_moved_joints(batch, preprocess, reach, moves)
            live = (batch.valid > 0)[..., None]
            beyond = (jnp.abs(batch.actions) > 1) & live & normaliser.bounded
            outside += jnp.array([beyond.sum(), live.sum() * batch.actions.shape[2]], jnp.int32)
            batches[name] = jax.tree.map(lambda x, s=starts: x.reshape(*s.shape, *x.shape[1:]), batch)
        return batches, {_OUTSIDE: outside}

    def close(self) -> None:
        """Begin no other compilation."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def _empty(column: np.ndarray) -> jax.Array:
    return jnp.zeros(column.shape, jax.dtypes.canonicalize_dtype(column.dtype))


def _begun(new: bool, have: Any, values: Any, rows: int) -> Any:
    return _empty(np.empty((rows, *values.shape[1:]), values.dtype)) if new else have


def _divided(x: jax.Array, by: jax.Array) -> jax.Array:
    # XLA multiplies by the inverse of what it repeats, and of constants, which rounds otherwise than NumPy's division.
    return x / jax.lax.optimization_barrier(jnp.broadcast_to(by, x.shape))


def _written(columns: WindowColumns, rows: jax.Array, values: WindowColumns) -> WindowColumns:
    def written(column: jax.Array, new: jax.Array) -> jax.Array:
        return column.at[rows].set(new, mode="promise_in_bounds", indices_are_sorted=True)

    return jax.tree.map(written, columns, values)
