"""What the page of a running actor shows, as plain values, and its camera pictures as files."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from serl_chunk.console.bindings import EFFECTIVE, MEANING, STOPS, Action, shown_input
from serl_chunk.console.feed import Frame, LiveFeed, Planned, Tick
from serl_chunk.console.view import OLD, ConsoleState, cells, held_for
from serl_chunk.types import RobotSpec, ShownRobot
from serl_chunk.viewer.content import to_jpeg
from serl_chunk_robot.client.client import UNCONFIRMED

if TYPE_CHECKING:
    from serl_chunk.robots.served.cameras import SeenPicture

ROWS = 40  # ticks in one event, and decisions: more are sent with the next ones
BEHIND = 250  # ticks that a new or slow viewer is sent at most
WIDTH, QUALITY = 640, 80  # of a picture, at most


Frames = Callable[[], Mapping[str, "Frame | SeenPicture"]]
"""Returns the newest frame of each camera, on a thread of the server."""


def info(spec: RobotSpec, bindings: Mapping[str, Action], title: str, *, served: bool = False) -> dict[str, Any]:
    """Return what does not change while the actor runs. `served`: a robot's server has the cameras."""
    buttons: dict[Action, list[str]] = {}
    for key, action in bindings.items():
        buttons.setdefault(action, []).append(key)
    arms = [f"arm {i} " for i, (low, high) in enumerate(spec.arms) for _ in range(low, high)] if spec.arms else []
    return {
        "title": title, "hz": spec.control_hz, "served": served,
        "low": _rounded(spec.action_low), "high": _rounded(spec.action_high),
        "names": [f"{arms[i] if i < len(arms) else ''}action {i}" for i in range(spec.action_dim)],
        "keys": {key: action.value for key, action in bindings.items()},
        "stops": [key for key, action in bindings.items() if action in STOPS],
        "buttons": [
            {"action": a.value, "key": keys[0], "keys": [shown_input(k) for k in keys], "meaning": MEANING[a]}
            for a in MEANING if (keys := buttons.get(a))
        ],
        "old": OLD, "unconfirmed": UNCONFIRMED,
    }  # fmt: skip


def state_json(state: ConsoleState) -> dict[str, Any]:
    """Return what the terminal shows."""
    return {
        "word": state.word.value, "countdown": None if state.countdown is None else math.ceil(state.countdown),
        "question": state.question, "progress": state.progress, "look": state.notice, "alarm": state.alarm,
        "held": held_for(state),
        "robot": None if (r := state.robot) is None else [r.generation, r.controller, r.process],
        "proposed": None if (p := state.proposed) is None else [p.number, [_rounded(row) for row in p.actions]],
        "obstacles": [list(obstacle) for obstacle in state.obstacles],
        "cells": [list(cell) for cell in cells(state)],
        "effective": sorted(action.value for action in EFFECTIVE[state.word]),
    }  # fmt: skip


def shown_robot(sent: object) -> ShownRobot | None:
    """Return the robot that a page showed at a key, of `robot` of `state_json`; None for anything else."""
    match sent:
        case [int(generation), str(controller), str(process)]:
            return ShownRobot(generation, controller, process)
    return None


class Cursor:
    """How far a viewer has been sent what the feed has; `news` returns what is new since the last call."""

    def __init__(self, feed: LiveFeed, spec: RobotSpec, frames: Frames) -> None:
        self._feed, self._frames = feed, frames
        self._joints = np.array(spec.joint_of_action, int)
        self._tick = self._plan = 0
        self._episodes: object = None  # that were sent

    def news(self, state: ConsoleState) -> dict[str, Any]:
        """Return new ticks and decisions, and the moments of the cameras' newest frames."""
        feed = self._feed
        self._tick = max(self._tick, feed.ticks.count - BEHIND)
        ticks = feed.ticks.since(self._tick, ROWS)
        plans = feed.plans.since(max(self._plan, feed.plans.count - BEHIND), ROWS)
        self._tick = ticks[-1][0] + 1 if ticks else self._tick
        self._plan = plans[-1][0] + 1 if plans else self._plan
        reported = dict(state.cameras)  # by the actor, which knows when a robot's cameras took them
        frames, now = self._frames(), time.monotonic()
        episodes, sent = feed.episodes, self._episodes
        self._episodes = episodes
        return {
            "now": now, "episode": feed.episode_id, "inside": feed.inside,
            "episodes": None if episodes is sent else [list(row) for row in episodes],
            "ticks": [self._tick_json(row) for _, row in ticks],
            "plans": [_plan_json(row) for _, row in plans],
            "cameras": [
                {"name": name, "count": f.serial, "moment": min(f.moment, now - reported.get(name, 0.0)),
                 "height": f.image.shape[0], "width": f.image.shape[1], "view": getattr(f, "view", None)}
                for name, f in frames.items()
            ],
        }  # fmt: skip

    def _tick_json(self, row: Tick) -> list[Any]:
        measured = np.where(self._joints >= 0, row.state[self._joints], np.nan)
        by = row.source.name.lower()
        return [row.episode, row.tick, by, row.decision_tick, _rounded(measured), _rounded(row.action)]


def _plan_json(row: Planned) -> dict[str, Any]:
    record = row.record
    found: dict[str, Any] = {"episode": row.episode, "tick": row.tick, "chunk": [_rounded(a) for a in row.actions]}
    for name in ("q", "q_spread"):
        value = np.asarray(record[name], np.float64).reshape(-1) if name in record else np.zeros(0)
        found[name] = _number(value.max()) if value.size else None
    values = np.asarray(record.get("values", ()), np.float64).reshape(-1)
    found["low"], found["high"] = (_number(values.min()), _number(values.max())) if values.size else (None, None)
    return found


def _rounded(values: Sequence[float] | np.ndarray) -> list[float | None]:
    return [_number(v) for v in np.asarray(values, np.float64).tolist()]


def _number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


class Pictures:
    """The newest picture of each camera as a JPEG file, encoded once for all viewers, on a thread that requests it."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._lock = threading.Lock()
        self._files: dict[str, tuple[np.ndarray, bytes]] = {}  # camera -> what was encoded, and the file

    def get(self, camera: str) -> bytes | None:
        """Return a file; None for a camera without a frame."""
        with self._lock:  # one at a time: the control loop needs the processor
            frame, made = self._frames().get(camera), self._files.get(camera)
            if frame is None:
                return None
            if made is None or made[0] is not frame.image:
                made = self._files[camera] = frame.image, to_jpeg(frame.image, WIDTH, QUALITY)
            return made[1]
