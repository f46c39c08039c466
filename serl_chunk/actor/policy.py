"""The acting policy: an agent's parameters and the transforms, from raw observation to robot-unit chunk."""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serl_chunk.data.preprocess import Preprocess
from serl_chunk.types import (
    CRITIC_CHOOSES,
    IMAGE_PREFIX,
    ONE,
    STATE,
    Observation,
    PolicyOrigin,
    RobotSpec,
    SerlChunkError,
    Snapshot,
    SnapshotSource,
)

if TYPE_CHECKING:
    import jax

    from serl_chunk.actor.canary import Canary
    from serl_chunk.agents.base import Agent

_REMEMBERED = 16  # versions whose time of arrival is kept
BLOCK = 16  # rows of a call whose decisions have keys of their own, whatever runs at once

AWAY_POLL_SECONDS = 0.02  # between looks at a policy that is away
NO_SERVER = "start the policy server, or check actor.policy"


def no_stop() -> str | None:
    """A `stop` that never stops."""
    return None


class PolicyError(SerlChunkError):
    """The policy cannot act, or its action must not reach a robot."""


class PolicyAwayError(PolicyError):
    """The policy cannot decide now; it may come back. The robot holds meanwhile."""


class Request(NamedTuple):
    """An observation to decide on."""

    observation: Observation  # raw: `state float32[S]` and the frames of the policy's cameras
    tick: int = 0  # of the observation
    epoch: int = 0  # of the chunk queue when the observation was taken
    explore: bool = False
    prefix: np.ndarray | None = None  # float32[d, A], robot units: actions committed to the ticks from `tick` on
    task: str = ""  # the episode's, in words
    arm: str = ""  # who decides: ONE or BEST; empty: BEST where the parameters permit it, else ONE
    key: tuple[int, int] | None = None  # of a ticket's seed and the decision's number in its episode; None: a counter's


def blank_request(spec: RobotSpec, cameras: Iterable[str], *, explore: bool, task: str = "") -> Request:
    """Return a request of zeros with the text of a task, to compile and measure inference with."""
    observation: Observation = {STATE: np.zeros(spec.state_dim, np.float32)}
    for c in map(spec.camera, cameras):
        observation[IMAGE_PREFIX + c.name] = np.zeros((c.height, c.width, 3), np.uint8)
    return Request(observation, explore=explore, task=task)


class Decision(NamedTuple):
    """A chunk, ready to be executed, and the tick it was computed for. Action i belongs to tick `tick + i`."""

    actions: np.ndarray  # float32[H, A], robot units, within the robot's limits
    # "chunk" float32[H, A] in model space, or "actions" in the robot's units, and the agent's own entries.
    record: dict[str, np.ndarray]
    version: int  # of the policy
    steps: int | None = None  # index at which the agent would rather follow a newer chunk; None: not given
    tick: int = 0  # of the observation
    epoch: int = 0  # of the chunk queue when the observation was taken
    clipped: int = 0  # values that were beyond the robot's limits


class Acting(NamedTuple):
    """Parameters and their version, replaced together: a decision uses one pair to its end."""

    params: Any
    version: int
    critic_chooses: bool

    def alone(self, arm: str) -> bool:
        """Return whether the first candidate acts in an episode of `arm`; see `Request`."""
        return arm == ONE if arm else not self.critic_chooses


class Prepared(NamedTuple):
    """A request as an agent reads it."""

    state: np.ndarray  # raw, float32[S]
    inputs: Observation
    arm: str = ""  # here and below: see `Request`
    key: tuple[int, int] | None = None
    prefix: np.ndarray | None = None


class Policy(abc.ABC):
    """Base of the policies: they decide, and their chunks stay within a robot's limits."""

    image_keys: tuple[str, ...]
    """Cameras whose frames a request has."""

    def __init__(self, spec: RobotSpec) -> None:
        self._low, self._high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
        # Decoding an action on the limit exactly may miss it by rounding; that is not clipping.
        self._slack = 1e-5 * (self._high - self._low)

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """Of the newest parameters; -1 before the first."""

    gate: Canary | None = None
    """What a newer snapshot passes before it acts in every episode; None: it acts at once."""

    by_episode = False
    """Whether one version decides in a whole episode (`AgentConfig.iterates`); set by who runs the episodes."""

    @property
    def critic_chooses(self) -> bool:
        """Whether the newest parameters permit that a critic chooses (`types.CRITIC_CHOOSES`)."""
        return False

    def choose_snapshot(self) -> bool:
        """Choose the snapshot of the next episode where there is a gate; returns whether it is a candidate."""
        return False

    @property
    def waiting(self) -> str:
        """Why it is not `available`."""
        return ""

    @abc.abstractmethod
    def refresh(self) -> bool:
        """Take newer parameters where there are some; returns whether it can decide."""

    @abc.abstractmethod
    def decide(self, request: Request) -> Decision:
        """Compute a chunk. Raises PolicyAwayError where the policy may come back, PolicyError where it cannot act."""

    def age(self, version: int, now: float) -> float:
        """Return the seconds since the parameters of `version` were complete here; -1 where it was not measured."""
        return -1.0

    def interrupt(self) -> None:  # noqa: B027 (most wait for nothing)
        """End a decision under way in another thread, where it waits for something."""

    def available(self) -> bool:
        """Return whether it is there to decide. Raises PolicyError where it never will be."""
        return True

    def decide_patiently(
        self, request: Request, stop: Callable[[], str | None], poll: Callable[[], object] = lambda: None
    ) -> Decision | None:
        """Compute a chunk, waiting while the policy is away; None once `stop` returns a string.

        `poll` is called meanwhile, and `stop` polled, on the caller's thread.
        """
        while True:
            try:
                return self._decide_polling(request, stop, poll)
            except PolicyAwayError:
                poll()
                if stop() is not None:
                    return None
                time.sleep(AWAY_POLL_SECONDS)

    def _decide_polling(self, request: Request, stop: Callable[[], str | None], poll: Callable[[], object]) -> Decision:
        """Decide, and poll where that waits for something else than the processor."""
        return self.decide(request)

    def _limited(self, decoded: np.ndarray, version: int) -> tuple[np.ndarray, int]:
        """Return a chunk float32[H, A] of the robot's units within its limits, and how many values were beyond them.

        Raises PolicyError: not finite.
        """
        if not np.isfinite(decoded).all():
            raise PolicyError(
                f"policy version {version} gave an action that is not finite: its training has diverged. Stop "
                "the run, and resume it from an earlier checkpoint"
            )
        beyond = (decoded < self._low - self._slack) | (decoded > self._high + self._slack)
        return np.clip(decoded, self._low, self._high), int(np.count_nonzero(beyond))


class LocalPolicy(Policy):
    """Decides with its newest parameters.

    The random key of decision number n is `fold_in(key(seed), n)`, where the request has none of its own: with (s, n)
    it is `fold_in(fold_in(key(0), s), n)`, s modulo 2**32. Such a decision depends on its request and the parameters
    alone, bit for bit. One thread at a time decides; another one may `refresh` meanwhile.

    Args:
        source: of newer snapshots; None where `swap` is called by hand. Those for another normaliser are never taken.
        run: whose snapshots are taken from `source`, empty for those of any.
        gate: decides which of the source's snapshots acts, between episodes.
    """

    def __init__(
        self, agent: Agent, preprocess: Preprocess, spec: RobotSpec,
        *, seed: int = 0, source: SnapshotSource | None = None, run: str = "", gate: Canary | None = None,
    ) -> None:  # fmt: skip
        import jax  # here and below: who only names a policy waits for no JAX

        super().__init__(spec)
        self.agent, self.preprocess, self.image_keys = agent, preprocess, preprocess.image_keys
        self._source, self.gate = source, gate
        self._origin = PolicyOrigin(run, preprocess.digest())
        self._acting: Acting | None = None
        self._arrived: dict[int, float] = {}  # of the newest versions; a queue may still run an older one
        self._key = jax.random.key(seed)
        self._decisions = 0

    @property
    def version(self) -> int:
        return -1 if (acting := self._acting) is None else acting.version

    @property
    def critic_chooses(self) -> bool:
        return (acting := self._acting) is not None and acting.critic_chooses

    def swap(self, snapshot: Snapshot) -> None:
        """Decide by `snapshot` from now on. Raises PolicyError: another normaliser; ConfigError: another network."""
        needs = snapshot.origin.normaliser
        if needs not in ("", self._origin.normaliser):
            raise PolicyError(
                f"snapshot {snapshot.version} needs normaliser {needs}, the policy has {self._origin.normaliser}: its "
                "chunks would become other commands. Connect to the learner again, which sends both"
            )
        params = self.agent.load_params(snapshot.params)
        if snapshot.arrived is not None:
            self._arrived[snapshot.version] = snapshot.arrived
            while len(self._arrived) > _REMEMBERED:
                del self._arrived[next(iter(self._arrived))]
        self._acting = Acting(params, snapshot.version, bool(snapshot.params.get(CRITIC_CHOOSES, True)))

    def age(self, version: int, now: float) -> float:
        arrived = self._arrived.get(version)
        return -1.0 if arrived is None else max(0.0, now - arrived)

    def refresh(self) -> bool:
        """Swap in the source's newest snapshot where it is newer; returns whether there are parameters now.

        With a gate it is offered to that, and only the first one is swapped in here.
        """
        snapshot = None if self._source is None else self._source.latest()
        if snapshot is not None and snapshot.version > self.version:
            (run, normaliser), origin = self._origin, snapshot.origin
            if run in ("", origin.run) and origin.normaliser in ("", normaliser):
                if self.gate is not None:
                    self.gate.offer(snapshot)
                if self.gate is None or self._acting is None:
                    self.swap(snapshot)
        return self._acting is not None

    def choose_snapshot(self) -> bool:
        if self.gate is None:
            return False
        self.refresh()
        chosen = self.gate.draw()
        if chosen is not None and chosen.version != self.version:
            self.swap(chosen)
        return chosen is not None and chosen is self.gate.candidate

    def decide(self, request: Request) -> Decision:
        """Compute a chunk. Raises PolicyError before the first snapshot, and for an action that is not finite."""
        import jax

        row = self.prepare(request)
        if row.key is not None:
            decision = self.decide_each([row], explore=request.explore)[0]
            if isinstance(decision, PolicyError):
                raise decision
        else:
            acting, explore = self.acting, request.explore
            key = jax.random.fold_in(self._key, self._decisions)
            self._decisions += 1
            given = None if row.prefix is None else self._committed(row)
            inputs: Any = row.inputs
            chunk, record = jax.device_get(
                self.agent.sample(
                    acting.params, inputs, key, explore=explore, committed=given, alone=acting.alone(row.arm)
                )
            )
            decoded = self.preprocess.decode(row.state, chunk)
            decision = self._decision(row, decoded, chunk, record, acting.version)
        return decision._replace(tick=request.tick, epoch=request.epoch)

    def prepare(self, request: Request) -> Prepared:
        """Return a request as `decide_each` takes it; for any thread. Raises ConfigError for a bad task."""
        observation, prefix = request.observation, request.prefix
        inputs = self.preprocess.observe(observation, request.task)
        given = prefix if prefix is not None and len(prefix) else None
        return Prepared(observation[STATE], inputs, request.arm, request.key, given)

    def decide_each(
        self, rows: Sequence[Prepared], *, explore: bool = False, size: int = 0, acting: Acting | None = None
    ) -> list[Decision | PolicyError]:
        """Compute a chunk for each of several robots at once, or the error that one has.

        Each number of rows is compiled once; no row changes what another gets. Raises PolicyError before the first
        snapshot.

        Args:
            rows: all with keys of their own, or none. Those are computed BLOCK at a time.
            size: compute so many at a time, and fill up the last ones; 0: all `rows`.
            acting: decide by these parameters instead of the newest.
        """
        size = BLOCK if rows[0].key is not None else size or len(rows)
        acting, decisions = acting or self.acting, list[Decision | PolicyError]()
        for first in range(0, len(rows), size):
            decisions += self._decide_block(rows[first : first + size], size, acting, explore)
        return decisions

    def _decide_block(
        self, rows: Sequence[Prepared], size: int, acting: Acting, explore: bool
    ) -> Iterator[Decision | PolicyError]:
        import jax

        filled = [*rows, *[rows[0]] * (size - len(rows))]
        inputs: Any = self.preprocess.stacked([row.inputs for row in filled])
        if rows[0].key is None:
            keys = _folded_in()(self._key, self._decisions + np.arange(size))
            self._decisions += len(rows)
        else:
            keys = _keys_of()(np.array([row.key for row in filled], np.int64).astype(np.uint32))
        given = None
        if any(row.prefix is not None for row in rows):
            actions, mask = zip(*map(self._committed, filled), strict=True)
            given = np.stack(actions), np.stack(mask)
        alone = np.array([acting.alone(row.arm) for row in filled])
        chunks, record = jax.device_get(
            self.agent.decide(
                acting.params, inputs, keys, explore=explore, committed=given, alone=alone,
                rows=None if rows[0].key is None else len(rows),
            )
        )  # fmt: skip
        decoded = self.preprocess.decode(np.stack([row.state for row in rows]), chunks[: len(rows)])
        for i, row in enumerate(rows):
            own = {name: values[i] for name, values in record.items()}
            try:
                yield self._decision(row, decoded[i], chunks[i], own, acting.version)
            except PolicyError as error:
                yield error

    def _committed(self, row: Prepared) -> tuple[np.ndarray, np.ndarray]:
        """Return committed actions float32[H, A] in model space, and which are given, float32[H]."""
        h, prefix = self.preprocess.horizon, row.prefix
        committed = np.zeros((h, len(self._low)), np.float32)
        if prefix is not None:
            committed[: len(prefix)] = self.preprocess.encode(row.state, prefix)
        return committed, (np.arange(h) < (0 if prefix is None else len(prefix))).astype(np.float32)

    @property
    def acting(self) -> Acting:
        """The newest parameters. Raises PolicyError before the first snapshot."""
        if (acting := self._acting) is None:
            raise PolicyError("the policy has no parameters yet: wait for the learner's first snapshot, then decide")
        return acting

    def _decision(
        self, row: Prepared, decoded: np.ndarray, chunk: np.ndarray, record: dict[str, np.ndarray], version: int
    ) -> Decision:
        if row.prefix is not None:
            decoded[: len(row.prefix)] = row.prefix  # exactly what runs, not its image through encode and decode
        actions, clipped = self._limited(decoded, version)
        steps = int(record["steps"]) if "steps" in record else None
        return Decision(actions, {**record, "chunk": np.asarray(chunk)}, version, steps, clipped=clipped)


@functools.cache
def _folded_in() -> Callable[[jax.Array, np.ndarray], jax.Array]:
    """Return what folds each of several numbers into a key."""
    import jax

    return jax.jit(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))


@functools.cache
def _keys_of() -> Callable[[np.ndarray], jax.Array]:
    """Return what makes the key of each decision from its seed and number, uint32[N, 2]."""
    import jax

    def key(pair: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), pair[0]), pair[1])

    return jax.jit(jax.vmap(key))
