"""The learner's memory: takes the records of any number of sessions, gives batches of training windows."""

from __future__ import annotations

import functools
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np

from serl_chunk.config.agents.base import BcOn
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.replay.episode import Key
from serl_chunk.replay.features import Embedder
from serl_chunk.replay.frame_storage import Fetch
from serl_chunk.replay.memory import available_bytes, check_memory, estimate_disk_bytes
from serl_chunk.replay.partitions import Added, EpisodeBuilder, Partitions
from serl_chunk.replay.windows import StratifiedSampler, WindowColumns, gather, gather_qc_windows, with_moved_joints
from serl_chunk.types import STATE, ChunkBatch, ConfigError, DataError, Episode, Record, RobotSpec

DEMO_SESSION = "demonstrations"  # the session under which demonstrations are kept
DATASET_SESSION = "dataset"  # and that of those which give way to others
_COUNTED = (  # reported from the start, so that a metric's absence never means zero
    "steps", "episodes", "evicted_episodes", "kept_for_interventions", "dropped_open_episodes",
    "discarded_episodes", "empty_episodes", "orphan_records", "orphan_steps",
)  # fmt: skip

PARTS = (8, 64, 512, 4096)  # rows that are mirrored at once: each length is compiled once

Half = Literal["demo", "online"]


class Ready(NamedTuple):
    """Counts that a training loop waits for."""

    steps: int  # online steps ever inserted
    online: int  # windows that the online half draws from
    demo: int  # and the demonstration half
    windows: int  # distinct ones in either


class OutsideCount(NamedTuple):
    """Numbers of actions in model space, from every step of the episodes on, and how many lie outside of it."""

    outside: int = 0
    numbers: int = 0


class Replay:
    """Steps stored once, and windows sampled from them; every method may be called from any thread.

    Capacities count rows: an episode of T steps takes T + 1, the last for its final observation.

    Args:
        spec: the robot whose episodes are kept.
        config: lengths, discount, rewards and capacities.
        preprocess: of observations and chunks; frames of its cameras are kept and sampled, as the agent reads them.
        bc_on: the steps that carry weight in an imitation loss.
        embed: computes features of observations; batches then have these in place of the images and texts that they
            are computed of. Each is computed once, at the latest when a batch first shows it.

    Raises ConfigError for a capacity below one episode, more memory than there is, or `replay.windows=qc` with images.
    """

    def __init__(
        self, spec: RobotSpec, config: ExperimentConfig, preprocess: Preprocess,
        *, bc_on: BcOn, embed: Embedder | None = None,
    ) -> None:  # fmt: skip
        cameras = preprocess.cameras
        for name in ("capacity", "image_capacity") if cameras or embed is not None else ("capacity",):
            # An episode that does not fit drives out all others before it is dropped itself.
            if getattr(config.replay, name) <= spec.max_episode_steps:
                raise ConfigError(
                    f"replay.{name}={getattr(config.replay, name)} is too small for one episode of robot "
                    f"{spec.name!r}: set it to at least {spec.max_episode_steps + 1}, better to hundreds of episodes"
                )
        self.estimated_bytes = check_memory(
            spec, config.replay, cameras, available_bytes(), None if embed is None else embed.features,
            language=preprocess.prompts is not None,
        )  # fmt: skip
        self.estimated_disk_bytes = estimate_disk_bytes(spec, config.replay, preprocess.recorded)
        if config.replay.windows == "qc" and cameras:
            raise ConfigError(
                f"qc has states only, and agent.image_keys names {', '.join(preprocess.image_keys)}. Leave "
                "agent.image_keys out, or set replay.windows=episode",
                parameter="replay.windows",
            )
        self._config, self._preprocess, self._bc_on = config, preprocess, bc_on
        self._count: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self._partitions = Partitions(spec, config, preprocess, bc_on, self._count, embed)
        self._builder = EpisodeBuilder(self._partitions, config.discount, self._count)
        self._sampled = self._sampled_demo = self._actions = self._clipped = 0
        self._counted = deque[Any]()
        self._lock = threading.RLock()
        # Of demonstrations and of finished online episodes that came to this process; complete with each of them.
        self.outside_model_space: dict[Half, OutsideCount] = {"demo": OutsideCount(), "online": OutsideCount()}

    @property
    def spec(self) -> RobotSpec:
        return self._partitions.storage.spec

    def add_demo(self, *episodes: Episode, session: str = DEMO_SESSION) -> None:
        """Add demonstrations, which are never evicted, under a session that later corrections name.

        Images that come as `Frames` stay in their files. Raises ConfigError where they do not fit (nothing is added),
        and DataError where one is of another robot or is there already, or where there is none for
        `replay.positive_fraction`.
        """
        self._put_demos(episodes, session, stays=True)

    def replace_demos(self, episodes: Sequence[Episode]) -> None:
        """Replace the demonstrations of the last call by copies of `episodes`; those of `add_demo` stay.

        No batch mixes old and new ones. What `replay.positive_fraction` balances is checked when the first ones come.
        Raises as `add_demo`, and DataError for images in their files (`Frames`); the old episodes then stay.
        """
        self._put_demos(episodes, DATASET_SESSION, stays=False)

    def _put_demos(self, episodes: Sequence[Episode], session: str, *, stays: bool) -> None:
        held = self._partitions
        # What needs nothing but the episodes comes first: robots' records and batches wait for the lock.
        episodes = [self._preprocess.episode(e) for e in episodes]
        held.check_demos(episodes, files=stays)
        columns = ((e.steps.observation[STATE], e.steps.action, e.steps.lost_ticks) for e in episodes)
        counts = [self._preprocess.normaliser.count_outside(*of_episode) for of_episode in columns]
        with self._lock:
            leaving = [] if stays else [e for key, e in held.demo.episodes.items() if key[0] == session]
            held.check_room(episodes, leaving=leaving)
            held.remove(*leaving)
            self._builder.demonstrations(session, episodes)
            self._count_outside("demo", counts)
            if not leaving:
                held.check_balance()

    def insert(self, session: str, record: Record) -> Added:
        """Insert the next record of `session`; return what it added. Raises as `EpisodeBuilder`."""
        record = self._preprocess.record(record)  # without the lock: scaling frames takes a while
        with self._lock:
            return self._checked(self._builder.insert(session, record))

    def close_session(self, session: str, *, gone: bool = False) -> Added:
        """Close a silent actor's open episode as truncated, without a final observation.

        An actor that comes back opens it again. With `gone` it cannot, and the episode is finished.
        """
        with self._lock:
            return self._checked(self._builder.close_session(session, gone=gone))

    def _checked(self, added: Added) -> Added:
        """Count the actions of an online episode that ended with a record."""
        if (ended := added.finished) is None:
            return added
        episode, storage = self._partitions.find((ended.session, ended.episode_id)), self._partitions.storage
        if episode is not None:
            rows = episode.rows[: episode.length]
            steps = storage.steps
            columns = steps.state[rows], steps.action[rows], steps.lost_ticks[rows]
            self._count_outside("online", [self._preprocess.normaliser.count_outside(*columns)])
        return added

    def _count_outside(self, half: Half, counts: Sequence[tuple[int, int]]) -> None:
        before = self.outside_model_space[half]
        self.outside_model_space[half] = OutsideCount(*map(sum, zip(before, *counts, strict=True)))

    @property
    def empty_half(self) -> Half | None:
        """The half that has no window while the other fills whole batches; None where there is none such."""
        share, ready = self._config.replay.demo_fraction, self.ready
        if isinstance(share, str) or not ready.windows:
            return None
        if share > 0 and not ready.demo:
            return "demo"
        return "online" if share < 1 and not ready.online else None

    @property
    def ready(self) -> Ready:
        with self._lock:
            s = self._partitions
            return Ready(self._count["steps"], len(s.windows_online), len(s.windows_demo), len(s.windows_all))

    def sample(
        self, rng: np.random.Generator, batch_size: int, updates: int | None = None,
        *, half: Half | None = None, next_observations: bool = True, frames: bool | None = None, imitated: bool = False,
    ) -> ChunkBatch:  # fmt: skip
        """Draw `batch_size` windows with replacement; with `updates` = U, every array has a leading axis U.

        Each batch takes `round(demo_fraction * batch_size)` windows of the demonstration half, first, and the rest
        of the online half; an empty half gives its share to the other. With `half` that half alone gives them.
        Without `next_observations` these are empty. `frames`: see `StepStorage.seen_at`. With `imitated` only windows
        of which something is imitated are drawn, where the agent's settings say so and there is one. The arrays are
        fresh and belong to the caller. Raises DataError while there is no complete window.
        """
        with self._lock:
            drawn = self._draw(rng, 1 if updates is None else updates, batch_size, half, imitated=imitated)
            batch, pending = self._gather(drawn, next_observations, frames)
            live = batch.valid > 0
            if self._preprocess.normaliser.bounded:
                self._clipped += int((np.abs(batch.actions) > 1).sum(2)[live].sum())
            self._actions += int(live.sum()) * batch.actions.shape[2]
        for fetch in pending:  # without the lock: decoding takes a while, and records go on coming in
            fetch()
        if self.moves:
            moves = np.random.default_rng(_seed(rng)).standard_normal((len(batch.mask), len(self.reach)), np.float32)
            batch = with_moved_joints(batch, self._preprocess, self.reach, moves)
        return batch if updates is None else _lead(batch, updates, batch_size)

    def mirror(self) -> WindowColumns:
        """Return the columns that `changes` keeps a mirror of equal to; from now on changes are noted."""
        with self._lock:
            storage = self._partitions.storage
            held = [e.rows for partition in self._partitions.all for e in partition.episodes.values()]
            storage.changed = held
            return WindowColumns.of(storage)

    @property
    def mirrored_bytes(self) -> int:
        return sum(column.nbytes for column in WindowColumns.of(self._partitions.storage) if column is not None)

    def draw(
        self, rng: np.random.Generator, calls: int, requests: Sequence[Request], half: Half | None = None
    ) -> tuple[dict[str, Drawn], list[tuple[np.ndarray, WindowColumns]]]:
        """Draw the windows that `sample` would for so many calls, in the order of `requests`.

        Also returns the rows that changed since the last draw, each part int32[N] of a length in `PARTS`, and what they
        hold now: a mirror with these has the windows. Raises as `sample`.
        """
        with self._lock:
            drawn = {r.name: Drawn.empty(calls, r, seeds=self.moves) for r in requests}
            for i in range(calls):
                for r in requests:
                    starts, seeds = drawn[r.name]
                    starts[i] = self._draw(rng, r.updates, r.size, half, imitated=r.imitated)
                    if seeds is not None:
                        seeds[i] = _seed(rng)
            storage = self._partitions.storage
            changed, storage.changed = storage.changed, []
            return drawn, _parts(changed, WindowColumns.of(storage)) if changed else []

    def count_outside(self, counts: Any) -> None:
        """Count numbers of drawn actions that are gathered elsewhere: int32[..., 2], those beyond model space and all.

        They may still be computed: `stats` waits for them.
        """
        self._counted.append(counts)

    def _draw(
        self, rng: np.random.Generator, updates: int, batch_size: int, half: Half | None, *, imitated: bool
    ) -> np.ndarray:
        """Storage rows int64[updates, batch_size] of windows' starts, or [..., L] of all their steps."""
        held, share = self._partitions, self._config.replay.demo_fraction
        demo, online, every = held.windows_demo, held.windows_online, held.windows_all
        if imitated and held.imitated and len(held.imitated[{"demo": 0, "online": 1, None: 2}[half]]):
            kept, (demo, online, every) = (demo, online), held.imitated
            if not isinstance(share, str) and len(demo) and len(online):  # as often as without the others
                weights = [
                    s * len(i) / len(k) for s, i, k in zip((share, 1 - share), (demo, online), kept, strict=True)
                ]
                share = float(rng.binomial(batch_size, weights[0] / sum(weights))) / batch_size
        if half is None and isinstance(share, str):  # "uniform"
            parts = [(every, batch_size)]
        else:
            if half is None and not isinstance(share, str) and len(demo) and len(online):
                n = int(share * batch_size + 0.5)
            else:
                n = batch_size if half == "demo" or (half is None and len(demo)) else 0
            parts = [(demo, n), (online, batch_size - n)]
        if not all(len(windows) for windows, count in parts if count):
            steps = sum(e.length for partition in held.all for e in partition.episodes.values())
            raise DataError(
                f"the replay holds no complete window yet: a window takes {self.window_steps} consecutive steps, and "
                f"it has {steps} in {sum(len(s.episodes) for s in held.all)} episodes: add demonstrations, or wait "
                "for `ready`"
            )
        if len(parts) > 1:
            self._sampled += updates * batch_size
            self._sampled_demo += updates * parts[0][1]
        return np.concatenate([w.draw(rng, (updates, count)) for w, count in parts if count], axis=1)

    @property
    def moves(self) -> bool:
        """Whether windows have moved joints (`agent.bc_joint_noise`)."""
        return bool(self._config.agent.joint_noise) and len(self._preprocess.followed_joints) > 0

    @functools.cached_property
    def reach(self) -> np.ndarray:
        """Standard deviation of the moves of each followed joint, float32[J], robot units."""
        return self._config.agent.joint_noise * self._preprocess.joint_reach

    @property
    def window_steps(self) -> int:
        chunk = self._config.chunk
        return max(chunk.carried, chunk.returned) if self._config.replay.windows == "qc" else chunk.returned

    @property
    def imitates_demos(self) -> bool:
        """Whether any step of the demonstrations is imitated (`agent.bc_on`)."""
        if self._config.replay.windows == "qc" and self._config.imitated == "all":
            return True  # also failed ones, as the published code has it
        with self._lock:
            held, weight = self._partitions.demo.episodes.values(), self._partitions.storage.steps.bc_weight
            return any(weight[e.rows[: e.length]].any() for e in held)

    def _gather(self, drawn: np.ndarray, later: bool, frames: bool | None) -> tuple[ChunkBatch, list[Fetch]]:
        storage, config = self._partitions.storage, self._config
        if config.replay.windows == "qc":
            rows = drawn.reshape(-1, drawn.shape[-1])
            batch = gather_qc_windows(storage, self._preprocess, config, rows, bc_all=self._bc_on == "all")
            return (batch if later else batch._replace(next_observations={})), []
        return gather(storage, self._preprocess, config, drawn.ravel(), later=later, frames=frames)

    @property
    def features_missing(self) -> int:
        """Stored inputs, frames or observations, whose features are not computed yet."""
        with self._lock:
            return sum(table.missing for table in self._partitions.storage.features.tables)

    def compute_features(self, limit: int) -> int:
        """Compute the features of up to `limit` inputs that lack them, without the lock; returns of how many."""
        with self._lock:
            found = self._partitions.storage.missing_features(limit, self._preprocess.observe_rows)
        if found is None:
            return 0
        count, compute = found
        compute()
        return count

    def episodes(self) -> list[Key]:
        """Return (session, episode id) of every episode held, oldest first per partition."""
        with self._lock:
            return [key for partition in self._partitions.all for key in partition.episodes]

    def stats(self) -> dict[str, float]:
        """Sizes, counts and shares under `replay/` names; shares are over everything sampled so far."""
        counted = [np.reshape(self._counted.popleft(), (-1, 2)).sum(0).tolist() for _ in range(len(self._counted))]
        with self._lock:
            for outside, numbers in counted:
                self._clipped, self._actions = self._clipped + outside, self._actions + numbers
            out = self._partitions.stats() | dict(self._count)
            out["undecodable_frames"] = sum(e.undecodable for e in self._partitions.storage.frames.encoded)
            out["clipped_share"] = self._clipped / max(1, self._actions)
            share = self._config.replay.demo_fraction
            if not isinstance(share, str):
                out["demo_share"] = self._sampled_demo / max(1, self._sampled)
                out["empty_half"] = int(self.empty_half is not None)
            if isinstance(demo := self._partitions.windows_demo, StratifiedSampler):
                out["positive_share"] = demo.positive / max(1, demo.drawn)
        return {f"replay/{name}": value for name, value in out.items()}


def _seed(rng: np.random.Generator) -> int:
    return int(rng.bit_generator.random_raw()) >> 32  # type: ignore[attr-defined]


def _parts(changed: Sequence[np.ndarray], columns: WindowColumns) -> list[tuple[np.ndarray, WindowColumns]]:
    rows, parts = np.unique(np.concatenate(changed)), []
    for start in range(0, len(rows), PARTS[-1]):
        part = rows[start : start + PARTS[-1]]
        length = next(n for n in PARTS if n >= len(part))
        part = np.append(part, np.repeat(part[-1:], length - len(part))).astype(np.int32)
        parts.append((part, WindowColumns(*(None if c is None else c[part] for c in columns))))
    return parts


def _lead(batch: ChunkBatch, updates: int, batch_size: int) -> ChunkBatch:
    def split(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: split(v) for k, v in value.items()}
        return None if value is None else value.reshape(updates, batch_size, *value.shape[1:])

    return ChunkBatch(*(split(v) for v in batch))


class Request(NamedTuple):
    """A batch that is asked for by name."""

    name: str
    updates: int
    size: int
    next_observations: bool = True
    frames: bool | None = None
    imitated: bool = False


class Drawn(NamedTuple):
    """Windows of a request for several calls, that are not gathered yet."""

    starts: Any  # int32[calls, updates, size], storage rows
    seeds: Any  # uint32[calls], of the moves of joints; None without them

    @classmethod
    def empty(cls, calls: int, request: Request, *, seeds: bool) -> Drawn:
        shape = calls, request.updates, request.size
        return cls(np.empty(shape, np.int32), np.empty(calls, np.uint32) if seeds else None)


class BatchLoader:
    """Batches of windows for compiled calls; `put` is applied to what each call takes, where it is prepared.

    With `prefetch=0` batches are drawn by `next`, and a seed reproduces a run. With `prefetch=P` a thread keeps those
    of up to P calls ready; only it uses `rng`. Every batch has fresh arrays: JAX reads them after a call has returned,
    and may keep them as the device array itself. Without `close` the process exits after what is being prepared.
    """

    def __init__(
        self, replay: Replay, rng: np.random.Generator,
        *, put: Callable[[dict[str, ChunkBatch]], Any] = lambda batches: batches, prefetch: int = 0,
    ) -> None:  # fmt: skip
        self._replay, self._rng = replay, rng
        self._put, self._prefetch = put, prefetch
        self._of: tuple[tuple[Request, ...], Half | None] | None = None  # what `_ready` was drawn for
        self._ready: deque[Future[Any]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def next(self, *requests: Request, half: Half | None = None) -> Any:
        """Return {name: batch}, arrays of shape [updates, size, ...], after `put`; see `Replay.sample`.

        Other requests or another half drop what was prepared. Raises what the preparing thread raised.
        """
        if not self._prefetch:
            return self._prepare(requests, half)
        if self._of != (requests, half):
            self.close()
            self._of = requests, half
        while len(self._ready) < self._prefetch:
            self._ready.append(self._thread.submit(self._prepare, requests, half))
        batches = self._ready[0].result()  # an error stays in front: a later call raises it again
        self._ready.popleft()
        self._ready.append(self._thread.submit(self._prepare, requests, half))
        return batches

    def _prepare(self, requests: Sequence[Request], half: Half | None) -> Any:
        drawn = {
            name: self._replay.sample(
                self._rng, size, updates, half=half, next_observations=later, frames=frames, imitated=imitated
            )
            for name, updates, size, later, frames, imitated in requests
        }
        return self._put(drawn)

    def close(self) -> None:
        """End the thread and drop what it prepared, from the data of before; `next` starts another one."""
        self._thread.shutdown(cancel_futures=True)
        self._ready.clear()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
