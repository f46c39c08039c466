"""The wall clock of either machine jumps by days; nothing that counts depends on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lab import LENGTH, TAIL, Lab

DAY = 86_400.0


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_when_clocks_jump(tmp_path, environment):
    path = os.pathsep.join([str(Path(__file__).with_name("wrong_clock")), environment.get("PYTHONPATH", "")])
    clock = tmp_path / "clock"
    lab = Lab(tmp_path, {**environment, "PYTHONPATH": path.rstrip(os.pathsep), "WRONG_CLOCK": str(clock)})
    try:
        learner, actor = lab.learner("--config.transport.journal_days=0.5"), lab.actor()
        lab.trains(learner)
        for offset in (3 * DAY, -30 * DAY, 0.0):  # a learner sees its journal age at once, then come from the future
            clock.write_text(str(offset))
            lab.goes_on(LENGTH, actor)
            lab.trains(learner)
            actor.kill()
            actor = lab.actor()
            lab.goes_on(LENGTH, actor)
            learner.kill()
            lab.goes_on(LENGTH, actor)
            learner = lab.learner("--config.transport.journal_days=0.5")
            learner.says("online steps put back")
            lab.trains(learner)
        _, said, account = lab.stop(learner, actor)
    finally:
        lab.close()
    assert account.died <= 3
    assert max(account.cut.values(), default=0) <= TAIL
    assert "late" in said
