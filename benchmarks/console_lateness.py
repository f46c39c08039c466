"""How late a 50 Hz actor's ticks are with console, page and three cameras, and without them, in turns in one run.

    python benchmarks/console_lateness.py [--rounds 10] [--seconds 10] [--json FILE]

The control loop of an actor drives a robot of this process in real time, with an untrained policy. In each round it
runs two episodes of `--seconds`, in turns the one or the other first. `off`: no console, no page, no camera. `on`: the
operator's console on a pseudo terminal, the page with a viewer, and three cameras of 480 x 640 pixels, of which the
loop takes new pictures at 30 Hz and records them. Another process reads the terminal, and the page as a browser does:
its events, and each new picture up to ten times a second. Pictures come from memory: what a camera and its driver cost
is not measured here (camera_lateness.py).

Lateness is that of a tick's beginning against its deadline; processor time is the control thread's own, from tick to
tick. Printed are the medians over the rounds and, as `added`, that of the rounds' differences between on and off, with
the least and the largest. At most 0.1 ms of lateness (p50) and 0.3 ms of processor time a tick may be added: `holds`
says whether that is so. On a machine that does something else, start it at real-time priority (`chrt -r 1`).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from support.cli_args import make_parser, write_figures

HZ, CAMERA_HZ, HEIGHT, WIDTH, JOINTS = 50.0, 30.0, 480, 640, 14
CAMERAS = ("top", "left_wrist", "right_wrist")
FIRST = 25  # ticks of an episode that are not counted
LATENESS, PROCESSOR = 0.1, 0.3  # ms that may be added


def view(descriptor: int) -> None:
    """Read a terminal, and the pages whose addresses are lines of standard input; an empty line ends one."""
    threading.Thread(target=_drain, args=(descriptor,), daemon=True).start()
    while line := sys.stdin.readline().strip():
        ending = threading.Thread(target=sys.stdin.readline, daemon=True)
        ending.start()
        print(_view(urlsplit(line), ending), flush=True)
        ending.join()


def _view(url: Any, ending: threading.Thread) -> int:
    """Read a page until a thread has ended; returns how many pictures came."""
    name, shown, pictures = os.urandom(12).hex(), dict[str, int](), 0
    events, other = (http.client.HTTPConnection(url.hostname, url.port, timeout=10) for _ in range(2))
    events.request("GET", f"{url.path}events/{name}")
    said = 0.0
    for line in events.getresponse():
        if not ending.is_alive():
            break
        if not line.startswith(b"data: "):
            continue
        for camera in json.loads(line[6:])["cameras"]:
            if shown.get(camera["name"]) != camera["count"]:
                shown[camera["name"]] = camera["count"]
                other.request("GET", f"{url.path}picture/{camera['name']}/{camera['count']}")
                pictures += bool(other.getresponse().read())
        if time.monotonic() - said > 1:
            said = time.monotonic()
            other.request("POST", f"{url.path}here/{name}", "{}", {"Content-Type": "application/json"})
            other.getresponse().read()
    events.close()
    other.close()
    return pictures


def _drain(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1 << 16):
            pass


def make_robot(ticks: int) -> Any:
    """Return a robot whose joints go where they are commanded, for episodes of so many ticks."""
    from serl_chunk.robots.base import RobotEnv
    from serl_chunk.types import IMAGE_PREFIX, STATE, CameraSpec, Observation, RobotSpec

    class Arms(RobotEnv):
        def __init__(self) -> None:
            spec = RobotSpec(
                "arms", HZ, JOINTS, (-3.0,) * JOINTS, (3.0,) * JOINTS, tuple(range(JOINTS)), (6, 13),
                tuple(CameraSpec(name, HEIGHT, WIDTH) for name in CAMERAS), ticks, arms=((0, 7), (7, 14)),
            )  # fmt: skip
            self._set_spaces(spec, "on_request")
            rng = np.random.default_rng(0)
            coarse = rng.integers(0, 256, (30, HEIGHT // 8, WIDTH // 8, 3), np.uint8)
            self._pictures = [p.repeat(8, 0).repeat(8, 1) for p in coarse]
            self._q, self._tick, self._number = np.zeros(JOINTS, np.float32), 0, 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
            self._q, self._tick = np.zeros(JOINTS, np.float32), 0
            return {STATE: self._q.copy()}, {}

        def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
            self._q, self._tick = action.copy(), self._tick + 1
            return {STATE: self._q.copy()}, 0.0, False, self._tick >= ticks, {}

        def read_images(self, cameras: Sequence[str] | None = None) -> Observation:
            self._number = int(time.monotonic() * CAMERA_HZ)
            image = self._pictures[self._number % len(self._pictures)]
            return {IMAGE_PREFIX + name: image for name in cameras or CAMERAS}

        def frame_numbers(self) -> Mapping[str, int]:
            return dict.fromkeys(CAMERAS, self._number)

    return Arms()


class Bench:
    """An actor's control loop, and the process that reads its terminal and its page."""

    def __init__(self, seconds: float) -> None:
        import jax

        from serl_chunk.actor.policy import LocalPolicy
        from serl_chunk.agents.registry import make_agent
        from serl_chunk.config.experiment import ActorConfig, ExperimentConfig
        from serl_chunk.config.robots import FakeAlohaConfig
        from serl_chunk.data.preprocess import fit_preprocess
        from serl_chunk.types import Snapshot

        self.config = ExperimentConfig(
            name="console_lateness",
            robot=FakeAlohaConfig(),
            actor=ActorConfig(clock="realtime", frames="every_tick"),
        )
        self.env = make_robot(round(seconds * HZ))
        spec = self.env.robot_spec
        agent = make_agent(self.config, spec)
        params = agent.flatten_params(agent.policy_params(agent.init(jax.random.key(0))))
        self.policy = LocalPolicy(agent, fit_preprocess(self.config, spec, []), spec)
        self.policy.swap(Snapshot(1, params))
        master, self.terminal = pty.openpty()
        self._viewer = subprocess.Popen(
            [sys.executable, __file__, "--view", str(master)], pass_fds=(master,), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.close(master)
        self._pictures = 0.0  # of the last episode

    def episode(self, on: bool) -> dict[str, float]:
        """Run an episode; returns its figures, ms."""
        from serl_chunk.actor.episode import EpisodeRunner

        moments: list[float] = []
        with contextlib.ExitStack() as stack:
            operator, cameras = (stack.enter_context(self._console()), CAMERAS) if on else (None, ())
            runner = EpisodeRunner(
                self.env, self.policy, _Sink(), config=self.config, cameras=cameras, operator=operator,
                observer=lambda _: moments.append(time.thread_time()),
            )  # fmt: skip
            stack.callback(runner.close)
            late = runner.run_episode(0, explore=True).lateness
        return {"late_p50": late.p50_ms, "late_p99": late.p99_ms, "late_max": late.max_ms,
                "processor": 1e3 * float(np.diff(moments[FIRST:]).mean()), "pictures": self._pictures}  # fmt: skip

    def close(self) -> None:
        assert self._viewer.stdin is not None
        self._viewer.stdin.close()
        self._viewer.wait(20)
        os.close(self.terminal)

    @contextlib.contextmanager
    def _console(self) -> Iterator[Any]:
        from serl_chunk.console.console import OperatorConsole
        from serl_chunk.console.feed import LiveFeed
        from serl_chunk.live.server import LivePage
        from serl_chunk.operator.operator import Operator

        page = LivePage(0)
        stdin, stdout = self._viewer.stdin, self._viewer.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.closing(page), OperatorConsole(source=self.terminal, target=self.terminal) as console:
            assert console.terminal is not None, "the pseudo terminal is none"
            operator = Operator(console, None, amend=lambda _: None, end=lambda: None, now=time.monotonic)
            operator.feed = LiveFeed()
            page.begin(operator, operator.feed, self.env.robot_spec, title="benchmark")
            print(page.url, file=stdin, flush=True)
            yield operator
            print(file=stdin, flush=True)
            self._pictures = float(stdout.readline())


class _Sink:
    """Takes records, as a link to a learner does at once."""

    def begin(self, record: Any) -> None: ...

    def step(self, record: Any) -> None: ...

    def end(self, record: Any) -> None: ...


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with contextlib.closing(Bench(seconds)) as bench:
        bench.episode(on=True)  # compiles, and is not counted
        for k in range(rounds):
            for phase in ("off", "on") if k % 2 == 0 else ("on", "off"):
                runs[phase].append(bench.episode(phase == "on"))
    return {"rounds": rounds, "seconds": seconds, **figures(runs, seconds), "each": runs}


def figures(runs: dict[str, list[dict[str, float]]], seconds: float) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in ("late_p50", "late_p99", "late_max", "processor"):
        off, on = (np.array([run[name] for run in runs[phase]]) for phase in ("off", "on"))
        made[f"{name}_ms"] = {"off": float(np.median(off)), "on": float(np.median(on)), "added": _spread(on - off)}
    pictures = [run["pictures"] / seconds / len(CAMERAS) for run in runs["on"]]
    made["pictures_per_s_and_camera"] = float(np.median(pictures))
    late, processor = (made[name]["added"]["median"] for name in ("late_p50_ms", "processor_ms"))
    made["holds"] = bool(late <= LATENESS and processor <= PROCESSOR)
    return made


def _spread(values: np.ndarray) -> dict[str, float]:
    return {"median": float(np.median(values)), "least": float(values.min()), "largest": float(values.max())}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="of an episode")
    parser.add_argument("--view", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.view is not None:
        view(args.view)
        return
    made = measure(args.rounds, args.seconds)
    print(json.dumps({name: value for name, value in made.items() if name != "each"}, indent=2))
    write_figures(args, made)


if __name__ == "__main__":
    main()
