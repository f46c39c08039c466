"""A stand-in of HIL-SERL's HTTP server with a simulated arm, which can also freeze, repeat, err, hang and refuse."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from serl_chunk_robot.geometry.rotations import axis_angle, matrix_of_quat, quat_of_euler

START = np.array([0.55, 0.05, 0.3, np.pi, 0.0, -np.pi / 2])
ORDERS = ("set_load", "clearerr", "update_param", "jointreset", "open_gripper", "close_gripper", "close_gripper_slow",
          "activate_gripper", "reset_gripper")  # fmt: skip


def angle_between(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(axis_angle(matrix_of_quat(a) @ matrix_of_quat(b).T)))


def axis(vector: np.ndarray) -> tuple[np.ndarray, float]:
    """The quaternion of a rotation: its vector, and its number."""
    angle = np.linalg.norm(vector)
    return vector * np.sinc(angle / (2 * np.pi)) / 2, float(np.cos(angle / 2))


class Arm:
    """An arm under an impedance controller: it follows its target with a first-order lag. Not thread-safe."""

    def __init__(self, start: np.ndarray, clock: Callable[[], float]) -> None:
        self.pose = np.append(start[:3], quat_of_euler(start[3:]))
        self.target, self.vel, self.gripper = self.pose.copy(), np.zeros(6), 1.0
        self.reflex = False  # it stands still until "clearerr", and its next target is where it stands
        self.blocked = False  # by an obstacle: it obeys no target
        self.lag, self.noise = 0.03, 0.1  # s; of the force, which makes each state differ from the one before
        self._closed, self._clock, self._moment = False, clock, clock()
        self._rng = np.random.default_rng(0)

    def advance(self) -> None:
        now = self._clock()
        elapsed, self._moment = now - self._moment, now
        still = self.reflex or self.blocked
        share = 0.0 if still else 1 - np.exp(-elapsed / self.lag)
        turn = axis_angle(matrix_of_quat(self.target[3:]) @ matrix_of_quat(self.pose[3:]).T)
        way = np.concatenate([self.target[:3] - self.pose[:3], turn])
        self.vel = np.zeros(6) if still else (1 - share) * way / self.lag
        self.gripper += (1 - np.exp(-elapsed / 0.1)) * (float(not self._closed) - self.gripper)
        if not still and np.linalg.norm(way) > 1e-12:
            (x, y, z), w = axis(share * turn)
            u = self.pose[3:]
            left = np.array([[w, -z, y, x], [z, w, -x, y], [-y, x, w, z], [-x, -y, -z, w]])  # the product from the left
            self.pose = np.append(self.pose[:3] + share * way[:3], left @ u / np.linalg.norm(u))

    def obey(self, path: str, body: Any) -> None:
        if path == "pose" and not self.reflex:
            self.target = np.array(body["arr"])
            assert self.target.shape == (7,)
        elif path == "clearerr" and self.reflex:
            self.reflex, self.target = False, self.pose.copy()
        elif path.startswith("close_gripper") or path == "open_gripper":
            self._closed = path != "open_gripper"

    def state(self) -> dict[str, Any]:
        force = self.noise * np.abs(self._rng.standard_normal(3))
        return {"pose": self.pose.tolist(), "vel": self.vel.tolist(), "force": force.tolist(), "torque": [0.0] * 3,
                "q": [0.0] * 7, "dq": [0.0] * 7, "jacobian": [[0.0] * 7] * 6, "gripper_pos": self.gripper}  # fmt: skip


class FrankaServer:
    """The server of one arm, on a free port of loopback. Use it as a context.

    `requests` are the paths and contents of all requests but "getstate", in their order. `frozen`: states repeat.
    `errs`: paths that are answered with status 500. `hangs`: paths that are not answered until it is over. `answer`:
    what "getstate" answers instead.
    """

    def __init__(self, start: np.ndarray = START, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.arm, self._lock = Arm(start, clock), threading.Lock()
        self.requests: list[tuple[str, Any]] = []
        self.states = 0  # that were asked for
        self.frozen, self.errs, self.hangs, self.answer = False, set(), set(), None
        self._over, self._last = threading.Event(), b""
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = stand_in.handle(self.path.strip("/"), json.loads(content) if content else None)
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._http: ThreadingHTTPServer | None = None
        self._handler, self.port = Handler, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def paths(self, *which: str) -> list[str]:
        """The paths of all requests so far, or of those of `which`."""
        with self._lock:
            return [path for path, _ in self.requests if not which or path in which]

    def handle(self, path: str, body: Any) -> tuple[int, bytes]:
        if path in self.hangs:
            self._over.wait(30)
        with self._lock:
            if path in self.errs:
                return 500, b"internal server error"
            if path == "getstate":
                self.states += 1
                if not self.frozen or not self._last:
                    self.arm.advance()
                    self._last = json.dumps(self.arm.state()).encode()
                return 200, self._last if self.answer is None else self.answer
            if path != "pose" and path not in ORDERS:
                return 404, b"not found"
            self.requests.append((path, body))
            self.arm.advance()
            self.arm.obey(path, body)
            return 200, b"done"

    def start(self) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def goes_on(self) -> None:
        self.hangs = set()
        self._over.set()

    def refuse(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def __enter__(self) -> FrankaServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.refuse()
