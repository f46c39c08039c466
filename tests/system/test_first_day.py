"""A first day without hardware: a robot's file, check, demonstrations through the server, learning, kills, export."""

from __future__ import annotations

import json
import time

import pytest
from processes import settings
from robot_day import ROOT, Day


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_first_day_from_a_new_file_to_an_exported_data_set(tmp_path):
    day = Day(tmp_path, "fake_aloha", settings(actor__clock="realtime"))
    try:
        day.robot("new", "fresh.toml")
        assert "driver" in (tmp_path / "fresh.toml").read_text()
        task = (ROOT / "experiments/robots/fake_aloha.toml").read_text()
        day.file.write_text(task.replace('driver = "fake_aloha"', f'port = {day.port}\ndriver = "fake_aloha"', 1))
        day.serve()
        assert "0 failed" in day.robot("check", "robot.toml")
        [report] = tmp_path.glob("check_*.json")
        assert json.loads(report.read_text())["ok"]
        day.record(3, "--cameras", "none")
        assert "evaluating" in day.robot("dry", "demos", "--file", "robot.toml")

        learner, actor = day.learner(), day.actor()
        day.wait(lambda: "RUN: armed" in day.server_log.read_text().split("released by")[-1], "no arm")
        day.kill_server()
        day.serve()
        time.sleep(5)
        actor.kill()
        actor = day.actor()
        time.sleep(5)
        assert learner.running
        learner.kill()
        learner = day.learner()
        day.ends(learner)
        day.wait(lambda: not actor.running, "the actor did not end")
        day.evaluate(2)
        day.export()
    finally:
        day.close()
