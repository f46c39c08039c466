"""A process that carries out calls one at a time. Needs the standard library only, in any interpreter."""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
ANSWER_SECONDS = 900.0  # longest wait for one call; the longest measurement takes a tenth


class Worker:
    """An object of class `name` of `module`, in a process of its own. Arguments and results are plain values (JSON)."""

    def __init__(self, module: str, name: str, python: str = sys.executable, path: Sequence[str] = ()) -> None:
        """`path`: folders that module imports from, beside this one."""
        self.what = f"{module}.{name}"
        theirs, self._down = os.pipe()
        self._up, ours = os.pipe()
        program = f"from support.worker import serve; serve({module!r}, {name!r}, {theirs}, {ours})"
        self._process = subprocess.Popen([python, "-c", program], pass_fds=(theirs, ours), env=environment(path))
        os.close(theirs)
        os.close(ours)
        self._answers = os.fdopen(self._up)

    def __call__(self, method: str, **arguments: Any) -> Any:
        self.start(method, **arguments)
        return self.result()

    def start(self, method: str, **arguments: Any) -> None:
        """Begin a call; `result` must follow before the next one."""
        os.write(self._down, json.dumps([method, arguments]).encode() + b"\n")

    def result(self) -> Any:
        """What the call that was started returns; ends the benchmark where it failed."""
        if not select.select([self._up], [], [], ANSWER_SECONDS)[0]:
            raise SystemExit(f"{self.what} did not answer within {ANSWER_SECONDS:g} s")
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"the process of {self.what} ended (exit status {self._process.wait()})")
        value, error = json.loads(line)
        if error:
            raise SystemExit(f"{self.what} failed:\n{error}")
        return value

    def kill(self) -> None:
        """End the process as a crash would."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        os.close(self._down)


def environment(path: Sequence[str] = ()) -> dict[str, str]:
    """For a process that imports from the folders of `path`, from this one and from the repository."""
    folders = [*path, str(BENCHMARKS), str(BENCHMARKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def serve(module: str, name: str, calls: int, answers: int) -> None:
    """The other process: carry out calls until the pipe closes."""
    served = getattr(importlib.import_module(module), name)()
    with os.fdopen(calls) as lines:
        for line in lines:
            method, arguments = json.loads(line)
            try:
                answer = [getattr(served, method)(**arguments), ""]
            except BaseException:
                answer = [None, traceback.format_exc()]
            os.write(answers, json.dumps(answer).encode() + b"\n")
    os._exit(0)  # threads of the contestants may wait for ever
