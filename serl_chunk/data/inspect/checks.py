"""Findings in episodes taken together. Each function returns those of one subject."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from serl_chunk.data.inspect.results import Dimension, EpisodeInfo, InspectionReport, Issue
from serl_chunk.types import Outcome

RATE = 0.05  # relative difference of two rates that is worth mentioning
CLIPPED = 0.05  # share of the steps at an extreme value
JUMP = 20.0  # times the median change of a dimension ...
JUMP_RANGE = 0.2  # ... that is this share of its range ...
JUMP_RARE = 2.0  # ... and this many times the change that one step in a hundred exceeds
APART = 0.5  # mean distance between command and joint, in ranges of the joint
FROZEN = 0.05  # share of the pairs with a moving state whose frames are equal

_remark = functools.partial(Issue, "remark")


class Jump(NamedTuple):
    """A change of one action dimension from the tick before."""

    episode: str
    tick: int
    dimension: int
    size: float
    spike: bool  # the tick after it is back where it was


def cameras(data: InspectionReport) -> Iterator[Issue]:
    """Find sizes that differ, cameras that some episodes lack, frames that stand still or are of one colour."""
    for name, stats in data.cameras().items():
        usual = Counter((c.height, c.width) for c in stats).most_common(1)[0][0]
        having = [e for e in data.episodes if name in e.cameras]
        for e in data.episodes:
            if name not in e.cameras:
                has = ", ".join(e.cameras) or "none"
                text = f"{e.key}: no frames of camera {name}, which {len(stats)} other episodes have (it has: {has})"
                yield Issue("fault", "cameras", text, e.key)
            elif (size := e.cameras[name][:2]) != usual:
                text = f"{e.key}: camera {name} has {size[0]}x{size[1]} pixels, elsewhere {usual[0]}x{usual[1]}"
                yield Issue("fault", "cameras", text, e.key)
        moved, frozen = sum(c.moved for c in stats), sum(c.frozen for c in stats)
        if frozen > FROZEN * moved:
            worst = max(having, key=lambda e: e.cameras[name].frozen)
            text = (
                f"camera {name}: {frozen} of {moved} pairs of consecutive frames are identical although the state "
                f"moved, most of them in {worst.key}; does the camera run at the rate of the steps?"
            )
            yield _remark("duplicate frames", text, worst.key)
        if blank := sum(c.blank for c in stats):
            first = next(e for e in having if e.cameras[name].blank)
            decoded = sum(c.decoded for c in stats)
            text = f"camera {name}: {blank} of {decoded} frames are of one colour, the first in {first.key}"
            yield _remark("blank frames", text, first.key)


def time(data: InspectionReport) -> Iterator[Issue]:
    """Find rates that differ from the declared one, or between episodes, and missing stamps."""
    measured, declared = data.measured_hz, data.declared_hz
    if data.episodes and all(e.period is None and e.length > 1 for e in data.episodes):
        text = "the episodes have no time stamps" + ("" if declared else ", and no rate is declared. Give hz")
        yield _remark("rate", text)
        return
    if measured and declared and abs(measured / declared - 1) > RATE:
        yield _remark("rate", f"the stamps are {measured:.4g} Hz, {declared:.4g} Hz is declared; which one is true?")
    for e in data.episodes:
        if measured and e.period and abs(1 / e.period / measured - 1) > RATE:
            text = f"{e.key}: {1 / e.period:.4g} Hz by its stamps, {measured:.4g} Hz in most episodes"
            yield _remark("rate", text, e.key)


def dimensions(data: InspectionReport) -> Iterator[Issue]:
    """Find values that never move, stay at an extreme, or leave the robot's limits."""
    switches: dict[str, set[int]] = {"state": set(), "action": set()}  # a closed gripper is meant to be at its extreme
    if data.spec is not None:
        switches["action"] = set(data.spec.grippers)
        switches["state"] = {data.spec.joint_of_action[j] for j in data.spec.grippers}
    for name, dims in (("state", data.state), ("action", data.action)):
        if still := [f"{j} (at {d.mean:.3g})" for j, d in enumerate(dims) if d.constant]:
            yield _remark("constant", f"{name}: constant in {_listed(still)}")
        clipped = [f"{j} ({_extreme(d)})" for j, d in enumerate(dims) if _clipped(d) and j not in switches[name]]
        if clipped:
            yield _remark("clipped", f"{name}: at its extreme value on many steps in {_listed(clipped)}; clipped?")
    if data.spec is not None and len(data.action) == data.spec.action_dim:
        beyond = []
        for j, (d, low, high) in enumerate(zip(data.action, data.spec.action_low, data.spec.action_high, strict=True)):
            slack = 1e-5 * (high - low)  # what rounding to float32 does to a limit
            if d.low < low - slack or d.high > high + slack:
                beyond.append(f"{j} ({d.low:.5g}..{d.high:.5g}, limits {low:.5g}..{high:.5g})")
        if beyond:
            yield _remark("limits", f"action: beyond the limits of {data.spec.name} in {_listed(beyond)}")


def jumps(data: InspectionReport, largest: Sequence[Jump]) -> Iterator[Issue]:
    """Find changes of an action far beyond its usual ones; `largest` are the candidates."""
    if data.changes is None:
        return
    grippers = data.spec.grippers if data.spec else ()
    usual, _, rare, _ = data.changes
    back = {(j.episode, j.tick + 1, j.dimension) for j in largest if j.spike}
    for jump in sorted(largest, key=lambda j: -j.size / max(_range(data.action[j.dimension]), 1e-12)):
        j, size = jump.dimension, jump.size
        d = data.action[j]
        switch = j in grippers or d.distinct is not None  # it does nothing but jump
        if (switch and not jump.spike) or jump[:3] in back:
            continue
        if size > JUMP_RANGE * _range(d) and size > JUMP * usual[j] and size > JUMP_RARE * rare[j]:
            what = f"jumps by {size:.3g}" + (" for one tick" if jump.spike else "")
            text = f"{jump.episode}: tick {jump.tick}: action {j} {what}, its usual change is {usual[j]:.2g}"
            yield _remark("jump", text, jump.episode, jump.tick)


def followed(data: InspectionReport, distance: np.ndarray | None) -> Iterator[Issue]:
    """Find commands that are far from the joints they command; `distance` float64[A] is their mean distance."""
    if data.spec is None or distance is None:
        return
    apart = [
        f"{j} (mean distance {distance[j]:.3g})"
        for j, joint in enumerate(data.spec.joint_of_action)
        if joint >= 0 and distance[j] > max(APART * _range(data.state[joint]), 0.05)
    ]
    if apart:
        text = f"action: far from the measured joint in {_listed(apart)}; are these differences, or in other units?"
        yield _remark("mismatch", text)


def rewards(data: InspectionReport) -> Iterator[Issue]:
    """Find missing rewards, and rewards and outcomes that contradict each other."""
    if data.episodes and not any(e.rewarded for e in data.episodes):
        unknown = data.count(Outcome.UNKNOWN) == len(data.episodes)
        text = "no step has a reward" + (", and no episode an outcome. Give success or scores" if unknown else "")
        yield _remark("reward", text)
        return
    for e in data.episodes:
        if e.outcome is Outcome.SUCCESS and not e.rewarded:
            yield _remark("reward", f"{e.key}: a success without any reward", e.key)


def episodes(data: InspectionReport, horizon: int | None) -> Iterator[Issue]:
    """Find episodes that are shorter than a chunk, and those that occur twice."""
    for e in data.episodes:
        if horizon is not None and e.length < horizon:
            yield _remark("short", f"{e.key}: {e.length} steps, fewer than the {horizon} of a chunk", e.key)
    first: dict[str, EpisodeInfo] = {}
    for e in data.episodes:
        other = first.setdefault(e.digest, e)
        if other is not e:
            yield _remark("duplicate episode", f"{e.key}: the same states and actions as {other.key}", e.key)


def _range(d: Dimension) -> float:
    return d.high - d.low


def _clipped(d: Dimension) -> bool:
    """Whether a value that moves freely stays at an extreme; a value with few different ones is a switch."""
    return not d.constant and d.distinct is None and max(d.at_low, d.at_high) > CLIPPED


def _extreme(d: Dimension) -> str:
    share, value = max((d.at_low, d.low), (d.at_high, d.high))
    return f"{value:.3g} on {share:.0%}"


def _listed(parts: Sequence[str], at_most: int = 8) -> str:
    """`dimension 3 (...)`, or `12 dimensions: 0 (...), ... and 4 more`."""
    counted = "dimension" if len(parts) == 1 else f"{len(parts)} dimensions:"
    more = f" and {len(parts) - at_most} more" if len(parts) > at_most else ""
    return f"{counted} {', '.join(parts[:at_most])}{more}"
