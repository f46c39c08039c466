"""The data shapes that cross rooms: records, specifications and training batches. Imports numpy alone."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from serl_chunk_robot.errors import ConfigError, DataError
from serl_chunk_robot.errors import SerlChunkError as SerlChunkError
from serl_chunk_robot.errors import UserCodeError as UserCodeError

STATE = "state"
IMAGE_PREFIX = "images/"
FEATURE_PREFIX = "features/"  # before a camera's name: what a frozen backbone made of its frame
REPEAT_PREFIX = "repeat/"  # before a camera's name, in a block of steps: ticks whose frames later steps repeat
HUMAN_DIMS = "human_dims"  # in a block of steps, uint8[M, A]: see Step.human_dims
DECISION_PREFIX = "decision/"  # of what a decision recorded, in a block of steps
CRITIC_CHOOSES = "critic_chooses"  # in a policy's parameters, bool[]: its critic may choose among candidates
SUCCESS_REWARD = 1.0  # the least reward of a success, see `success_step`
DEMO_SEED_BASE = 0  # start states of demonstrations
EVAL_SEED_BASE = 1_000_000  # of reported figures
VALIDATION_SEED_BASE = 2_000_000  # that checkpoints are chosen on
TRAINING_SEED_BASE = 3_000_000  # of training episodes, from here upwards: none is held out
PROMPT, PROMPT_MASK = "prompt", "prompt_mask"  # the task's text for networks: int32[L] tokens, bool[L] which are given

Array = Any  # a numpy array on the host or a JAX array on the device

Observation = dict[str, np.ndarray]
"""`state float32[S]`, and `images/<camera> uint8[H, W, 3]` on ticks where that camera was read."""


class Source(enum.IntEnum):
    """Who supplied an executed action."""

    POLICY = 0
    HUMAN = 1
    HOLD = 2  # neither: the last safe action was repeated, or a human held the robot without moving it
    SCRIPTED = 3
    RANDOM = 4


ONE, BEST = "one", "best"  # arms: the policy's first candidate acts, or the best of all


class Outcome(enum.StrEnum):
    """Result of an episode, as judged by environment, operator or data."""

    SUCCESS = "success"
    FAILURE = "failure"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class CameraSpec:
    """One camera of a robot: frames are `uint8[height, width, 3]`, RGB."""

    name: str
    height: int
    width: int


@dataclasses.dataclass(frozen=True)
class RobotSpec:
    """A robot as learner and actor must agree on it; needs no device to build.

    Args:
        control_hz: ticks per second.
        state_dim: S, the length of `observation["state"]`.
        action_low, action_high: limits of a command, in the robot's units, length A.
        joint_of_action: the state's index of the joint that each action dimension commands, -1 where none is measured
            (`relative` actions are absolute there).
        grippers: action dimensions that are grippers; always absolute.
        cameras: cameras an observation may carry.
        max_episode_steps: time limit T in ticks.
        arms: slices (first, past-last) of the action vector that one arm owns, for displays and plots.
    """

    name: str
    control_hz: float
    state_dim: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    joint_of_action: tuple[int, ...]
    grippers: tuple[int, ...]
    cameras: tuple[CameraSpec, ...]
    max_episode_steps: int
    arms: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        a = len(self.action_low)
        if len(self.action_high) != a or len(self.joint_of_action) != a:
            raise ConfigError(
                f"robot {self.name!r}: action_low, action_high and joint_of_action must have one length, "
                f"got {a}, {len(self.action_high)}, {len(self.joint_of_action)}"
            )
        if not all(lo < hi for lo, hi in zip(self.action_low, self.action_high, strict=True)):
            raise ConfigError(f"robot {self.name!r}: every action_low must be below its action_high")
        if max(self.joint_of_action, default=-1) >= self.state_dim:
            raise ConfigError(f"robot {self.name!r}: joint_of_action points past state_dim={self.state_dim}")

    @property
    def action_dim(self) -> int:
        return len(self.action_low)

    @property
    def dt(self) -> float:
        """Seconds per tick."""
        return 1.0 / self.control_hz

    def camera(self, name: str) -> CameraSpec:
        """Return the camera called `name`; raises ConfigError listing the valid names."""
        cameras = {c.name: c for c in self.cameras}
        if name not in cameras:
            raise ConfigError(f"robot {self.name!r} has no camera {name!r}. Valid: {', '.join(cameras) or 'none'}")
        return cameras[name]

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RobotSpec:
        values: dict[str, Any] = {k: (tuple(v) if isinstance(v, list) else v) for k, v in data.items()}
        values["cameras"] = tuple(CameraSpec(**c) for c in values["cameras"])
        values["arms"] = tuple(tuple(a) for a in values.get("arms", ()))
        return cls(**values)

    def digest(self) -> str:
        """Return sixteen hex digits that change when any field does."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]


class Begin(NamedTuple):
    """First record of an episode."""

    episode_id: str
    task: str = ""
    robot: str = ""
    specs_digest: str = ""
    init_state: str = ""  # id of the start state where a scheduler gave one
    ticket: str = ""  # whose slot it runs, see `Ticket.id`
    conditions: str = ""  # JSON, see `RobotEnv.conditions`; files and journals may be without it
    demonstration: bool = False  # streamed by `record --ip`, for the partition `demo`; on wire and in journals alone


MAX_TICKET_TEXT = 500  # characters of a ticket's task and of its init state: hundreds of tickets fit a message


class Ticket(NamedTuple):
    """The right to run one slot: an episode of a group, whose episodes share a start state and a policy."""

    iteration: int
    group: int  # of the iteration
    slot: int  # of the group
    attempt: int  # of the slot; a slot that gave no sample is handed out again, with the same seed
    task: str
    init_state: str  # see `RobotEnv.reset`
    version: int  # of the snapshot that decides in the whole episode
    seed: int  # a decision's key follows from it and the decision's number
    lease: float  # seconds that it is held for at most, from when it was handed out

    @property
    def id(self) -> str:
        return f"{self.iteration}.{self.group}.{self.slot}.{self.attempt}"


class Grant(NamedTuple):
    """The learner's answer to an actor that requests tickets."""

    tickets: tuple[Ticket, ...]  # the whole set that its session shall hold now: one that is not in it is withdrawn
    waiting: str = ""  # why it is to wait, in words; empty where nothing is lacking


class Step(NamedTuple):
    """One tick of an episode.

    `observation` is before the action; `action float32[A]` is the command the driver accepted, in the robot's units.
    `decision_tick` is the tick of the observation from which the executed chunk was computed, -1 unless `source` is
    POLICY; on that tick, `decision` holds what was recorded of the computation. `stamp` is monotonic seconds on the
    robot. `policy_age` is the seconds since the parameters of `policy_version` were complete on the robot, -1 without
    any. `lost_ticks` is above 0 after a gap alone: so many control periods passed that this step does not follow the
    one before it, and its observation may be from before the gap. `repeats`: for each camera that was read and is not
    in `observation`, the earlier tick of the episode that recorded the same frame. `human_dims bool[A]`: the numbers of
    the action that a human commanded, where `source` is HUMAN and the policy had the others. None: all, or none.
    """

    tick: int
    observation: Observation
    action: np.ndarray
    reward: float
    source: Source
    decision_tick: int
    policy_version: int
    stamp: float
    decision: dict[str, np.ndarray] | None = None
    policy_age: float = -1.0
    lost_ticks: int = 0
    repeats: dict[str, int] | None = None
    human_dims: np.ndarray | None = None


class End(NamedTuple):
    """Last record of an episode.

    Without `final_observation` (the actor died, or a gap was before it) the last step's observation serves as the final
    one, and that step starts and extends no window. `reward`, if given, corrects the last step's. `repeats`: see Step.
    `environment`: what the environment judged first, where `outcome.environment` hides that; None: it is not hidden.
    Kept in journals alone.
    """

    episode_id: str
    length: int  # steps, T
    final_observation: Observation | None
    terminated: bool
    truncated: bool
    outcome: Outcome
    outcome_by: str = "environment"
    reward: float | None = None
    repeats: dict[str, int] | None = None
    environment: Outcome | None = None


class Amend(NamedTuple):
    """A later correction of a closed episode; changes what is sampled from then on."""

    episode_id: str
    outcome: Outcome | None = None
    outcome_by: str = ""
    terminated: bool | None = None
    reward: float | None = None  # of the last step
    discard: bool = False

    def correct(self, end: End) -> End:
        """Return `end` with the fields that are given here; `discard` is the caller's to act on."""
        if self.outcome is not None:
            end = end._replace(outcome=self.outcome, outcome_by=self.outcome_by)
        if self.terminated is not None:
            end = end._replace(terminated=self.terminated, truncated=not self.terminated)
        return end if self.reward is None else end._replace(reward=self.reward)


class SparseRows(NamedTuple):
    """Values that exist on some steps of a block only: `values[k]` belongs to step `index[k]`."""

    index: np.ndarray  # type: ignore[assignment]  # int32[M], increasing, 0 <= index < N
    values: Any  # [M, ...]: an array, or images that are decoded when looked at (data.frames.Frames)


STEP_COLUMNS: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in (("reward", "float32"), ("source", "uint8"), ("decision_tick", "int32"),
                        ("policy_version", "int64"), ("policy_age", "float32"), ("stamp", "float64"),
                        ("lost_ticks", "int32"))
}  # fmt: skip
"""Fields of a StepBlock that have one value per step, and their dtypes."""


def gap_tolerance(period: float) -> float:
    """Return the seconds by which a tick of `period` seconds may be late; a later one comes after a gap."""
    return max(2 * period, 0.08)


@dataclasses.dataclass(frozen=True)
class StepBlock:
    """N >= 1 consecutive steps of one episode, in columns: the wire message, journal entry and replay row.

    `observation` holds the names present on every step (`state float32[N, S]`), `sparse` those present on some
    (`images/<camera>` uint8[M, H, W, 3], `decision/<name>`, `repeat/<camera>` int32[M] and `human_dims` uint8[M, A]:
    see `Step`). Step i of the block is tick `first_tick + i`.
    """

    episode_id: str
    first_tick: int
    observation: dict[str, np.ndarray]
    action: np.ndarray  # float32[N, A]
    reward: np.ndarray  # float32[N]
    source: np.ndarray  # uint8[N]
    decision_tick: np.ndarray  # int32[N]
    policy_version: np.ndarray  # int64[N]
    policy_age: np.ndarray  # float32[N]
    stamp: np.ndarray  # float64[N]
    lost_ticks: np.ndarray  # int32[N]
    sparse: dict[str, SparseRows] = dataclasses.field(default_factory=dict)

    @property
    def n(self) -> int:
        return len(self.action)

    @property
    def nbytes(self) -> int:
        """Bytes of its observations and actions; of images those that they have decoded."""
        sparse = sum(rows.values.nbytes for rows in self.sparse.values())
        return sum(v.nbytes for v in self.observation.values()) + self.action.nbytes + sparse

    @classmethod
    def from_steps(cls, episode_id: str, steps: list[Step]) -> StepBlock:
        """Stack consecutive `steps`; raises DataError on a gap in the ticks. A single step's arrays are not copied."""
        columns: dict[str, tuple[Any, ...]] = dict(zip(Step._fields, zip(*steps, strict=True), strict=True))
        first = steps[0].tick
        if columns["tick"] != tuple(range(first, first + len(steps))):
            raise DataError(f"steps of episode {episode_id} are not consecutive ticks")
        dense = [k for k in steps[0].observation if not k.startswith(IMAGE_PREFIX)]
        sparse: dict[str, dict[int, Any]] = {}
        for i, s in enumerate(steps):
            rows: dict[str, Any] = {k: v for k, v in s.observation.items() if k.startswith(IMAGE_PREFIX)}
            rows |= {DECISION_PREFIX + k: v for k, v in (s.decision or {}).items()}
            rows |= {REPEAT_PREFIX + k: np.int32(tick) for k, tick in (s.repeats or {}).items()}
            rows |= {} if s.human_dims is None else {HUMAN_DIMS: np.asarray(s.human_dims, np.uint8)}
            for key, value in rows.items():
                sparse.setdefault(key, {})[i] = value
        observation = {k: _stack([o[k] for o in columns["observation"]], np.float32) for k in dense}
        return cls(
            episode_id,
            first,
            observation,
            _stack(columns["action"], np.float32),
            **{name: np.array(columns[name], dtype) for name, dtype in STEP_COLUMNS.items()},
            sparse={k: SparseRows(np.array([*v], np.int32), _stack([*v.values()])) for k, v in sparse.items()},
        )

    @classmethod
    def join(cls, blocks: Sequence[StepBlock]) -> StepBlock:
        """Return consecutive blocks of an episode as one, by copies; JPEG images are decoded.

        Raises DataError where the names or the shapes of their arrays differ.
        """
        first, sparse = blocks[0], dict[str, SparseRows]()
        for key in dict.fromkeys(key for b in blocks for key in b.sparse):
            parts = [(b.first_tick - first.first_tick, b.sparse[key]) for b in blocks if key in b.sparse]
            if len({rows.values.shape[1:] for _, rows in parts}) > 1:
                raise DataError(f"{key} changes its shape within the episode")
            index = np.concatenate([before + rows.index for before, rows in parts]).astype(np.int32)
            sparse[key] = SparseRows(index, np.concatenate([rows.values for _, rows in parts]))
        names = list(first.observation)
        if any(list(b.observation) != names for b in blocks):
            raise DataError("the names of its observations change within the episode")
        sizes = {(b.action.shape[1:], *(b.observation[name].shape[1:] for name in names)) for b in blocks}
        if len(sizes) > 1:
            raise DataError("the sizes of its state or actions change within the episode")
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(b, name) for b in blocks]) for name in ("action", *STEP_COLUMNS)
        }
        observation = {k: np.concatenate([b.observation[k] for b in blocks]) for k in names}
        return dataclasses.replace(first, observation=observation, sparse=sparse, **columns)

    def observation_at(self, i: int) -> Observation:
        """Return the observation of step i, with the images that step carries."""
        images = {k: rows for k, rows in self.sparse.items() if k.startswith(IMAGE_PREFIX)}
        shown = {k: rows.values[at] for k, rows in images.items() for at in np.flatnonzero(rows.index == i)}
        return {k: v[i] for k, v in self.observation.items()} | shown

    def slice(self, start: int, stop: int) -> StepBlock:
        """Return steps `start <= i < stop` as a block of their own (views, not copies)."""
        sparse = {}
        for key, rows in self.sparse.items():
            keep = (rows.index >= start) & (rows.index < stop)
            if keep.any():
                sparse[key] = SparseRows((rows.index[keep] - start).astype(np.int32), rows.values[keep])
        columns: dict[str, Any] = {name: getattr(self, name)[start:stop] for name in ("action", *STEP_COLUMNS)}
        observation = {k: v[start:stop] for k, v in self.observation.items()}
        return dataclasses.replace(
            self, first_tick=self.first_tick + start, observation=observation, sparse=sparse, **columns
        )


def human_dims_fault(steps: StepBlock) -> str:
    """Return what is wrong with the rows of `human_dims` in `steps`, whose other arrays are sound; empty: nothing."""
    rows, width = steps.sparse.get(HUMAN_DIMS), steps.action.shape[1]
    if rows is None:
        return ""
    values = rows.values
    if values.dtype != np.uint8 or values.shape != (len(rows.index), width):
        return f"{HUMAN_DIMS} is {values.dtype}{list(values.shape)} (expected uint8[{len(rows.index)}, {width}])"
    for tick, row in zip((steps.first_tick + rows.index).tolist(), values.tolist(), strict=True):
        if max(row, default=0) != 1:
            return (
                f"{HUMAN_DIMS} is {row} on tick {tick} (expected 0 or 1 for each number of the action, not 0 for all)"
            )
    if others := (steps.source[rows.index] != Source.HUMAN).nonzero()[0].tolist():
        return (
            f"{HUMAN_DIMS} is given on tick {steps.first_tick + int(rows.index[others[0]])}, whose source is not HUMAN"
        )
    return ""


def _stack(rows: Sequence[np.ndarray], dtype: DTypeLike | None = None) -> np.ndarray:
    arrays = [np.asarray(row, dtype) for row in rows]
    return np.stack(arrays) if len(arrays) > 1 else arrays[0][None]


class Episode(NamedTuple):
    """A whole episode at rest."""

    begin: Begin
    steps: StepBlock
    end: End

    @property
    def rewards(self) -> np.ndarray:
        """float64[T] of the steps, the last one as `end.reward` corrects it."""
        rewards = self.steps.reward.astype(np.float64)
        if self.end.reward is not None:
            rewards[-1] = self.end.reward
        return rewards


def success_step(rewards: Sequence[float] | np.ndarray) -> int | None:
    """Return the first step whose reward marks a success, of an episode whose source reports none; None: there is none.

    Its reward is at least `SUCCESS_REWARD`; every other reward above 0 is as large, or, where it is 1, below 1. A dense
    reward that passes 1 marks none, nor does one that is paid from the first of several steps on.
    """
    values = np.asarray(rewards, np.float64)
    first = int(np.argmax(values >= SUCCESS_REWARD))
    success, others = values[first], values[(values > 0) & (values != values[first])]
    marks = success >= SUCCESS_REWARD and (not len(others) or (success == SUCCESS_REWARD and others.max() < success))
    return first if marks and (first > 0 or len(values) == 1) else None


Record = Begin | StepBlock | End | Amend


class ChunkBatch(NamedTuple):
    """B training windows in model space (normalised observations, chunks in about [-1, 1]).

    `actions[b, i]` is the action executed i ticks after the window's first observation; `valid` marks steps that exist.
    `rewards` are scaled, per step, 0 beyond the critic's return; `mask` is 0 where the task terminated inside its n
    steps; `discount_n` is gamma**n. L is the policy's H, or what the critic scores where that is more. All fields:
    docs/architecture/replay.md.
    """

    observations: dict[str, Array]  # state float32[B, S]; images/<camera> uint8[B, H, W, 3]; prompt, prompt_mask [B, L]
    actions: Array  # float32[B, L, A]
    valid: Array  # float32[B, L]
    rewards: Array  # float32[B, R]
    mask: Array  # float32[B]
    discount_n: Array  # float32[B]
    next_observations: dict[str, Array]
    bc_weight: Array  # float32[B, L]
    delay: Array  # int32[B]
    weight: Array  # float32[B]
    # float32[B, A]: executed on the tick before the window (its own first where there was none); None where not needed.
    prev_action: Array | None = None
    # float32[B, L, A]: 1 for the numbers of an action that are imitated where `bc_weight` is; None: all of them.
    bc_dims: Array | None = None
    # float32[B, S] and float32[B, L, A]: what imitation adds to the state and the actions (`agent.bc_joint_noise`).
    bc_state_shift: Array | None = None
    bc_action_shift: Array | None = None


class ShownRobot(NamedTuple):
    """The state of a robot's server as it is shown. What lets the robot move is requested for that of the key press."""

    generation: int
    controller: str = ""  # who holds the lease, and in which process
    process: str = ""
    held_by: str = ""  # empty: it is not HELD
    held_s: float = 0.0  # seconds for which it is


class PolicyOrigin(NamedTuple):
    """Run and normaliser that policy parameters belong to: with another one's they mean something else."""

    run: str = ""  # id of the run; empty within one process
    normaliser: str = ""  # `Normaliser.digest()` of the one they were trained with; empty: not stated


class Snapshot(NamedTuple):
    """Published policy parameters: flat `path -> array`. Its identity is (run, version)."""

    version: int  # never goes back within a run
    params: dict[str, np.ndarray]
    arrived: float | None = None  # monotonic seconds at which an actor had all of it
    origin: PolicyOrigin = PolicyOrigin()


class RecordSink(Protocol):
    """Receives the records of an actor, in order; no call may block the control thread."""

    def begin(self, record: Begin) -> None: ...
    def step(self, record: Step) -> None: ...
    def end(self, record: End) -> None: ...


class SnapshotSource(Protocol):
    """Provides the newest policy parameters."""

    def latest(self) -> Snapshot | None:
        """Return the newest complete snapshot, or None before the first."""
