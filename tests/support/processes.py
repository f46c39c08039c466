"""Whole `serl-chunk` processes for tests: started with small settings, watched, and always ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from ports import free_port

# XLA_FLAGS of so many simulated devices. Collectives come in one order on all of them: threads of few cores could else
# wait for each other in different ones for ever.
SIMULATED = "--xla_cpu_enable_concurrency_optimized_scheduler=false --xla_force_host_platform_device_count={}"
PATIENCE = 120.0  # seconds before a test gives up; a busy machine is slow, a deadlock is for ever
SMALL = {
    "robot.max_episode_steps": 40, "agent.flow.hidden": 16, "agent.critic.hidden": 16, "agent.critic.ensemble": 2,
    "agent.candidates": 2, "learner.batch_size": 16, "learner.pretrain_steps": 20, "learner.warmup_episodes": 2,
    "learner.max_steps": 40, "learner.steps_per_update": 10, "learner.checkpoint_period": 20, "learner.log_period": 10,
    "transport.timeout_s": 2.0,
}  # fmt: skip
# Of the learner that several tests share: more updates than the run has, none before actors have come, and with the
# clock of an actor that has a robot's server.
LISTENING = {"learner__max_steps": 1_000, "learner__warmup_episodes": 1_000, "actor__clock": "realtime"}


def settings(**changes: object) -> list[str]:
    """`SMALL` as overrides; `changes` name fields with `__` for the dot: `learner__max_steps=10`."""
    fields = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--config.{name}={value}" for name, value in fields.items()]


class Process:
    """One `serl-chunk ARGUMENTS`; both streams are in `log`. `prefix`: a command that runs it, as ip netns exec."""

    program: Sequence[str] = ("-m", "serl_chunk")  # what Python runs

    def __init__(
        self, arguments: Sequence[str], log: Path, environment: Mapping[str, str], prefix: Sequence[str] = (),
        cwd: Path | None = None,
    ) -> None:  # fmt: skip
        self.command = [*prefix, sys.executable, *self.program, *arguments]
        self._log = log
        with log.open("xb") as file:
            self._popen = self._start(file, environment, cwd)

    def _start(self, file: IO[bytes], environment: Mapping[str, str], cwd: Path | None) -> subprocess.Popen[bytes]:
        # A group of its own: a Ctrl-C in the terminal of the tests is not meant for it.
        env = {**environment, **{k: v for k, v in os.environ.items() if k.startswith("JAX_NUMPY_")}}  # of this test
        return subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env,
            start_new_session=True, cwd=cwd,
        )  # fmt: skip

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def wait(self) -> int:
        try:
            return self._popen.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {PATIENCE:g} s\n{self._described()}") from None

    def ends(self, status: int = 0) -> str:
        got = self.wait()
        assert got == status, f"exit status {got}, expected {status}\n{self._described()}"
        return self.output

    def says(self, text: str) -> None:
        self.until(lambda: text in self.output, f"it never said {text!r}")

    def until(self, condition: Callable[[], bool], otherwise: str, *, at_work: str = "") -> None:
        """Wait for `condition` while the process runs; `otherwise` is the failure's first line.

        Patience begins anew with each line that says `at_work`.
        """
        deadline, lines = time.monotonic() + PATIENCE, 0
        while not condition():
            if not self.running and not condition():
                raise AssertionError(f"{otherwise}, and ended with {self._popen.returncode}\n{self._described()}")
            if at_work and (now := self.output.count(at_work)) > lines:
                deadline, lines = time.monotonic() + PATIENCE, now
            assert time.monotonic() < deadline, f"{otherwise}\n{self._described()}"
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def close(self) -> None:
        """End it and its children, whatever they do."""
        family = [self._popen.pid, *descendants(self._popen.pid)] if self.running else []
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._popen.wait()

    def _described(self) -> str:
        return f"{' '.join(self.command)}\n{self.output[-6000:]}"


class Cluster:
    """Starts processes that share a folder, ports and demonstrations, and ends those that are left."""

    def __init__(self, folder: Path, demos: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.demos, self.port = folder, demos, free_port()
        self._environment = environment
        self._started: list[Process] = []

    def start(
        self, *arguments: str, prefix: Sequence[str] = (), cwd: Path | None = None, kind: type[Process] = Process
    ) -> Process:
        log = self.folder / f"output_{len(self._started)}.txt"
        process = kind(arguments, log, self._environment, prefix, cwd)
        self._started.append(process)
        return process

    def flags(self, **changes: object) -> list[str]:
        return ["--exp_name", "fake_aloha", "--port", str(self.port), *settings(**changes)]

    def learner(self, run: Path, *more: str, kind: type[Process] = Process, **changes: object) -> Process:
        return self.start(
            *self.flags(**changes), "--learner", "--debug", "--demo_path", str(self.demos),
            "--checkpoint_path", str(run), *more, kind=kind,
        )  # fmt: skip

    def actor(
        self, *more: str, prefix: Sequence[str] = (), kind: type[Process] = Process, **changes: object
    ) -> Process:
        """An actor, of a learner on this machine unless `more` names its `--ip`."""
        return self.start(*self.flags(**changes), "--actor", *more, prefix=prefix, kind=kind)

    def both(self, run: Path, *more: str, **changes: object) -> Process:
        return self.learner(run, "--actor", *more, **changes)

    def close(self) -> None:
        for process in self._started:
            process.close()


@contextlib.contextmanager
def cluster(folder: Path, demos: Path, environment: Mapping[str, str]) -> Iterator[Cluster]:
    """A Cluster that ends what it started."""
    folder.mkdir(parents=True, exist_ok=True)
    c = Cluster(folder, demos, environment)
    try:
        yield c
    finally:
        c.close()


def actor_totals(output: str) -> tuple[int, int]:
    """(episodes, steps) of an actor's last line."""
    return _numbers(r"actor ended \(.*\): (\d+) episodes, (\d+) steps", output)


def learner_totals(output: str) -> tuple[int, int]:
    """(updates, online steps) of a learner's last lines."""
    return _numbers(r"(\d+) updates, (\d+) online steps", output)


def resumed_at(output: str) -> tuple[int, int]:
    """(step, online steps) that a learner says it continues from."""
    return _numbers(r"resumed at step (\d+), (\d+) online steps", output)


def checkpoints(run: Path) -> list[int]:
    folder = run / "checkpoints"
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []


def sentence(output: str) -> str:
    assert "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith("serl-chunk: "), output
    return last


def _numbers(pattern: str, output: str) -> tuple[int, int]:
    found = re.findall(pattern, output)
    assert len(found) == 1, f"expected {pattern!r} once in:\n{output}"
    return int(found[0][0]), int(found[0][1])


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found
