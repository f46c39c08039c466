"""An actor whose SpaceMice are virtual: the command serl-chunk, and a socket that moves its mice.

    python mouse_actor.py FOLDER MICE ARGUMENTS

All of the product runs, and of pyspacemouse; only hidapi is replaced (`tests/support/fake_hid.py`). The mice are
FOLDER/hidraw0 and so on. At its end the actor writes FOLDER/recorded.json: episode and tick of each step that it
recorded. The socket FOLDER/mouse.sock takes one JSON object a line and answers each with one, whose `at` is the moment
of the report or of the pulled plug, s of this machine's monotonic clock; not with `"quiet": true`. `mouse` is a mouse's
number, by default 0:

- `{"do": "push", "x": 350, "stale": 62}`: report a deflection 125 times a second from now on. So many older reports, of
  the deflection before, are put in front of the first one.
- `{"do": "rest"}`: report zeros once, as a mouse that is let go.
- `{"do": "press", "buttons": 1}`: report which buttons are down, a bit for each.
- `{"do": "unplug"}`, `{"do": "plug"}`.
- `{"do": "prefer"}`: give the actor real-time priority, where the system permits it.
- `{"do": "sent", "since": s}`: what the actor commanded since then, and which mice were opened.
"""

from __future__ import annotations

import json
import os
import socketserver
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import fake_hid
import numpy as np

from serl_chunk import main
from serl_chunk.actor.recorder import EpisodeRecorder
from serl_chunk.devices.human import HumanIntervention
from serl_chunk.types import Begin, RecordSink, Step
from serl_chunk_robot.client.client import RobotClient
from serl_chunk_robot.devices.base import Sample
from serl_chunk_robot.devices.spacemouse import SpaceMouse

KEPT = 20_000  # commands
LOOKS = 200  # looks at a mouse, whose newest reports are kept


class Mouse:
    """One virtual mouse, and what moves it."""

    def __init__(self, hid: fake_hid.FakeHid, number: int) -> None:
        self._mouse = hid.mouse(f"hidraw{number}")
        self._deflection: bytes | None = None  # that is reported
        self._last = fake_hid.translation()
        self._lock, self._changed = threading.Lock(), threading.Event()
        threading.Thread(target=self._report, daemon=True).start()

    def push(self, x: int = 0, y: int = 0, z: int = 0, stale: int = 0) -> dict[str, Any]:
        report = fake_hid.translation(x, y, z)
        with self._lock:
            at = time.monotonic()
            self._mouse.push(*[self._last] * stale, report)
            self._last = self._deflection = report
        self._changed.set()
        return {"at": at}

    def rest(self) -> None:
        with self._lock:
            self._deflection, self._last = None, fake_hid.translation()
            self._mouse.push(self._last)

    def press(self, buttons: int) -> None:
        with self._lock:
            self._mouse.push(fake_hid.buttons(buttons))

    def unplug(self) -> dict[str, Any]:
        at = time.monotonic()
        self._mouse.unplug()
        return {"at": at}

    def plug(self) -> None:
        self._mouse.plug()

    def _report(self) -> None:
        while self._changed.wait():
            time.sleep(1 / fake_hid.RATE)
            with self._lock:
                if self._deflection is None:
                    self._changed.clear()
                else:  # an unplugged mouse has no handle
                    self._mouse.push(self._deflection)


class Hands:
    """All mice, and the moments of the commands that followed."""

    def __init__(self, hid: fake_hid.FakeHid, mice: int) -> None:
        self._hid, self._mice = hid, [Mouse(hid, number) for number in range(mice)]
        self._began = self._reported = 0.0
        self._commands: deque[tuple[int, float, float, float, list[float]]] = deque(maxlen=KEPT)
        self.recorded: list[tuple[str, list[int]]] = []  # episodes, and their ticks

    def answer(self, of: dict[str, Any]) -> dict[str, Any]:
        do, number = of.pop("do"), of.pop("mouse", 0)
        done = getattr(self._mice[number] if hasattr(Mouse, do) else self, do)
        return {"at": time.monotonic(), **(done(**of) or {})}

    def prefer(self) -> dict[str, Any]:
        try:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setscheduler(int(thread), os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        except (AttributeError, OSError):
            return {"permitted": False}
        return {"permitted": True}

    def sent(self, since: float) -> dict[str, Any]:
        """Each command: its number, when the tick began that reads the device, when the newest report that it is made
        of came, when it was sent, and the targets.
        """
        return {"commands": [c for c in list(self._commands) if c[3] >= since], "opened": self._hid.opened}

    def watch(self) -> None:
        """Note when each tick reads the device, its newest report, and when its command is sent; and each step."""
        poll, send, step = HumanIntervention.poll, RobotClient.send_command, EpisodeRecorder.step
        look, read, made = SpaceMouse._look, SpaceMouse.read, EpisodeRecorder.__init__
        newest: deque[tuple[float, float]] = deque(maxlen=LOOKS)  # stamp of a sample, moment of its newest report

        def looked(mouse: SpaceMouse) -> Sample:
            sample = look(mouse)
            newest.append((sample.stamp, self._hid.newest))
            return sample

        def was_read(mouse: SpaceMouse) -> Sample:
            sample = read(mouse)
            self._reported = next((moment for stamp, moment in list(newest) if stamp == sample.stamp), 0.0)
            return sample

        def polled(human: HumanIntervention, *arguments: Any) -> Any:
            self._began = time.monotonic()
            return poll(human, *arguments)

        def noted(client: RobotClient, target: np.ndarray, number: int | None = None) -> bool:
            done = send(client, target, number)
            self._commands.append((number or 0, self._began, self._reported, time.monotonic(), target.tolist()))
            return done

        def begun(recorder: EpisodeRecorder, sink: RecordSink, begin: Begin, *more: Any) -> None:
            made(recorder, sink, begin, *more)
            self.recorded.append((begin.episode_id, []))

        def kept(recorder: EpisodeRecorder, of: Step, *more: Any) -> None:
            self.recorded[-1][1].append(of.tick)
            step(recorder, of, *more)

        SpaceMouse._look, SpaceMouse.read = looked, was_read  # type: ignore[method-assign]
        HumanIntervention.poll = polled  # type: ignore[method-assign]
        RobotClient.send_command = noted  # type: ignore[method-assign]
        EpisodeRecorder.__init__, EpisodeRecorder.step = begun, kept  # type: ignore[method-assign]


def serve(hands: Hands, path: Path) -> None:
    """Take commands on a socket, in a thread."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                of = json.loads(line)
                quiet, answer = of.pop("quiet", False), hands.answer(of)
                if not quiet:
                    self.wfile.write(json.dumps(answer).encode() + b"\n")

    path.unlink(missing_ok=True)
    server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with fake_hid.installed(folder) as hid:
        hands = Hands(hid, int(sys.argv[2]))
        hands.watch()
        serve(hands, folder / "mouse.sock")
        try:
            code = main.main(sys.argv[3:])
        finally:
            (folder / "recorded.json").write_text(json.dumps(hands.recorded))
        raise SystemExit(code)
