"""An actor whose SpaceMouse is virtual: the command serl-chunk, and a socket that moves its mouse.

    python mouse_actor.py FOLDER ARGUMENTS

All of the product runs, and of pyspacemouse; only hidapi is replaced (`tests/support/fake_hid.py`). The socket
FOLDER/mouse.sock takes one JSON object a line and answers each with one, whose `at` is the moment of the report or of
the pulled plug, s of this machine's monotonic clock:

- `{"do": "push", "x": 350, "stale": 62}`: report a deflection 125 times a second from now on. So many older reports, of
  the deflection before, are put in front of the first one.
- `{"do": "rest"}`: report zeros once, as a mouse that is let go.
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
from serl_chunk.devices.human import HumanIntervention
from serl_chunk_robot.client import RobotClient

KEPT = 20_000  # commands


class Hand:
    """What moves the mouse, and the moments of the commands that followed."""

    def __init__(self, hid: fake_hid.FakeHid) -> None:
        self._hid, self._mouse = hid, hid.mouse()
        self._deflection: bytes | None = None  # that is reported
        self._last = fake_hid.translation()
        self._lock, self._changed = threading.Lock(), threading.Event()
        self._began = 0.0
        self._commands: deque[tuple[float, float, list[float]]] = deque(maxlen=KEPT)
        threading.Thread(target=self._report, daemon=True).start()

    def answer(self, of: dict[str, Any]) -> dict[str, Any]:
        do = getattr(self, of.pop("do"))
        return {"at": time.monotonic(), **(do(**of) or {})}

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

    def unplug(self) -> dict[str, Any]:
        at = time.monotonic()
        self._mouse.unplug()
        return {"at": at}

    def plug(self) -> None:
        self._mouse.plug()

    def prefer(self) -> dict[str, Any]:
        try:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setscheduler(int(thread), os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        except (AttributeError, OSError):
            return {"permitted": False}
        return {"permitted": True}

    def sent(self, since: float) -> dict[str, Any]:
        return {"commands": [c for c in list(self._commands) if c[1] >= since], "opened": self._hid.opened}

    def _report(self) -> None:
        while self._changed.wait():
            time.sleep(1 / fake_hid.RATE)
            with self._lock:
                if self._deflection is None:
                    self._changed.clear()
                else:  # an unplugged mouse has no handle
                    self._mouse.push(self._deflection)

    def watch(self) -> None:
        """Note when each tick reads the device, and when its command is sent."""
        poll, send = HumanIntervention.poll, RobotClient.send_command

        def polled(human: HumanIntervention, *arguments: Any) -> Any:
            self._began = time.monotonic()
            return poll(human, *arguments)

        def noted(client: RobotClient, target: np.ndarray, *more: Any) -> bool:
            done = send(client, target, *more)
            self._commands.append((self._began, time.monotonic(), target.tolist()))
            return done

        HumanIntervention.poll = polled  # type: ignore[method-assign]
        RobotClient.send_command = noted  # type: ignore[method-assign]


def serve(hand: Hand, path: Path) -> None:
    """Take commands on a socket, in a thread."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write(json.dumps(hand.answer(json.loads(line))).encode() + b"\n")

    path.unlink(missing_ok=True)
    server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with fake_hid.installed(folder) as hid:
        hand = Hand(hid)
        hand.watch()
        serve(hand, folder / "mouse.sock")
        raise SystemExit(main.main(sys.argv[2:]))
