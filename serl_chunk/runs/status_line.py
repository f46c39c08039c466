"""One line that says where a run stands and who waits for whom."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO, TypedDict

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

TTY_PERIOD = 0.2  # seconds between redraws on a terminal
LOG_PERIOD = 10.0  # seconds between lines in a log
STEADY = 3.0  # seconds into a phase before its speed is worth extrapolating: the first update compiles
WAITING = 0.1  # share of time from which a side counts as waiting
LEARNER_WAITS, ACTOR_WAITS = "learner waits for actor", "actor waits for learner"


class StatusFields(TypedDict, total=False):
    """What the line can show; what is absent or None is left out."""

    done: int  # of a phase with a known end: so many ...
    total: int  # ... out of so many; gives the time left
    paused: float  # seconds so far in which nothing was trained, such as evaluations; the time left goes without them
    evaluating: bool  # whether training stands still for an evaluation just now
    step: int  # critic updates
    updates_per_s: float
    env_steps: int
    episodes: int
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


class StatusLine:
    """A live line at the bottom of a terminal; in a log, a plain line at most every ten seconds.

    Use as a context manager: leaving it shows the newest state once more. `update` and `say` may be called from
    several threads.

    Args:
        stream: where to write; standard error by default.
        tty: whether `stream` is a terminal; asked of the stream by default.
        clock: monotonic seconds; injected by tests.
    """

    def __init__(
        self, stream: TextIO | None = None, tty: bool | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._tty = self._stream.isatty() if tty is None else tty
        self._period = TTY_PERIOD if self._tty else LOG_PERIOD
        self._clock = clock
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._phase = ""
        self._phase_start = 0.0
        self._phase_done = 0  # `done` when the phase began: a resumed phase does not begin at 0
        self._phase_paused = 0.0
        self._fields: StatusFields = {}
        self._shown_at: float | None = None
        self._stale = False  # whether the newest state has not been shown

    def __enter__(self) -> StatusLine:
        if self._tty:
            console = Console(file=self._stream, force_terminal=True)
            # Drawn by `update` alone: no refresh thread beside a training loop, and nothing taken from stdout.
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._stale:
                self._show()
            if self._live is not None:
                self._live.stop()
                self._live = None

    def update(self, phase: str, fields: StatusFields) -> None:
        """The newest state; drawn only when the last drawing is old enough, else a comparison of two numbers."""
        now = self._clock()
        with self._lock:
            if phase != self._phase:
                self._phase, self._phase_start, self._phase_done = phase, now, fields.get("done", 0)
                self._phase_paused = fields.get("paused", 0.0)
            begins = fields.get("evaluating", False) and not self._fields.get("evaluating", False)
            self._fields, self._stale = fields, True
            # Why training stands still is said at once: an evaluation may be over before a log's next line.
            if begins or self._shown_at is None or now - self._shown_at >= self._period:
                self._show()

    def say(self, text: str) -> None:
        """Print `text` above the line, at once."""
        with self._lock:
            if self._live is not None:
                # Whole lines, for the terminal to wrap: what is to be copied must not be cut in two.
                whole = Group(Text(text, no_wrap=True, overflow="ignore"))  # a bare Text would be made anew
                self._live.console.print(whole, crop=False)
            else:
                self._print(text)

    def _show(self) -> None:
        self._shown_at, self._stale = self._clock(), False
        line = format_status(self._phase, self._fields, self._seconds_left(self._shown_at))
        if self._live is not None:
            self._live.update(Text(line), refresh=True)
        else:
            self._print(line)

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def _seconds_left(self, now: float) -> float | None:
        """Time to the end of the phase at its mean speed so far; None where the end or the speed is unknown."""
        done, total = self._fields.get("done"), self._fields.get("total")
        spent = now - self._phase_start - (self._fields.get("paused", 0.0) - self._phase_paused)
        if done is None or total is None or done <= self._phase_done or spent < STEADY:
            return None
        return spent / (done - self._phase_done) * max(0, total - done)


def format_status(phase: str, fields: StatusFields, seconds_left: float | None = None) -> str:
    """The line as text, for example `train 1,200/20,000 | eta 2:05 | ... | learner waits for actor | snapshot 24`."""
    parts = [phase]
    if "done" in fields and "total" in fields:
        parts[0] += f" {fields['done']:,}/{fields['total']:,}"
    if fields.get("evaluating"):
        parts.append("evaluating")
    if seconds_left is not None:
        parts.append(f"eta {_clock_time(seconds_left)}")
    if "step" in fields:
        parts.append(f"step {fields['step']:,}")
    if "updates_per_s" in fields:
        parts.append(f"{fields['updates_per_s']:.0f} updates/s")
    if "env_steps" in fields:
        parts.append(f"{fields['env_steps']:,} env steps")
    if "episodes" in fields:
        parts.append(f"{fields['episodes']:,} episodes")
    success = fields.get("success")
    if success is not None:
        parts.append(f"success without intervention {success:.0%} (of the last 20)")
    human = fields.get("human")
    if human is not None:
        parts.append(f"human {human:.1%}")
    if "learner_wait" in fields and "actor_wait" in fields:
        parts.append(waits(fields))
    if stalled := fields.get("stalled"):
        parts.append(f"{stalled}, nothing is acknowledged")
    if empty := fields.get("empty_half"):
        parts.append(f"{'online' if empty == 'demo' else 'demo'} data only, {empty} half is empty")
    if "version" in fields:
        parts.append(f"snapshot {fields['version']}")
    return " | ".join(parts)


def who_waits(learner_wait: float, actor_wait: float) -> str:
    """Which side holds the other up, from the shares of time (0..1) each one waited."""
    if max(learner_wait, actor_wait) < WAITING:
        return "both busy"
    return LEARNER_WAITS if learner_wait >= actor_wait else ACTOR_WAITS


def waits(fields: StatusFields) -> str:
    """Which side holds the other up, and for how much: `learner waits for 312 more steps`."""
    side = who_waits(fields["learner_wait"], fields["actor_wait"])
    # The shares are of what has passed; a first update that is being compiled holds up actors alone.
    if side == LEARNER_WAITS and fields.get("may_record") == 0 and fields.get("updates_due"):
        side = ACTOR_WAITS
    actors = fields.get("actors")
    if side == LEARNER_WAITS:
        missing = fields.get("steps_missing", 0)
        unconnected = ", no actor is connected" if actors == () else ""
        return (f"learner waits for {missing:,} more step{'s' * (missing != 1)}" if missing else side) + unconnected
    left = fields.get("may_record")
    if side != ACTOR_WAITS or left is None:
        return side
    who = actors[0] if actors is not None and len(actors) == 1 else "actors"
    return f"{side}: {who} may record {left:,} more steps, {fields.get('updates_due', 0):,} updates are due"


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
