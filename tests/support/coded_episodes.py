"""Episodes whose arrays say which episode and step they belong to, and a checker that reads it back from batches.

The expectations here are written step by step, without the code under test.
"""

import dataclasses

import numpy as np

from serl_chunk.config.agents.acfql import DecoupledConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, ReplayConfig, RewardConfig
from serl_chunk.config.robots import RobotConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.data.prompts import make_prompts
from serl_chunk.replay.replay import Replay
from serl_chunk.types import Begin, CameraSpec, ChunkBatch, End, Episode, Outcome, RobotSpec, Source, Step, StepBlock

LIMIT = 40  # steps of the longest episode
SPEC = RobotSpec(
    name="coded", control_hz=50.0, state_dim=3, action_low=(-1.0, -1.0), action_high=(1.0, 1.0),
    joint_of_action=(-1, 1), grippers=(0,), cameras=(CameraSpec("a", 2, 4), CameraSpec("b", 3, 2)),
    max_episode_steps=LIMIT,
)  # fmt: skip
ENDS = ("success", "failure", "limit", "died", "terminated_without_observation")


def config(
    horizon=6, critic_horizon=4, return_steps=None, *, scale=0.5, offset=0.25, failure_reward=0.75, **replay
) -> ExperimentConfig:
    """Powers of two, so that every number below is exact in float32."""
    return ExperimentConfig(
        name="coded",
        robot=RobotConfig(max_episode_steps=LIMIT),
        agent=DecoupledConfig() if (critic_horizon or 0) > horizon else AcrlpdConfig(),
        chunk=ChunkConfig(horizon, critic_horizon, return_steps=return_steps),
        replay=ReplayConfig(
            **{"capacity": 20_000, "demo_capacity": 20_000, "human_capacity": 2_000, "exclude_before_takeover": 0.06}
            | replay
        ),
        reward=RewardConfig(scale, offset, failure_reward),
        discount=0.5,
    )


def normaliser(horizon: int) -> Normaliser:
    """Dimension 0 absolute, dimension 1 relative to state[1]; every parameter differs from the identity."""
    centre = np.stack([np.arange(horizon), -np.arange(horizon)], 1).astype(np.float32)
    scale = np.tile(np.array([2.0, 4.0], np.float32), (horizon, 1))
    mean, std = np.array([8, -4, 2], np.float32), np.array([2, 0.5, 4], np.float32)
    return Normaliser("relative", mean, std, centre, scale, np.array([-1, 1], np.int32))


def preprocess(cfg: ExperimentConfig, image_keys: tuple[str, ...] = (), spec: RobotSpec = SPEC) -> Preprocess:
    """The transforms of `normaliser`, with cameras, and prompts where the agent reads language."""
    return Preprocess(
        normaliser(cfg.chunk.carried), tuple(map(spec.camera, image_keys)), make_prompts(cfg, spec.state_dim)
    )


@dataclasses.dataclass
class Coded:
    """One episode: `number` and ticks are in every array, `reads[c]` are the ticks on which camera c was read."""

    number: int
    length: int
    end: str
    source: np.ndarray
    reads: list[set[int]]
    session: str = "s"
    demonstration: bool = False
    terminated: bool = False
    outcome: Outcome = Outcome.UNKNOWN
    last_reward: float | None = None
    lost: dict[int, int] = dataclasses.field(default_factory=dict)  # tick -> control periods lost before it
    # tick -> the numbers of the action, 1 or 0, that a human commanded where the policy had the others
    shared: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.terminated = self.end in ("success", "failure", "terminated_without_observation")
        self.outcome = {"success": Outcome.SUCCESS, "failure": Outcome.FAILURE}.get(self.end, Outcome.UNKNOWN)

    @property
    def episode_id(self) -> str:
        return f"e{self.number}"

    @property
    def has_final(self) -> bool:
        return self.end not in ("died", "terminated_without_observation")

    def observation(self, tick: int) -> dict[str, np.ndarray]:
        out = {"state": np.array([self.number, tick, self.number + 2 * tick], np.float32)}
        for c, camera in enumerate(SPEC.cameras):
            if tick in self.reads[c]:
                image = np.zeros((camera.height, camera.width, 3), np.uint8)
                image[0, 0] = self.number // 256, self.number % 256, tick
                image[-1, -1] = c + 1, tick, self.number % 256
                out[f"images/{camera.name}"] = image
        return out

    def reward(self, tick: int) -> float:
        if tick == self.length - 1 and self.last_reward is not None:
            return self.last_reward
        return self.number % 512 * 64.0 + tick

    def decision_tick(self, tick: int) -> int:
        """Decisions every 5 ticks, whose actions start two ticks later."""
        return (tick - 2) // 5 * 5 if self.source[tick] == Source.POLICY and tick >= 2 else -1

    def step(self, tick: int) -> Step:
        return Step(
            tick=tick, observation=self.observation(tick), action=np.array([self.number, tick], np.float32),
            reward=self.number % 512 * 64.0 + tick, source=Source(int(self.source[tick])),
            decision_tick=self.decision_tick(tick), policy_version=self.number, policy_age=tick / 8,
            stamp=(tick + sum(n for t, n in self.lost.items() if t <= tick)) / 50, lost_ticks=self.lost.get(tick, 0),
            human_dims=np.array(self.shared[tick], np.bool_) if tick in self.shared else None,
        )  # fmt: skip

    def records(self, rng: np.random.Generator) -> list:
        """Begin, steps in blocks of random size, End."""
        steps = [self.step(t) for t in range(self.length)]
        blocks = []
        while steps:
            n = int(rng.integers(1, 6))
            blocks.append(StepBlock.from_steps(self.episode_id, steps[:n]))
            steps = steps[n:]
        return [Begin(self.episode_id), *blocks, self.end_record()]

    def end_record(self) -> End:
        return End(
            self.episode_id, self.length, self.observation(self.length) if self.has_final else None, self.terminated,
            not self.terminated, self.outcome, reward=self.last_reward,
        )  # fmt: skip

    def episode(self) -> Episode:
        steps = StepBlock.from_steps(self.episode_id, [self.step(t) for t in range(self.length)])
        return Episode(Begin(self.episode_id), steps, self.end_record())

    def last(self) -> int:
        """Tick of the last observation a window may end on."""
        return self.length if self.has_final or self.terminated else self.length - 1

    def frame(self, c: int, tick: int) -> int:
        """Tick of camera c's newest frame at `tick`, or -1; an observation that was never made repeats the last."""
        tick = tick if self.has_final else min(tick, self.length - 1)
        return max((t for t in self.reads[c] if t <= tick), default=-1)

    def weights(self, bc_on: str, exclude: int) -> list[float]:
        """Imitation weight of every step."""
        begins, held = [], False
        for t, s in enumerate(self.source.tolist()):
            if s == Source.HUMAN and not held:
                begins.append(t)
            held = s == Source.HUMAN or (held and s == Source.HOLD)
        out = []
        for t, s in enumerate(self.source.tolist()):
            doubtful = any(t < k <= t + exclude for k in begins)
            good = self.outcome == Outcome.SUCCESS and s == Source.POLICY and not doubtful and not self.demonstration
            chosen = {
                "all": True,
                "demo": self.demonstration,
                "demo+interventions": self.demonstration or s == Source.HUMAN,
                "+successes": self.demonstration or s == Source.HUMAN or 0.2 * good,
                "interventions": s == Source.HUMAN,
            }[bc_on]
            failed = self.demonstration and self.outcome == Outcome.FAILURE
            out.append(float(chosen) * (s != Source.HOLD and not failed))
        return out

    def imitated(self, bc_on: str, exclude: int) -> np.ndarray:
        """Imitation weight of each number of the action of every step, [T, 2]."""
        both = {
            "all": True,
            "demo": self.demonstration,
            "demo+interventions": self.demonstration,
            "+successes": self.demonstration,
            "interventions": False,
        }[bc_on]
        weights = self.weights(bc_on, exclude)
        return np.array(
            [[w * (both or of_human) for of_human in self.shared.get(t, (1, 1))] for t, w in enumerate(weights)]
        )

    def stop(self, t: int) -> int:
        """Tick of the last observation that a window from tick t may end on."""
        return min([self.last(), *(g - 1 for g in self.lost if g >= t)])

    def starts(self, cfg: ExperimentConfig, image_keys: tuple[str, ...]) -> set[int]:
        """Ticks at which a window may start."""
        full, out = cfg.chunk.returned, set()
        for t in range(self.last()):
            end = min(t + full, self.last())
            terminal = self.terminated and end == self.length
            if any(t <= g <= end for g in self.lost):
                continue
            if end - t < full and not (terminal and cfg.replay.terminal_windows == "keep"):
                continue
            needed = [t] if terminal else [t, end]
            cameras = [c for c, cam in enumerate(SPEC.cameras) if cam.name in image_keys]
            frames = [(self.frame(c, k), k) for c in cameras for k in needed]
            if all(f >= 0 and k - f <= cfg.replay.max_image_age for f, k in frames):
                out.add(t)
        return out


def make(
    rng: np.random.Generator, number: int, *, human: bool = True, every_frame: bool = False, gaps: bool = False,
    shared: bool = False, **kw,
) -> Coded:  # fmt: skip
    """A random episode; `human` adds interventions, with idle ticks; cameras miss ticks unless `every_frame`.

    `gaps`: every second one has some, which are drawn apart from the rest. So are the numbers that a human commanded
    with `shared`, on some of the human ticks.
    """
    length = int(rng.integers(1, LIMIT + 1))
    source = np.full(length, Source.POLICY, np.uint8)
    source[rng.random(length) < 0.1] = Source.HOLD
    if human:
        for _ in range(int(rng.integers(0, 3))):
            a = int(rng.integers(length))
            source[a : a + int(rng.integers(1, 8))] = Source.HUMAN
            source[a + 2 : a + 4] = np.where(source[a + 2 : a + 4] == Source.HUMAN, Source.HOLD, source[a + 2 : a + 4])
    every = [1.0 if every_frame else 0.8] * len(SPEC.cameras)
    reads = [{t for t in range(length + 1) if rng.random() < share} for share in every]
    kw.setdefault("end", str(rng.choice(ENDS)))
    if gaps and number % 2:
        own = np.random.default_rng(number)
        kw["lost"] = {int(t): int(own.integers(5, 200)) for t in own.integers(length, size=own.integers(1, 5))}
    if shared:
        own = np.random.default_rng(number + 10**6)
        human = np.flatnonzero((source == Source.HUMAN) & (own.random(length) < 0.6))
        kw["shared"] = {int(t): ((1, 0), (0, 1), (1, 1))[own.integers(3)] for t in human}
    return Coded(number=number, length=length, source=source, reads=reads, **kw)


def feed(replay: Replay, episodes: list[Coded], rng: np.random.Generator) -> None:
    """Insert online episodes, those of different sessions interleaved record by record."""
    queues: dict[str, list] = {}
    for e in episodes:
        queues.setdefault(e.session, []).extend(e.records(rng))
    while queues:
        session = str(rng.choice(sorted(queues)))
        replay.insert(session, queues[session].pop(0))
        if not queues[session]:
            del queues[session]


class Checker:
    """Decodes batches against the episodes they claim to come from."""

    def __init__(self, episodes: list[Coded], cfg: ExperimentConfig, *, image_keys=("a", "b"), bc_on="+successes"):
        self.cfg, self.image_keys, self.norm = cfg, image_keys, normaliser(cfg.chunk.carried)
        self.episodes = {e.number: e for e in episodes}
        n, width = max(self.episodes) + 1, LIMIT + max(cfg.chunk.carried, cfg.chunk.returned) + 2
        self.last, self.length = np.zeros(n, int), np.zeros(n, int)
        self.terminated, self.demo, self.final = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
        self.reward, self.bc_weight = np.zeros((n, width), np.float32), np.zeros((n, width), np.float32)
        self.open_bc = np.zeros((n, width), np.float32)  # while the outcome is not known
        self.bc_dims, self.open_bc_dims = np.zeros((n, width, 2), np.float32), np.zeros((n, width, 2), np.float32)
        self.source = np.full((n, width), Source.HOLD, np.uint8)
        self.decision = np.full((n, width), -1)
        self.frame = np.full((n, len(SPEC.cameras), width), -1)
        self.starts = np.zeros((n, width), bool)
        self.stop = np.zeros((n, width), int)
        for e in episodes:
            k, t = e.number, e.length
            self.last[k], self.length[k], self.terminated[k] = e.last(), t, e.terminated
            self.demo[k], self.final[k] = e.demonstration, e.has_final
            r = cfg.reward
            self.reward[k, :t] = [e.reward(i) * r.scale + r.offset for i in range(t)]
            if e.terminated and e.outcome == Outcome.FAILURE:
                self.reward[k, t - 1] = r.failure_reward
            self.stop[k, :t] = [e.stop(i) for i in range(t)]
            exclude = round(cfg.replay.exclude_before_takeover * SPEC.control_hz)
            self.bc_weight[k, :t] = e.weights(bc_on, exclude)
            self.open_bc[k, :t] = dataclasses.replace(e, end="limit").weights(bc_on, exclude)
            self.bc_dims[k, :t] = e.imitated(bc_on, exclude)
            self.open_bc_dims[k, :t] = dataclasses.replace(e, end="limit").imitated(bc_on, exclude)
            self.source[k, :t] = e.source
            self.decision[k, :t] = [e.decision_tick(i) for i in range(t)]
            for c in range(len(SPEC.cameras)):
                self.frame[k, c, : t + 1] = [e.frame(c, i) for i in range(t + 1)]
            for s in e.starts(cfg, image_keys):
                self.starts[k, s] = True

    def windows(self) -> set[tuple[int, int]]:
        """(episode, tick) of every window that may be sampled."""
        return {(int(k), int(t)) for k, t in zip(*np.nonzero(self.starts), strict=True)}

    def check(self, batch: ChunkBatch, *, writing: bool = False) -> set[tuple[int, int]]:
        """Assert every number of `batch`; returns its windows as (episode, tick). `writing`: records still come in."""
        h, r = self.cfg.chunk.carried, self.cfg.chunk.returned
        state = batch.observations["state"] * self.norm.state_std + self.norm.state_mean
        ep, t = state[:, 0].astype(int), state[:, 1].astype(int)
        np.testing.assert_array_equal(state[:, 2], ep + 2 * t)
        assert self.starts[ep, t].all(), "a window that may not be sampled"
        i = np.arange(h)
        at = t[:, None] + i
        n = np.minimum(r, self.stop[ep, t] - t)
        reach = np.minimum(h, self.stop[ep, t] - t)
        count = batch.valid.sum(1).astype(int)
        np.testing.assert_array_equal(batch.valid, i < count[:, None])
        if writing:  # an open episode shows fewer steps beyond the return's, never more
            assert ((count >= np.minimum(n, h)) & (count <= reach)).all()
        else:
            np.testing.assert_array_equal(count, reach)
        valid = batch.valid > 0
        executed = batch.actions * self.norm.scale + self.norm.centre
        executed[..., 1] += t[:, None]
        np.testing.assert_array_equal(executed[..., 0], np.broadcast_to(ep[:, None], (len(ep), h)))
        np.testing.assert_array_equal(executed[..., 1], t[:, None] + np.minimum(i, count[:, None] - 1))
        assert (batch.prev_action is None) != self.cfg.agent.gripper.reads_before
        if batch.prev_action is not None:
            earlier = batch.prev_action * self.norm.scale[0] + self.norm.centre[0] + np.stack([0 * t, t], 1)
            np.testing.assert_array_equal(earlier, np.stack([ep, np.maximum(t - 1, 0)], 1))
        k = np.arange(r)
        rewards = np.where(k < n[:, None], self.reward[ep[:, None], t[:, None] + k], 0)
        np.testing.assert_array_equal(batch.rewards, rewards)
        terminal = self.terminated[ep] & (t + n == self.length[ep])
        np.testing.assert_array_equal(batch.mask, ~terminal)
        np.testing.assert_array_equal(batch.discount_n, self.cfg.discount**n)
        after = batch.next_observations["state"] * self.norm.state_std + self.norm.state_mean
        end = np.where(self.final[ep], t + n, np.minimum(t + n, self.length[ep] - 1))
        np.testing.assert_array_equal(after, np.stack([ep, end, ep + 2 * end], 1))
        closed = batch.bc_weight == self.bc_weight[ep[:, None], at] * valid
        still_open = batch.bc_weight == self.open_bc[ep[:, None], at] * valid
        assert (closed | still_open if writing else closed).all()
        numbers = batch.bc_weight[..., None] * (1 if batch.bc_dims is None else batch.bc_dims)
        closed = numbers == self.bc_dims[ep[:, None], at] * valid[..., None]
        still_open = numbers == self.open_bc_dims[ep[:, None], at] * valid[..., None]
        assert (closed | still_open if writing else closed).all()
        of_policy = self.source[ep[:, None], at] == Source.POLICY
        decided = (self.decision[ep[:, None], at] == t[:, None]) & valid & of_policy
        np.testing.assert_array_equal(batch.delay, np.where(decided.any(1), decided.argmax(1), 0))
        for c, camera in enumerate(SPEC.cameras):
            key = f"images/{camera.name}"
            if camera.name not in self.image_keys:
                assert key not in batch.observations
                continue
            self._check_pixels(batch.observations[key], c, ep, self.frame[ep, c, t])
            self._check_pixels(batch.next_observations[key], c, ep, self.frame[ep, c, end])
        return set(zip(ep.tolist(), t.tolist(), strict=True))

    @staticmethod
    def _check_pixels(images: np.ndarray, c: int, ep: np.ndarray, tick: np.ndarray) -> None:
        assert images.dtype == np.uint8
        expected = np.zeros_like(images)
        expected[:, 0, 0] = np.stack([ep // 256, ep % 256, tick], 1)
        expected[:, -1, -1] = np.stack([np.full_like(ep, c + 1), tick, ep % 256], 1)
        np.testing.assert_array_equal(images, expected)
