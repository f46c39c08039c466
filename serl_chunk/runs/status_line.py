"""One line with the progress of a run and the side that waits for the other."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypedDict

from serl_chunk.io import format_duration, plural

STATUS_LOGGER = "serl_chunk.status"  # a screen that shows the live line leaves its records out
SCREEN_PERIOD = 0.2  # seconds between redraws on a terminal
LOG_PERIOD = 10.0  # seconds between lines in a log
ETA_SHARE = 0.05  # share of what is left of a phase before its speed is worth extrapolating
WAITING = 0.1  # share of time from which a side counts as waiting

logger = logging.getLogger(STATUS_LOGGER)


class StatusFields(TypedDict, total=False):
    """Values of the line; those that are absent or None are left out."""

    phase_number: int  # of the phase among the `phase_total` of this run, from 1
    phase_total: int
    done: int  # of the `total` of a phase with a known end; gives the time left
    total: int
    paused: float  # seconds so far in which nothing was trained, such as evaluations; the time left goes without them
    evaluating: bool  # training stands still for an evaluation
    step: int | None  # critic updates
    updates_per_s: float | None
    env_steps: int
    episodes: int
    mixed: tuple[int, int]  # groups of the iteration whose outcomes are mixed, and how many are wanted
    sampled: float | None  # share of the last iteration's sampled episodes that succeeded, 0..1
    success: float | None  # share of the last 20 episodes that succeeded without intervention, 0..1
    human: float | None  # share of environment steps on which a human had the robot, 0..1
    learner_wait: float  # share of time the learner waited for steps, 0..1
    actor_wait: float  # share of time the actors waited for the learner, 0..1
    steps_missing: int  # online steps that the learner waits for before its next update
    updates_due: int  # updates that the recorded steps entitle to and that are not done
    may_record: int | None  # steps that lockstep actors may record now; None: no limit
    actors: tuple[str, ...]  # ids of those connected; absent where there is no network
    stalled: str  # why nothing is acknowledged; empty where records are taken
    empty_half: str | None  # "demo" or "online": the half of a batch whose share the other one fills
    version: int  # newest published snapshot


class Screen(Protocol):
    """A place for the status line below other lines."""

    def state(self, text: str) -> None:
        """Show `text` in place of the state before it."""

    def keep(self) -> None:
        """Turn the newest state into a line."""


class StatusLine:
    """A live line on a screen, and a record of `STATUS_LOGGER` at most every ten seconds; only that without a screen.

    Use as a context manager: leaving it shows the newest state once more. `update` may be called from several threads.
    """

    def __init__(self, screen: Screen | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen, self._clock = screen, clock
        self._lock = threading.Lock()
        self._phase = ""
        self._start: tuple[float, int, float] | None = None  # of the phase: time, `done` and `paused` at first progress
        self._fields: StatusFields = {}
        self._drawn_at = self._logged_at = -math.inf
        self._stale = False  # whether the newest state has not been logged

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._stale:
                self._show(self._clock(), draw=True, log=True)
            if self._screen is not None:
                self._screen.keep()

    def update(self, phase: str, fields: StatusFields) -> None:
        """Take the newest state; it is shown only when the last one shown is old enough."""
        if fields.get("total") == 0:
            return  # a phase that this run does not have
        now = self._clock()
        with self._lock:
            done, paused = fields.get("done", 0), fields.get("paused", 0.0)
            self._phase = phase
            if fields.get("total") != self._fields.get("total") or done < self._fields.get("done", 0):
                self._start = None  # another stage; those of an iteration follow each other within one
            elif self._start is None and done > self._fields.get("done", 0):  # the first update compiled before it
                self._start = now, done, paused
            begins = fields.get("evaluating", False) and not self._fields.get("evaluating", False)
            self._fields, self._stale = fields, True
            # The reason why training stands still is shown at once: an evaluation may end before the next line is due.
            draw = begins or now - self._drawn_at >= SCREEN_PERIOD
            self._show(now, draw=draw, log=begins or now - self._logged_at >= LOG_PERIOD)

    def _show(self, now: float, *, draw: bool, log: bool) -> None:
        screen = self._screen if draw else None
        if screen is None and not log:
            return
        line = format_status(self._phase, self._fields, self._seconds_left(now))
        if screen is not None:
            self._drawn_at = now
            screen.state(line)
        if log:
            self._logged_at, self._stale = now, False
            logger.info(line)

    def _seconds_left(self, now: float) -> float | None:
        """Return the time to the phase's end at its mean speed; None before `ETA_SHARE` of the rest of it is done."""
        done, total = self._fields.get("done"), self._fields.get("total")
        if self._start is None or done is None or total is None:
            return None
        start, first, paused = self._start
        if done - first < max(1, ETA_SHARE * (total - first)):
            return None
        spent = now - start - (self._fields.get("paused", 0.0) - paused)
        return spent / (done - first) * max(0, total - done)


_COUNTS: dict[str, Callable[[Any], str]] = {
    "step": "step {:,}".format,
    "updates_per_s": "{:.0f} updates/s".format,
    "env_steps": "{:,} env steps".format,
    "episodes": lambda count: plural(count, "episode"),
    "mixed": lambda groups: f"{groups[0]}/{groups[1]} mixed groups",
    "sampled": "sampled success {:.0%} (of the last iteration)".format,
    "success": "success without intervention {:.0%} (of the last 20)".format,
    "human": "human {:.1%}".format,
}


def format_status(phase: str, fields: StatusFields, seconds_left: float | None = None) -> str:
    """Return the line: `3/5 warm-up 4/20 | eta 2:05 | ... | normal pacing: learner is ahead | snapshot 24`."""
    progress = phase
    if "phase_number" in fields and "phase_total" in fields:
        progress = f"{fields['phase_number']}/{fields['phase_total']} {phase}"
    if "done" in fields and fields.get("total"):
        progress += f" {fields['done']:,}/{fields['total']:,}"
    parts = [progress]
    if fields.get("evaluating"):
        parts.append("evaluating")
    if seconds_left is not None:
        parts.append(f"eta {format_duration(seconds_left)}")
    parts += [show(value) for name, show in _COUNTS.items() if (value := fields.get(name)) is not None]
    if "learner_wait" in fields and "actor_wait" in fields:
        parts.append(pacing(fields))
    if stalled := fields.get("stalled"):
        parts.append(f"{stalled}, nothing is acknowledged")
    if empty := fields.get("empty_half"):
        parts.append(f"{'online' if empty == 'demo' else 'demo'} data only, {empty} half is empty")
    if "version" in fields:
        parts.append(f"snapshot {fields['version']}")
    return " | ".join(parts)


def pacing(fields: StatusFields) -> str:
    """Return which side is ahead and waits for the other: `normal pacing: learner is ahead, needs 312 more steps`."""
    learner, actor = fields["learner_wait"], fields["actor_wait"]
    left, due, names = fields.get("may_record"), fields.get("updates_due", 0), fields.get("actors")
    if max(learner, actor) < WAITING:
        return "both busy"
    # The shares are of the past; a first update that is being compiled holds up actors alone.
    if learner >= actor and not (left == 0 and due):
        missing = fields.get("steps_missing", 0)
        needed = f", needs {plural(missing, 'more step')}" if missing else ""
        ahead = "no actor is connected: learner waits" if names == () else "normal pacing: learner is ahead"
        return ahead + needed
    if left is None:
        return "normal pacing: actor is ahead"
    who = names[0] if names and len(names) == 1 else "actors"
    return f"normal pacing: actor is ahead, {plural(due, 'update')} due, {who} may record {plural(left, 'more step')}"
