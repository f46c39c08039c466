"""Two tasks that undo each other: two learners, one of which is killed, and one actor that gives both the robot."""

import json
import signal

import pytest
from ports import free_port
from processes import PATIENCE, settings

from serl_chunk.runs.metrics import read_metrics

pytestmark = pytest.mark.timeout(5 * PATIENCE)
RATE = "--config.robot.control_hz=50"  # five times the task's own
# In real time: a simulator's clock would wait for a learner that is gone. The scripted human sees to successes.
FAST = {"robot__max_episode_steps": 80, "actor__clock": "realtime", "actor__intervention": "scripted",
        "learner__utd_ratio": 0.1, "learner__max_steps": 1_000_000, "learner__warmup_episodes": 1}  # fmt: skip


@pytest.mark.slow
def test_a_killed_learner_leaves_the_robot_to_both_tasks_and_misses_nothing(processes, tmp_path):
    runs, ports = {}, {}

    def learner(task):
        return processes.start(
            "--exp_name", f"fake_pick_return:{task}", *settings(**FAST), RATE, "--learner", "--debug", "--port",
            str(ports[task]), "--demo_path", str(tmp_path / "demos" / task), "--checkpoint_path", str(runs[task]),
        )  # fmt: skip

    for task in ("pick", "return"):
        runs[task], ports[task] = tmp_path / task, free_port()
        out = (RATE, "--n_demos", "6", "--out", str(tmp_path / "demos" / task))
        processes.start("record", "--exp_name", f"fake_pick_return:{task}", *out).ends()
    learners = {task: learner(task) for task in runs}
    actor = processes.start(
        "--exp_name", "fake_pick_return:pick", *settings(**FAST), RATE, "--actor", "--port", str(ports["pick"]),
        "--undone_by", f"fake_pick_return:return@127.0.0.1:{ports['return']}", "--spool_path", str(tmp_path / "spool"),
    )  # fmt: skip

    def rows(task):
        return read_metrics(runs[task])["episode"] if (runs[task] / "metrics.jsonl").exists() else []

    actor.until(lambda: len(rows("return")) >= 2 and len(rows("pick")) >= 2, "no episodes of both tasks")
    learners["return"].kill()
    # Its last policy goes on: the other learner gets more starts that the other task made.
    made = len([row for row in rows("pick") if row["start"] == "other"])
    actor.until(lambda: len([r for r in rows("pick") if r["start"] == "other"]) > made + 1, "the other task is gone")
    learners["return"] = learner("return")
    known = len(rows("return"))
    actor.until(lambda: len(rows("return")) > known + 1, "no episode after the restart")
    actor.signal(signal.SIGTERM)
    output = actor.ends()
    for process in learners.values():
        process.signal(signal.SIGTERM)
        process.ends()
    for task in runs:
        [line] = [line for line in output.splitlines() if f"fake_{task}: actor ended" in line]
        episodes = rows(task)
        assert f"{len(episodes)} episodes, {sum(row['episode/l'] for row in episodes)} steps" in line
        assert len({row["episode"] for row in episodes}) == len(episodes)
        assert {row["start"] for row in episodes} <= {"reset", "other", "again"}
    spent = json.loads((runs["pick"] / "report.json").read_text())["robot_time"]
    assert spent["resets"] >= 1
    assert spent["longest_unreset_minutes"] > 0
