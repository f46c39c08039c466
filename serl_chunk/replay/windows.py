"""Windows of consecutive steps: the starts that are sampled, sets to draw them from, and the batch they make.

A window starts at step t of an episode of T steps and reaches n = min(R, T - t) steps, R being the steps of the return:
the critic's horizon, or more for n-step returns. Its target is `sum_i gamma^i r_i + gamma^n * mask * Q'(o_{t+n}, a')`
(Li, Zhou and Levine 2025, with n-step ends).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serl_chunk.config.agents.base import BcOn
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.replay.episode import human_segments
from serl_chunk.replay.frame_storage import Fetch
from serl_chunk.replay.step_storage import StepStorage, imitated_dims
from serl_chunk.types import STATE, ChunkBatch, Outcome, Source

if TYPE_CHECKING:
    from serl_chunk.replay.partitions import Partition


Encode = Callable[[Any, Any], Any]  # `Preprocess.encode`: raw states and chunks to model space
_NO_TICKS = np.empty(0, np.int64)


def eligible_starts(
    recent: np.ndarray,
    *, first: int, last: int, terminated: bool, returned: int, keep_terminal: bool, gaps: np.ndarray = _NO_TICKS,
) -> tuple[np.ndarray, int]:  # fmt: skip
    """Return the starts at tick `first` or later that are sampled, and how many lack a recent image.

    Args:
        recent: bool[>= last + 1], whether each observation shows every camera recently enough.
        last: tick of the last observation a window may end on.
        terminated: a true termination follows the last step; a window that reaches it needs no image there, because
            nothing is bootstrapped from it.
        returned: steps of a full window's return.
        keep_terminal: also sample the windows shorter than `returned` that end in a true termination.
        gaps: int64[G] ticks of the steps after a gap, increasing. No window contains one of them, nor its observation,
            nor the step before: its effect one tick later was not observed.
    """
    stop = last if terminated and keep_terminal else last - returned + 1
    start = np.arange(first, max(first, stop))
    end = np.minimum(start + returned, last)
    within = end < np.append(gaps, last + 1)[np.searchsorted(gaps, start)]
    start, end = start[within], end[within]
    bootstraps = ~((end == last) & terminated)
    good = recent[start] & (recent[end] | ~bootstraps)
    return start[good], int((~good).sum())


def imitation_weights(
    source: np.ndarray, *, bc_on: BcOn, demonstration: bool, outcome: Outcome, exclude_ticks: int,
    own_weight: float, shared: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Return the weight of each step of an episode in an imitation loss, float32[T], from source uint8[T].

    Never imitated are holds, failed demonstrations, and policy steps within `exclude_ticks` before a human's. Own
    successes weigh `own_weight`. Given `shared` bool[T], HUMAN steps of which the policy had a part, their weights are
    those of the policy's part.
    """
    human = source == Source.HUMAN
    own = source == Source.POLICY
    if shared is not None:
        human, own = human & ~shared, own | shared
    if bc_on == "interventions":
        weight = human.astype(np.float32)
    else:
        weight = np.full(len(source), demonstration or bc_on == "all", np.float32)
        if bc_on != "demo":
            weight[human] = 1
        if bc_on == "+successes" and not demonstration and outcome == Outcome.SUCCESS:
            imitated = own.copy()
            for begin, _ in human_segments(source):
                imitated[max(0, begin - exclude_ticks) : begin] = False
            weight[imitated] = own_weight
    if demonstration and outcome == Outcome.FAILURE:
        weight[:] = 0
    weight[source == Source.HOLD] = 0
    return weight


class IndexSet:
    """A set of integers in `0 <= row < capacity` that adds, removes and draws without a Python loop.

    Members lie densely in one array; a removal moves those at its end into the holes. Their order is therefore
    arbitrary, but depends on the sequence of calls alone.
    """

    def __init__(self, capacity: int) -> None:
        self._members = np.empty(capacity, np.int64)
        self._position = np.zeros(capacity, np.int64)  # place in `_members` plus 1; 0: absent (zeros cost no pages)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._members.nbytes + self._position.nbytes

    def contains(self, rows: np.ndarray) -> np.ndarray:
        """Which of `rows` int64[K] are members, bool[K]."""
        return self._position[rows] > 0

    def add(self, rows: np.ndarray) -> None:
        """Insert distinct `rows` int64[K]; members already present stay."""
        new = rows[self._position[rows] == 0]
        end = self._count + len(new)
        self._members[self._count : end] = new
        self._position[new] = np.arange(self._count + 1, end + 1)
        self._count = end

    def discard(self, rows: np.ndarray) -> None:
        """Remove distinct `rows` int64[K]; absent ones are ignored."""
        gone = rows[self._position[rows] > 0]
        end = self._count - len(gone)
        holes = self._position[gone] - 1
        holes = holes[holes < end]  # holes past the new end need no filling
        self._position[gone] = 0
        tail = self._members[end : self._count]
        movers = tail[self._position[tail] > 0]
        self._members[holes] = movers
        self._position[movers] = holes + 1
        self._count = end

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw members with replacement, int64[shape]."""
        return self._members[rng.integers(self._count, size=shape)]


class StratifiedSampler:
    """Draws from `view` such that of the members in one of two `sides` a share of `share` is of the first.

    Members of neither keep their share. Where one of the sides is empty the draw is uniform. `drawn` and `positive`
    count what was drawn, and of it members of the first side.
    """

    drawn = positive = 0

    def __init__(self, view: IndexSet, sides: Sequence[IndexSet], share: float) -> None:
        self._view, (self._positive, self._negative), self._share = view, sides, share

    def __len__(self) -> int:
        return len(self._view)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        rows = self._view.draw(rng, shape)
        if len(self._positive) and len(self._negative):
            sided = self._positive.contains(rows) | self._negative.contains(rows)
            good = rng.random(shape) < self._share
            for side, chosen in ((self._positive, sided & good), (self._negative, sided & ~good)):
                rows[chosen] = side.draw(rng, (int(chosen.sum()),)) if chosen.any() else rows[chosen]
        self.drawn += rows.size
        self.positive += int(self._positive.contains(rows).sum())
        return rows


class WindowColumns(NamedTuple):
    """The columns that windows are gathered from, as the storage names them; of the host, or mirrored on a device."""

    state: Any
    action: Any
    effective: Any
    bc_weight: Any
    tick: Any
    decision_tick: Any
    succ: Any
    pred: Any
    live: Any
    terminal: Any
    dims: Any = None  # of `HumanParts`; None before a step needs it
    alone: Any = None

    @classmethod
    def of(cls, storage: StepStorage) -> WindowColumns:
        steps, links, parts = storage.steps, storage.links, storage.human_parts
        return cls(
            steps.state, steps.action, steps.effective, steps.bc_weight, steps.tick, steps.decision_tick,
            links.succ, links.pred, links.live, links.terminal, parts.dims, parts.alone,
        )  # fmt: skip

    def windows(self, starts: Any, config: ExperimentConfig, encode: Encode) -> tuple[ChunkBatch, Any, Any]:
        """Return the windows that start at rows `starts` int[B] without observations, their raw states and end rows.

        The arrays are fresh, and of the library that has `starts`: NumPy, or JAX within a compiled function.
        """
        xp = starts.__array_namespace__()
        horizon, returned = config.chunk.carried, config.chunk.returned
        path = [starts]
        for _ in range(max(horizon, returned)):
            path.append(self.succ[path[-1]])  # a row that is not live leads to itself
        rows = xp.stack(path, axis=1)
        exists = self.live[rows[:, :-1]]
        steps, paid, ends = rows[:, :horizon], rows[:, :returned], rows[:, returned]
        live, earned = exists[:, :horizon], exists[:, :returned]
        valid = live.astype(np.float32)
        discounts = np.power(config.discount, np.arange(returned + 1)).astype(np.float32)
        last_step = live.sum(1) - 1
        executed = xp.take_along_axis(steps, xp.minimum(xp.arange(horizon), last_step[:, None]), axis=1)
        state = self.state[starts]
        actions = encode(state, self.action[executed])
        decided = live & (self.decision_tick[steps] == self.tick[starts][:, None])  # -1 where the policy did not act
        batch = ChunkBatch(
            observations={},
            actions=actions,
            valid=valid,
            rewards=xp.where(earned, self.effective[paid], np.float32(0)),
            mask=(~self.terminal[ends]).astype(np.float32),
            discount_n=xp.asarray(discounts)[earned.sum(1)],
            next_observations={},
            bc_weight=self.bc_weight[steps] * valid,
            delay=decided.argmax(1).astype(np.int32),
            weight=xp.ones(len(starts), np.float32),
            bc_dims=imitated_dims(self.dims, self.alone, steps, self.action.shape[1]),
        )
        if config.agent.gripper.reads_before:  # the action executed on the tick before
            before = self.action[self.pred[starts]][:, None]
            batch = batch._replace(prev_action=encode(state, before)[:, 0])
        return batch, state, ends


def gather(
    storage: StepStorage, preprocess: Preprocess, config: ExperimentConfig, starts: np.ndarray,
    *, later: bool = True, frames: bool | None = None,
) -> tuple[ChunkBatch, list[Fetch]]:  # fmt: skip
    """Gather the windows that start at storage rows `starts` int64[B], in model space; every array is fresh.

    Also returns what fills in images, or features, that the batch still lacks. Beyond an episode's end the last
    executed action is repeated (in the robot's units, then encoded), `valid` and `rewards` are 0. There may be fewer or
    more rewards than actions. Without `later` there are no next observations. `frames`: see `StepStorage.seen_at`.
    Fields: docs/architecture/replay.md.
    """
    b = len(starts)
    batch, state, ends = WindowColumns.of(storage).windows(starts, config, preprocess.encode)
    observations = preprocess.observe_rows(state, storage.texts_at(starts, frames))
    next_observations = (
        preprocess.observe_rows(storage.steps.state[ends], storage.texts_at(ends, frames)) if later else {}
    )
    shown = np.concatenate([starts, ends]) if later else starts
    seen, pending = storage.seen_at(shown, preprocess.observe_rows, frames)
    observations |= {key: values[:b] for key, values in seen.items()}
    if later:
        next_observations |= {key: values[b:] for key, values in seen.items()}
    return batch._replace(observations=observations, next_observations=next_observations), pending


def with_moved_joints(batch: ChunkBatch, preprocess: Preprocess, reach: np.ndarray, moves: Any) -> ChunkBatch:
    """Add `bc_state_shift` and `bc_action_shift` to a batch of windows: joints moved at random, targets that stay.

    Imitation then shows the way back onto the demonstrated path from next to it (corrective labels as those of Ke et
    al. 2021). Moved are the joints that actions are relative to.

    Args:
        reach: standard deviation of each joint, float32[J].
        moves: standard normal float32[B, J], of NumPy, or of JAX within a compiled function.
    """
    joints, state = preprocess.followed_joints, batch.observations[STATE]
    place, moved = np.zeros(state.shape[1], np.int64), np.zeros(state.shape[1], np.float32)
    place[joints], moved[joints] = np.arange(len(joints)), reach
    of_state, of_actions = preprocess.normaliser.shifts(moved * moves[:, place])
    return batch._replace(bc_state_shift=of_state, bc_action_shift=of_actions[:, : batch.actions.shape[1]])


class Rows(NamedTuple):
    """N steps in the order in which they neighbour each other, those of one episode in theirs."""

    state: np.ndarray  # float32[N, S]
    next_state: np.ndarray  # float32[N, S], after the step
    action: np.ndarray  # float32[N, A]
    reward: np.ndarray  # float32[N], as trained on
    mask: np.ndarray  # float32[N], 0 where the task terminated with the step: nothing is bootstrapped
    terminal: np.ndarray  # [N], not 0 on the last step of an episode, however it ended


def gather_adjacent(rows: Rows, starts: np.ndarray, *, horizon: int, returned: int, discount: float) -> ChunkBatch:
    """Gather the windows of `max(horizon, returned)` rows that start at `starts` int64[B], in the units of `rows`.

    `valid[b, i]` is 1 until the first end, its own step included; `weight` is that of the return's last step. Rewards
    are those of all R = `returned` rows, also after an end; `mask` is 0 where any of them terminated; `discount_n` is
    gamma^R, and the next observation that of row R - 1. Valid steps count as imitated.
    """
    length = max(horizon, returned)
    at = starts[:, None] + np.arange(length)
    ended = np.maximum.accumulate(rows.terminal[at] > 0, axis=1)
    reached = np.ones(at.shape, np.float32)
    reached[:, 1:] = ~ended[:, :-1]
    valid = reached[:, :horizon]
    return ChunkBatch(
        observations={STATE: rows.state[starts]},
        actions=rows.action[at[:, :horizon]],
        valid=valid.copy(),
        rewards=rows.reward[at[:, :returned]],
        mask=rows.mask[at[:, :returned]].min(1),
        discount_n=np.full(len(starts), discount**returned, np.float32),
        next_observations={STATE: rows.next_state[at[:, returned - 1]]},
        bc_weight=valid.copy(),
        delay=np.zeros(len(starts), np.int32),
        weight=reached[:, returned - 1].copy(),
    )


def gather_qc_windows(
    storage: StepStorage, preprocess: Preprocess, config: ExperimentConfig, rows: np.ndarray, *, bc_all: bool
) -> ChunkBatch:
    """Gather windows of storage rows `rows` int64[B, L], L = max(horizon, returned), in model space; arrays are fresh.

    As `gather_adjacent`, with the storage's own marks of imitated steps unless `bc_all`. An end lies
    where a row's successor is not the window's next, unless a demonstrated trajectory goes on there.
    """
    (b, length), horizon, returned = rows.shape, config.chunk.carried, config.chunk.returned
    held, links = storage.steps, storage.links
    at, after = rows.ravel(), links.succ[rows]
    terminal = np.zeros((b, length), np.bool_)
    terminal[:, :-1] = after[:, :-1] != rows[:, 1:]  # of the last row it makes no difference
    window, step = np.nonzero(terminal)
    terminal[window, step] = ~_goes_on(storage, rows[window, step], after[window, step], rows[window, step + 1])
    columns = Rows(
        state=held.state[at],
        next_state=held.state[after.ravel()],
        action=held.action[at],
        reward=held.effective[at],
        mask=(~links.terminal[after.ravel()]).astype(np.float32),
        terminal=terminal.ravel(),
    )
    starts = np.arange(b) * length
    raw = gather_adjacent(columns, starts, horizon=horizon, returned=returned, discount=config.discount)
    steps, live = rows[:, :horizon], raw.valid > 0
    decided = live & (held.decision_tick[steps] == held.tick[steps[:, :1]])
    state = raw.observations[STATE]
    return raw._replace(
        observations=preprocess.observe_rows(state, storage.texts_at(rows[:, 0])),
        actions=preprocess.encode(state, raw.actions),
        next_observations=preprocess.observe_rows(
            raw.next_observations[STATE], storage.texts_at(after[:, returned - 1])
        ),
        bc_weight=raw.bc_weight if bc_all else held.bc_weight[steps] * raw.valid,
        bc_dims=storage.human_parts.bc_dims(steps),
        delay=decided.argmax(1).astype(np.int32),
    )


def _goes_on(storage: StepStorage, last: np.ndarray, final: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return where episodes from rows `first` int64[K] on continue those with `last` step and `final` row, bool[K]."""
    held = storage.steps
    same = (held.state[final] == held.state[first]).all(1) & storage.links.terminal[final]
    if held.task is not None:
        same &= held.task[final] == held.task[first]
    return same & (held.tick[first] == 0) & held.is_demo[last] & held.is_demo[first]


class QCWindowSampler:
    """Windows of `length` neighbouring steps of a few partitions, one after the other."""

    def __init__(self, partitions: Sequence[Partition], length: int) -> None:
        self._partitions, self._length = partitions, length

    def __len__(self) -> int:
        return max(0, sum(map(len, self._parts())) - self._length + 1)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw windows with replacement: storage rows of their steps, int64[*shape, length]."""
        parts = self._parts()
        ends = np.cumsum([len(p) for p in parts])
        starts = rng.integers(ends[-1] - self._length + 1, size=shape)
        at = starts[..., None] + np.arange(self._length)
        part = np.searchsorted(ends, at, side="right")
        out = np.empty(at.shape, np.int64)
        for i, rows in enumerate(parts):
            chosen = part == i
            out[chosen] = rows[at[chosen] - (ends[i] - len(rows))]
        return out

    def _parts(self) -> list[np.ndarray]:
        return [rows for partition in self._partitions for rows in partition.followed()]
