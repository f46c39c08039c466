"""The acting policy: an agent's parameters and the transforms, from raw observation to robot-unit chunk."""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable, Iterable, Sequence
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


class _Acting(NamedTuple):
    """Parameters and their version, replaced together: a decision uses one pair to its end."""

    params: Any
    version: int
    critic_chooses: bool

    def alone(self, arm: str) -> bool:
        """Return whether the first candidate acts in an episode of `arm`; see `Request`."""
        return arm == ONE if arm else not self.critic_chooses


class Prepared(NamedTuple):
    """An observation as an agent reads it."""

    state: np.ndarray  # raw, float32[S]
    inputs: Observation
    arm: str = ""  # see `Request`


class Policy(abc.ABC):
    """Base of the policies: they decide, and their chunks stay within a robot's limits."""

    image_keys: tuple[str, ...]
    """Cameras whose frames a request has."""

    def __init__(self, spec: RobotSpec) -> None:
        self.values = self.clipped = 0  # H * A values decided so far, and how many of them were clipped
        self._low, self._high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
        # Decoding an action on the limit exactly may miss it by rounding; that is not clipping.
        self._slack = 1e-5 * (self._high - self._low)

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """Of the newest parameters; -1 before the first."""

    gate: Canary | None = None
    """What a newer snapshot passes before it acts in every episode; None: it acts at once."""

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

    def _limited(self, decoded: np.ndarray, version: int) -> np.ndarray:
        """Return a chunk float32[H, A] of the robot's units within its limits. Raises PolicyError: not finite."""
        if not np.isfinite(decoded).all():
            raise PolicyError(
                f"policy version {version} gave an action that is not finite: its training has diverged. Stop "
                "the run, and resume it from an earlier checkpoint"
            )
        beyond = (decoded < self._low - self._slack) | (decoded > self._high + self._slack)
        self.values += decoded.size
        self.clipped += int(np.count_nonzero(beyond))
        return np.clip(decoded, self._low, self._high)


class ChunkPolicy(Policy):
    """Decides with its newest parameters.

    The random key of decision number n is `fold_in(key(seed), n)`. One thread at a time decides; another one may
    `refresh` meanwhile.

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
        self._acting: _Acting | None = None
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
        self._acting = _Acting(params, snapshot.version, bool(snapshot.params.get(CRITIC_CHOOSES, True)))

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

        observation, tick, epoch, explore, prefix, task, arm = request
        acting = self._ready()
        state = observation[STATE]
        inputs: Any = self.preprocess.observe(observation, task)
        key = jax.random.fold_in(self._key, self._decisions)
        self._decisions += 1
        encoded = None
        if prefix is not None and len(prefix):
            committed = np.zeros((self.preprocess.horizon, prefix.shape[1]), np.float32)
            committed[: len(prefix)] = self.preprocess.encode(state, prefix)
            encoded = committed, (np.arange(len(committed)) < len(prefix)).astype(np.float32)
        chunk, record = jax.device_get(
            self.agent.sample(acting.params, inputs, key, explore=explore, committed=encoded, alone=acting.alone(arm))
        )
        decoded = self.preprocess.decode(state, chunk)
        if prefix is not None:
            decoded[: len(prefix)] = prefix  # exactly what runs, not its image through encode and decode
        return self._decision(decoded, chunk, record, acting.version)._replace(tick=tick, epoch=epoch)

    def prepare(self, observation: Observation, task: str = "", arm: str = "") -> Prepared:
        """Return an observation as `decide_each` takes it; for any thread. Raises ConfigError for a bad task."""
        return Prepared(observation[STATE], self.preprocess.observe(observation, task), arm)

    def decide_each(self, rows: Sequence[Prepared], *, explore: bool = False) -> list[Decision | PolicyError]:
        """Compute a chunk for each of several robots at once, or the error that one has.

        Each number of rows is compiled once; no row changes what another gets. Raises PolicyError before the first
        snapshot.
        """
        import jax

        acting = self._ready()
        inputs: Any = self.preprocess.stacked([row.inputs for row in rows])
        keys = _folded_in()(self._key, np.arange(self._decisions, self._decisions + len(rows)))
        self._decisions += len(rows)
        alone = np.array([acting.alone(row.arm) for row in rows])
        chunks, record = jax.device_get(self.agent.decide(acting.params, inputs, keys, explore=explore, alone=alone))
        decisions: list[Decision | PolicyError] = []
        for i, row in enumerate(rows):
            own = {name: values[i] for name, values in record.items()}
            try:
                decoded = self.preprocess.decode(row.state, chunks[i])
                decisions.append(self._decision(decoded, chunks[i], own, acting.version))
            except PolicyError as error:
                decisions.append(error)
        return decisions

    def _ready(self) -> _Acting:
        if (acting := self._acting) is None:
            raise PolicyError("the policy has no parameters yet: wait for the learner's first snapshot, then decide")
        return acting

    def _decision(
        self, decoded: np.ndarray, chunk: np.ndarray, record: dict[str, np.ndarray], version: int
    ) -> Decision:
        actions = self._limited(decoded, version)
        steps = int(record["steps"]) if "steps" in record else None
        return Decision(actions, {**record, "chunk": np.asarray(chunk)}, version, steps)


@functools.cache
def _folded_in() -> Callable[[jax.Array, np.ndarray], jax.Array]:
    """Return what folds each of several numbers into a key."""
    import jax

    return jax.jit(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))
