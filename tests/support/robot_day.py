"""The stages of a first day with a robot, as whole processes: the commands that a lab gives, one after the other."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from processes import Process
from robot_moments import press_on
from robot_process import MAIN
from robot_served import HERE

from serl_chunk.runs.metrics import read_metrics
from serl_chunk_robot.client.client import RobotClient, RobotError

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 400.0


def _port(count: int) -> int:
    """The first of `count` consecutive free ports, none of which the system gives to other sockets meanwhile."""
    while True:
        first = random.randrange(15_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for k in range(count):
                stack.enter_context(socket.socket()).bind((HERE, first + k))
            return first


class Day:
    """One day in a folder, and the operator who clears the robot whenever it was stopped, where one `clears`.

    `file` is the robot's file, which the caller writes with the port `port`. `serving`: additions to the environment of
    the robot's server. `close` ends every process.
    """

    def __init__(
        self, folder: Path, exp_name: str, settings: Sequence[str] = (), serving: Mapping[str, str] | None = None,
        *, clears: bool = True,
    ) -> None:  # fmt: skip
        self.folder, self.port, self.learner_port = folder, _port(8), _port(3)
        self.file, self.run, self.demos = folder / "robot.toml", folder / "run", folder / "demos"
        self.server_log = folder / "server.log"
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder), "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
        self.flags = ["--exp_name", exp_name, f"--config.robot.server={HERE}:{self.port}"]
        self.server: subprocess.Popen[bytes] | None = None
        self._settings = list(settings)
        self.serving, self._began = dict(serving or {}), time.monotonic()
        self._started: list[Process] = []
        self._clears = contextlib.ExitStack()
        if clears:
            self._clears.enter_context(self.clearing())

    @contextlib.contextmanager
    def clearing(self) -> Iterator[None]:
        """Clear the robot whenever it was stopped, and let it go on."""
        ended = threading.Event()
        thread = threading.Thread(target=self._clear, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(10)

    def _clear(self, ended: threading.Event) -> None:
        while not ended.wait(0.5):
            try:
                with RobotClient(f"{HERE}:{self.port}", name="hands", role="operator", answer=1.0) as operator:
                    while not ended.wait(0.2):
                        press_on(operator, operator.next_state())
            except RobotError:
                continue

    # Stages.

    def robot(self, *words: str, status: int = 0) -> str:
        """Run a command of the robot to its end; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "serl_chunk", "robot", *words], env=self.environment, cwd=self.folder,
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def serve(self) -> None:
        """Start the robot's server, and wait until the robot was cleared."""
        with self.server_log.open("ab") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-c", MAIN.format(gap=2.0), "serve", str(self.file)],
                env={**self.environment, **self.serving},
                stderr=log,
                cwd=self.folder,
            )
        with RobotClient(f"{HERE}:{self.port}", name="watcher") as watcher:
            watcher.next_state(60)
            self.wait(lambda: watcher.next_state(5)["state"] in ("HELD", "HOLD"), "the robot is not cleared")

    def record(self, n: int, *more: str) -> str:
        words = ["record", *self.flags, "--policy", "scripted", "--n_demos", str(n), "--out", str(self.demos)]
        return self.ends(self.start(*words, *more))

    def learner(self) -> Process:
        more = ["--learner", "--debug", "--demo_path", str(self.demos), "--checkpoint_path", str(self.run)]
        return self.start(*self.at_learner, *more)

    def actor(self) -> Process:
        return self.start(*self.at_learner, "--actor", "--spool_path", "spool")

    def episodes(self) -> int:
        if not (self.run / "metrics.jsonl").exists():
            return 0
        return len(read_metrics(self.run)["episode"])

    def goes_on(self, episodes: int = 2) -> None:
        goal = self.episodes() + episodes
        self.wait(lambda: self.episodes() >= goal, "no more episodes come")

    def evaluate(self, n: int) -> float:
        """Evaluate the newest policy; returns its success rate."""
        words = ["--actor", "--eval_checkpoint_step", "latest", "--eval_n_trajs", str(n), "--checkpoint_path", "run"]
        output = self.ends(self.start(*self.at_learner, *words))
        found = re.findall(r"evaluation: success_rate=([01]\.\d+) n=(\d+)", output)
        assert [int(of) for _, of in found] == [n], output
        return float(found[0][0])

    def export(self) -> Path:
        self.ends(self.start("data", "export", str(self.run), "--format", "lerobot", "--out", "lerobot"))
        assert (self.folder / "lerobot/meta/info.json").exists()
        return self.folder / "lerobot"

    # Processes.

    @property
    def at_learner(self) -> list[str]:
        return [*self.flags, *self._settings, "--port", str(self.learner_port)]

    def start(self, *words: str) -> Process:
        return self.add(Process(words, self.new_log(), self.environment, cwd=self.folder))

    def new_log(self) -> Path:
        return self.folder / f"output_{len(self._started)}.txt"

    def add(self, process: Process) -> Process:
        self._started.append(process)
        return process

    def ends(self, process: Process) -> str:
        self.wait(lambda: not process.running, f"it did not end: {' '.join(process.command)}")
        return process.ends()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        ends = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > ends:
                logs = [self.server_log.read_text()] if self.server_log.exists() else []
                raise AssertionError("\n\n".join([what, *(text[-3000:] for text in [*logs, *self.outputs()])]))
            time.sleep(0.2)

    def outputs(self) -> list[str]:
        return [process.output for process in self._started]

    def close(self) -> None:
        self._clears.close()
        for process in self._started:
            process.close()
        if self.server is not None:
            self.server.kill()
            self.server.wait()
