"""Training on data alone as a process: killed in the middle, resumed, evaluated meanwhile, gone on with an actor."""

import json
import re

import pytest
from processes import PATIENCE, actor_totals, checkpoints, learner_totals, settings

from serl_chunk.runs.metrics import read_metrics

pytestmark = pytest.mark.timeout(4 * PATIENCE)
OFFLINE = {"learner__pretrain_steps": 0, "learner__checkpoint_period": 20}


@pytest.mark.slow
def test_an_offline_phase_is_killed_and_goes_on_until_an_actor_takes_over(processes, tmp_path):
    run = tmp_path / "run"
    data = ("--debug", "--demo_path", str(processes.demos), "--checkpoint_path", str(run))
    evaluated = ("--eval_interval", "40", "--eval_episodes", "2")
    alone = ("--exp_name", "fake_aloha", "--learner", *data, *evaluated, *settings(**OFFLINE), "--online_steps", "0")

    killed = processes.start(*alone, "--offline_steps", "1000000")
    killed.until(lambda: max(checkpoints(run), default=0) >= 60, "no checkpoint of the offline phase appeared")
    killed.kill()

    total = checkpoints(run)[-1] + 60
    output = processes.both(run, *evaluated, "--offline_steps", str(total), **OFFLINE).ends()
    [step] = map(
        int, re.findall(r"resumed at step (\d+), 0 online steps, 4 demonstrations, in phase [0-9/]+ offline", output)
    )
    assert 60 <= step < total
    updates, steps = learner_totals(output)
    assert updates == total + 40
    assert actor_totals(output)[1] == steps > 0
    rows = read_metrics(run)["eval"]
    assert [row["step"] for row in rows] == sorted({*range(40, updates, 40), total, updates})
    assert all((run / "evaluations" / f"learner_{row['step']}.json").exists() for row in rows)
    assert json.loads((run / "config.json").read_text())["learner"]["offline_steps"] == total
