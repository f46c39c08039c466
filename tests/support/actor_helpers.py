"""Small stand-ins for the actor's tests: a robot, an agent, a sink, and a simulated clock with inference on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from serl_chunk.actor.policy import Decision, LocalPolicy, Request
from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.experiment import ActorConfig, ChunkConfig, ExperimentConfig, RewardConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.robots.base import InterventionCommand, RobotEnv
from serl_chunk.types import IMAGE_PREFIX, STATE, CameraSpec, End, Observation, RobotSpec, Snapshot, Source, Step

DT = 0.02
SPEC = RobotSpec(
    name="line",
    control_hz=1 / DT,
    state_dim=3,  # two joints, and the tick
    action_low=(-1.0, -1.0),
    action_high=(1.0, 1.0),
    joint_of_action=(0, 1),
    grippers=(),
    cameras=(CameraSpec("front", 8, 10), CameraSpec("wrist", 6, 5)),
    max_episode_steps=30,
)


class SimClock:
    """Time that passes only when it is spent. A sleep ends late by the next of `oversleep` seconds."""

    def __init__(self, oversleep: Iterable[float] = ()) -> None:
        self.time = 100.0
        self._oversleep = iter(oversleep)

    def now(self) -> float:
        return self.time

    def sleep_until(self, moment: float) -> None:
        self.time = max(self.time, moment) + next(self._oversleep, 0.0)


class LineEnv(RobotEnv):
    """Joints go where they are commanded. What happens on which tick is given; `costs` are seconds per step."""

    def __init__(
        self, *, length: int = 30, success_at: int | None = None, failure_at: int | None = None,
        terminated_at: int | None = None, crash_at: int | None = None, human: dict[int, np.ndarray] | None = None,
        shown: bool = False, gate: float = 10.0, clock: SimClock | None = None, costs: Iterable[float] = (),
        spec: RobotSpec = SPEC,
    ) -> None:  # fmt: skip
        self._set_spaces(spec, "on_request")
        self.length, self.success_at, self.failure_at, self.crash_at = length, success_at, failure_at, crash_at
        self.terminated_at = terminated_at
        self.shown = shown  # whether frames of what the human acted on are kept
        self.human, self.gate, self.clock, self.costs = human or {}, gate, clock, iter(costs)
        self.seeds: list[int | None] = []
        self.frames_read: list[int] = []  # ticks
        self.tick = 0
        self._buffer = np.zeros(3, np.float32)  # reused, as a driver may

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.tick = 0
        self._buffer[:] = (*self.np_random.uniform(-0.5, 0.5, 2), 0)
        return {STATE: self._buffer}, {}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        assert action.dtype == np.float32
        assert (np.abs(action) <= 1).all()
        if self.tick == self.crash_at:
            raise RuntimeError("the motor is gone")
        info: dict[str, Any] = {}
        if self.tick in self.human:
            action = info["intervene_action"] = self.human[self.tick]
            if self.shown:
                info["intervene_images"] = self._frames(self.tick)
        executed = np.clip(action, -self.gate, self.gate)
        if not np.array_equal(executed, action):
            info["executed_action"] = executed
        if self.clock is not None:
            self.clock.time += next(self.costs, 0.0)
        self._buffer[:2] = executed
        success = info["success"] = self.tick == self.success_at
        if self.tick == self.failure_at:
            info["failure"] = True
        terminated = success or self.tick == self.terminated_at
        self.tick += 1
        self._buffer[2] = self.tick
        return {STATE: self._buffer}, float(success), terminated, self.tick >= self.length, info

    def read_images(self, cameras: Sequence[str] | None = None) -> Observation:
        self.frames_read.append(self.tick)
        return self._frames(self.tick, cameras)

    def _frames(self, tick: int, cameras: Sequence[str] | None = None) -> Observation:
        names = [c.name for c in SPEC.cameras] if cameras is None else cameras
        return {
            IMAGE_PREFIX + n: np.full((SPEC.camera(n).height, SPEC.camera(n).width, 3), tick, np.uint8) for n in names
        }


class LineOfTasks(LineEnv):
    """Two tasks."""

    tasks = ("push", "lift")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        self._begin_task(seed, options or {})
        return observation, info


class NoisyAgent:
    """Chunks of noise around 0 that tell the tick they were decided on; the prefix is clamped.

    `asks(tick)`, where given, is how many steps of it the decision of that tick asks for.
    """

    def __init__(self, horizon: int, spread: float = 0.1, asks: Callable[[int], int] | None = None) -> None:
        self.horizon, self.spread, self.asks = horizon, spread, asks
        self.prefixes: dict[int, np.ndarray] = {}  # tick -> the d committed actions of its latest decision
        self.explored: set[bool] = set()
        self.loaded: list[int] = []
        self.alone: list[bool] = []  # of each decision

    def load_params(self, flat: dict[str, np.ndarray]) -> float:
        self.loaded.append(int(flat["bias"]))
        return float(flat["bias"])

    def sample(
        self, params: float, observation: dict[str, Any], key: Any,
        *, explore: bool, committed: Any = None, alone: bool = False,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:  # fmt: skip
        tick = round(float(observation[STATE][2]))
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        chunk = rng.normal(0, self.spread if explore else 0, (self.horizon, 2))
        chunk[:, 1] = tick / 64  # exact in float32
        self.explored.add(explore)
        self.alone.append(alone)
        if committed is not None:
            actions, mask = committed
            chunk = np.where(mask[:, None] > 0, actions, chunk).astype(np.float32)
            self.prefixes[tick] = actions[mask > 0]
        else:
            self.prefixes[tick] = np.zeros((0, 2), np.float32)
        asked = {} if self.asks is None else {"steps": np.int32(self.asks(tick))}
        return chunk.astype(np.float32), {"q": np.float32(tick), **asked}

    def decide(
        self, params: float, observations: dict[str, Any], keys: Any,
        *, explore: bool, committed: Any = None, alone: np.ndarray, rows: int | None = None,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:  # fmt: skip
        """As `sample` of each row; those that only fill the others up are copies, and computed once."""
        made: dict[bytes, tuple[np.ndarray, dict[str, np.ndarray]]] = {}
        rows = []
        for i, key in enumerate(keys):
            observation = {name: values[i] for name, values in observations.items()}
            row = np.asarray(jax.random.key_data(key)).tobytes() + observation[STATE].tobytes()
            if row not in made:
                own = None if committed is None else tuple(each[i] for each in committed)
                made[row] = self.sample(params, observation, key, explore=explore, committed=own, alone=bool(alone[i]))
            rows.append(made[row])
        return np.stack([chunk for chunk, _ in rows]), {k: np.stack([r[k] for _, r in rows]) for k in rows[0][1]}


class ListSink:
    """Keeps every record in order."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    begin = step = end = amend = lambda self, record: self.records.append(record)

    @property
    def steps(self) -> list[Step]:
        return [r for r in self.records if isinstance(r, Step)]

    @property
    def last_end(self) -> End:
        assert isinstance(self.records[-1], End)
        return self.records[-1]


class SimInference:
    """`InferenceThread` on a simulated clock: one decision at a time, each taking the next of `latencies` seconds."""

    def __init__(self, policy: LocalPolicy, clock: SimClock, latencies: Iterable[float]) -> None:
        self._policy, self._clock, self._latencies = policy, clock, iter(latencies)
        self._running: tuple[float, Request] | None = None
        self._pending: Request | None = None
        self._result: Decision | None = None
        self.submitted = 0

    def submit(self, request: Request) -> None:
        self.submitted += 1
        self._pending = request
        self._advance(self._clock.now())

    def flush(self) -> None:
        self._advance(self._clock.now())
        self._pending = self._result = None

    def poll(self) -> Decision | None:
        self._advance(self._clock.now())
        result, self._result = self._result, None
        return result

    def wait(self, moment: float) -> Decision | None:
        self._advance(self._clock.now())
        if self._result is None:
            ready = self._running[0] if self._running else moment
            self._clock.sleep_until(min(ready, moment))
        return self.poll()

    def close(self) -> None:
        pass

    def _advance(self, now: float) -> None:
        free = now
        while True:
            if self._running is not None:
                free, request = self._running
                if free > now:
                    return
                self._result = self._policy.decide(request)
                self._running = None
            if self._pending is None:
                return
            self._running, self._pending = (free + next(self._latencies, 0.005), self._pending), None


@dataclasses.dataclass
class HumanOnTicks:
    """In control of `dims`, or of all, on `ticks`, without moving on `idle`."""

    ticks: frozenset[int]
    idle: frozenset[int] = frozenset()
    dims: np.ndarray | None = None
    asked: list[tuple[int, bool]] = dataclasses.field(default_factory=list)

    def reset(self, seed: int) -> None:
        self.asked.clear()

    def poll(
        self, tick: int, observation: Observation, decision_tick: bool, last: np.ndarray
    ) -> InterventionCommand | None:
        self.asked.append((tick, decision_tick))
        if tick not in self.ticks:
            return None
        return InterventionCommand(np.array([0.9, -0.9], np.float32), idle=tick in self.idle, dims=self.dims)

    def close(self) -> None:
        pass


def identity_normaliser(horizon: int) -> Normaliser:
    """Model space equals the robot's units."""
    one, zero = np.ones((horizon, 2), np.float32), np.zeros((horizon, 2), np.float32)
    return Normaliser(
        "absolute_range", np.zeros(3, np.float32), np.ones(3, np.float32), zero, one, np.full(2, -1, np.int32)
    )


def make_config(
    *, horizon: int = 8, execute: int | None = None, failure_reward: float = 0.0, actor: ActorConfig | None = None
) -> ExperimentConfig:
    """An experiment around the line robot; where execution is adaptive, the critics are such as could ask for that."""
    adaptive = actor is not None and actor.adaptive_execution
    lengths = execute or horizon
    return ExperimentConfig(
        name="line",
        robot=GymConfig(make=lambda fake_env: None),
        agent=DecoupledConfig(prefix_lengths=lengths, replan_spread=0.1) if adaptive else AcfqlConfig(),
        chunk=ChunkConfig(horizon, critic_horizon=horizon + 1 if adaptive else 1, execute_steps=execute),
        reward=RewardConfig(failure_reward=failure_reward),
        actor=actor or ActorConfig(),
    )


def identity(horizon: int, *cameras: str) -> Preprocess:
    """An agent's inputs and outputs are the robot's."""
    return Preprocess(identity_normaliser(horizon), tuple(map(SPEC.camera, cameras)))


def make_policy(agent: NoisyAgent, *, seed: int = 0, image_keys: tuple[str, ...] = (), **kwargs: Any) -> LocalPolicy:
    """A policy with its first parameters, version 3."""
    policy = LocalPolicy(agent, identity(agent.horizon, *image_keys), SPEC, seed=seed, **kwargs)
    policy.swap(Snapshot(3, {"bias": np.float32(3)}))
    return policy


def check_steps(steps: list[Step], execute: int, human: frozenset[int] = frozenset()) -> None:
    """What holds for the steps of any episode, whatever inference took; a human acted on ticks `human`."""
    assert [s.tick for s in steps] == list(range(len(steps)))
    for before, s in zip([None, *steps], steps, strict=False):
        if s.source == Source.POLICY:
            index = s.tick - s.decision_tick
            assert 0 <= index < execute
            decided = steps[s.decision_tick].decision
            assert decided is not None, f"tick {s.tick} executes a chunk whose decision was not recorded"
            np.testing.assert_array_equal(s.action, np.clip(decided["chunk"][index], -1, 1))
        else:
            assert s.decision_tick == -1
        if s.source == Source.HOLD and before is not None and s.tick not in human:
            np.testing.assert_array_equal(s.action, before.action)


def chunk_starts(steps: list[Step]) -> Iterator[Step]:
    """The first executed step of every chunk."""
    previous = -1
    for s in steps:
        if s.source == Source.POLICY and s.decision_tick != previous:
            previous = s.decision_tick
            yield s
