"""A first day without hardware: a robot's file, check, demonstrations through the server, learning, kills, export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import Process, settings
from robot_served import HERE, free_port

from serl_chunk_robot.client import RobotClient, RobotError

ROOT = Path(__file__).resolve().parents[2]
# Machines that run tests may stand still for longer than robot PCs may.
MAIN = """
from serl_chunk_robot import loop, main
from serl_chunk_robot.safety import watchdog
loop.GAP, watchdog.LEAST_VALIDITY, watchdog.SILENCE = 2.0, 0.5, 2.0
raise SystemExit(main.main())
"""
PATIENCE = 400.0


class Day:
    """The processes of one day, and the operator who clears the robot whenever it was stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.learner_port = folder, free_port(), free_port(3)
        self.file, self.run = folder / "robot.toml", folder / "run"
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder), "JAX_PLATFORMS": "cpu"}
        self._started: list[Process] = []
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._clear, daemon=True)
        self._thread.start()

    def _clear(self) -> None:
        while not self._ended.wait(0.5):
            try:
                with RobotClient(f"{HERE}:{self.port}", name="hands", role="operator", answer=1.0) as operator:
                    while not self._ended.wait(0.2):
                        if operator.next_state()["state"] == "STOPPED":
                            operator.request("clear")
            except RobotError:
                continue

    def robot(self, *words: str, status: int = 0) -> str:
        """Run a command of the robot to its end; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "serl_chunk", "robot", *words], env=self.environment, cwd=self.folder,
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def serve(self) -> subprocess.Popen[bytes]:
        log = (self.folder / "server.log").open("ab")
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, "serve", str(self.file)], env=self.environment, stderr=log, cwd=self.folder
        )

    def start(self, *words: str) -> Process:
        log = self.folder / f"output_{len(self._started)}.txt"
        self._started.append(Process(words, log, self.environment, cwd=self.folder))
        return self._started[-1]

    def flags(self, **changes: object) -> list[str]:
        served = {"robot__server": f"{HERE}:{self.port}", "actor__clock": "realtime"}
        return ["--exp_name", "fake_aloha", "--port", str(self.learner_port), *settings(**served, **changes)]

    def learner(self) -> Process:
        more = ["--learner", "--debug", "--demo_path", "demos", "--checkpoint_path", "run"]
        return self.start(*self.flags(), *more)

    def actor(self) -> Process:
        return self.start(*self.flags(), "--actor", "--spool_path", "spool")

    def wait(self, condition, what: str) -> None:
        ends = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < ends, f"{what}\n" + "\n".join(p.output[-3000:] for p in self._started)
            time.sleep(0.2)

    def close(self) -> None:
        self._ended.set()
        for process in self._started:
            process.close()
        self._thread.join(10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_first_day_from_a_new_file_to_an_exported_data_set(tmp_path):
    day = Day(tmp_path)
    server = None
    try:
        day.robot("new", "fresh.toml")
        assert "driver" in (tmp_path / "fresh.toml").read_text()
        task = (ROOT / "experiments/robots/fake_aloha.toml").read_text()
        day.file.write_text(task.replace('driver = "fake_aloha"', f'port = {day.port}\ndriver = "fake_aloha"', 1))
        server = day.serve()
        with RobotClient(f"{HERE}:{day.port}", name="watcher") as watcher:
            watcher.next_state(60)
            day.wait(lambda: watcher.next_state(5)["state"] == "HOLD", "the robot is not cleared")
        assert "0 failed" in day.robot("check", "robot.toml")
        [report] = tmp_path.glob("check_*.json")
        assert json.loads(report.read_text())["ok"]
        served = f"--config.robot.server={HERE}:{day.port}"
        record = day.start(
            "record", "--exp_name", "fake_aloha", "--n_demos", "3", "--out", "demos", "--cameras", "none", served
        )
        day.wait(lambda: not record.running, "recording did not end")
        record.ends()
        assert "evaluating" in day.robot("dry", "demos", "--file", "robot.toml")

        learner, actor = day.learner(), day.actor()
        day.wait(lambda: "RUN: armed" in (tmp_path / "server.log").read_text().split("released by")[-1], "no arm")
        server.kill()
        server.wait()
        server = day.serve()
        time.sleep(5)
        actor.kill()
        actor = day.actor()
        time.sleep(5)
        assert learner.running
        learner.kill()
        learner = day.learner()
        day.wait(lambda: not learner.running, "the learner did not end")
        learner.ends()
        day.wait(lambda: not actor.running, "the actor did not end")

        evaluation = day.start(
            *day.flags(),
            "--actor",
            "--eval_checkpoint_step",
            "latest",
            "--eval_n_trajs",
            "2",
            "--checkpoint_path",
            "run",
        )
        day.wait(lambda: not evaluation.running, "the evaluation did not end")
        evaluation.ends()
        export = day.start("data", "export", "run", "--format", "lerobot", "--out", "lerobot")
        day.wait(lambda: not export.running, "the export did not end")
        export.ends()
        assert (tmp_path / "lerobot/meta/info.json").exists()
    finally:
        day.close()
        if server is not None:
            server.kill()
            server.wait()
