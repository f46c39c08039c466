"""What one episode is: its length, time, rewards, sources and cameras, and what is wrong with it alone."""

from __future__ import annotations

import hashlib

import numpy as np

from serl_chunk.data.findings import CameraFacts, EpisodeFacts, Finding
from serl_chunk.types import IMAGE_PREFIX, STATE, DataError, Episode, Source, SparseRows

GAP = 2.0  # a step that takes more than this many of its episode's median periods is a gap
MOVED = 0.01  # of its range in the episode: from here on a state value has moved between two frames
PAIRS = 8  # pairs of frames decoded of each camera and episode, unless all are


def facts_of(key: str, episode: Episode, *, all_frames: bool = False) -> tuple[EpisodeFacts, list[Finding]]:
    """Facts of a checked episode, and the findings that need no other episode.

    Args:
        key: its name in the source, with which the findings begin.
        episode: its images are decoded: `PAIRS` pairs of frames of each camera, spread evenly.
        all_frames: decode all of them.
    """
    begin, steps, end = episode
    found: list[Finding] = []
    cameras = {}
    for name, rows in sorted(steps.sparse.items()):
        if name.startswith(IMAGE_PREFIX) and len(rows.index):
            camera, trouble = _camera(key, episode, rows, all_frames)
            cameras[name.removeprefix(IMAGE_PREFIX)] = camera
            found += trouble
    found += _final_frames(key, episode)
    seconds, period, trouble = _time(key, steps.stamp)
    found += trouble
    reward = steps.reward.astype(np.float64)
    if end.reward is not None:
        reward[-1] = end.reward
    human = (steps.source == Source.HUMAN).astype(np.int8)
    facts = EpisodeFacts(
        key=key,
        length=steps.n,
        task=begin.task,
        outcome=end.outcome,
        terminated=end.terminated,
        reward=float(reward.sum()),
        rewarded=int(np.count_nonzero(reward)),
        sources=tuple(int((steps.source == s).sum()) for s in Source),
        segments=int((np.diff(human, prepend=0) == 1).sum()),
        seconds=seconds,
        period=period,
        cameras=cameras,
        digest=hashlib.sha256(steps.observation[STATE].tobytes() + steps.action.tobytes()).hexdigest()[:16],
    )
    return facts, found


def _time(key: str, stamp: np.ndarray) -> tuple[float | None, float | None, list[Finding]]:
    """(duration, median period, findings); an episode whose stamps are all equal has none."""
    if len(stamp) < 2 or (stamp == stamp[0]).all():
        return None, None, []
    between = np.diff(stamp)
    seconds, period = float(stamp[-1] - stamp[0]), float(np.median(between))
    back = np.flatnonzero(between <= 0)
    if len(back):
        tick = int(back[0]) + 1
        text = (
            f"{key}: the time stamp of tick {tick} ({stamp[tick]:.6g} s) is not after that of the tick before "
            f"({stamp[tick - 1]:.6g} s){_more(len(back) - 1)}"
        )
        return seconds, period if period > 0 else None, [Finding("fault", "time", text, key, tick)]
    gaps = np.flatnonzero(between > GAP * period)
    if not len(gaps):
        return seconds, period, []
    worst = int(gaps[np.argmax(between[gaps])])
    text = (
        f"{key}: tick {worst + 1} comes {between[worst]:.3g} s after the one before, {between[worst] / period:.0f} "
        f"periods{_more(len(gaps) - 1)}"
    )
    return seconds, period, [Finding("remark", "gap", text, key, worst + 1)]


def _camera(key: str, episode: Episode, rows: SparseRows, all_frames: bool) -> tuple[CameraFacts, list[Finding]]:
    state = episode.steps.observation[STATE]
    frames, (height, width) = len(rows.index), rows.values.shape[1:3]
    firsts = np.arange(frames - 1)
    if not all_frames and len(firsts) > PAIRS:
        firsts = np.linspace(0, frames - 2, PAIRS).astype(int)
    span = state.max(0) - state.min(0)
    decoded = pairs = identical = moved = frozen = blank = 0
    at, last = -1, np.empty(0)
    try:
        for first in firsts if len(firsts) else [0]:
            for i in (first, first + 1):
                if i == at or i >= frames:
                    continue
                before, last, at = last, np.asarray(rows.values[int(i)]), int(i)
                decoded += 1
                blank += bool((last == last[0, 0]).all())
                if i == first + 1:
                    same = np.array_equal(before, last)
                    change = np.abs(state[rows.index[i]] - state[rows.index[i - 1]])
                    moving = bool((change > MOVED * span)[span > 0].any())
                    pairs, identical, moved = pairs + 1, identical + same, moved + moving
                    frozen += same and moving
    except DataError as error:
        found = [Finding("fault", "frames", str(error), key)]
    else:
        found = []
    return CameraFacts(height, width, frames, decoded, pairs, identical, moved, frozen, blank), found


def _final_frames(key: str, episode: Episode) -> list[Finding]:
    """The frames of the final observation, which training needs, can be decoded."""
    try:
        for value in (episode.end.final_observation or {}).values():
            np.asarray(value)
    except DataError as error:
        return [Finding("fault", "frames", str(error), key, episode.end.length)]
    return []


def _more(n: int) -> str:
    return f", and {n} more such tick{'s' if n > 1 else ''}" if n else ""
