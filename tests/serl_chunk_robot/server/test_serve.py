"""What `serve` does around the control loop."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from serl_chunk_robot.server import serve

ALONE = """
import os, threading
from serl_chunk_robot.server.serve import PRIORITY, prioritise

def policy():
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK

assert prioritise()
assert policy() == os.SCHED_FIFO
assert os.sched_getparam(0).sched_priority == PRIORITY
found = []
other = threading.Thread(target=lambda: found.append(policy()))
other.start()
other.join()
assert found == [os.SCHED_OTHER], found
child = os.fork()
if not child:
    os._exit(policy() != os.SCHED_OTHER)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such priority")
def test_the_loop_alone_runs_before_other_programs():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=False)
    if "rtprio" in done.stderr:
        pytest.skip("this user may not have real-time priority")
    assert done.returncode == 0, done.stderr


def test_without_the_right_to_it_the_remedy_is_logged(monkeypatch, caplog):
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refused, raising=False)
    assert not serve.prioritise()
    assert "rtprio 20" in caplog.text
    assert "Operation not permitted" in caplog.text
