"""Devices that train: what is cut, what is refused, one device as without them, and eight simulated ones against it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from agent_tools import drawn, made, make_batches, named
from eight_devices import CASES, UPDATES, config
from errors import naming
from ports import free_port
from processes import SIMULATED

from serl_chunk.agents.compilation import compiled
from serl_chunk.config.agents.pi0 import PI0_PRESETS
from serl_chunk.config.presets import configured
from serl_chunk.learner import processes
from serl_chunk.learner.devices import Devices, Shards, rows_of_device
from serl_chunk.learner.processes import Follower, Leader, Processes, outline, outlined
from serl_chunk.models.pi0.tree import leaves
from serl_chunk.models.sums import Loss
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.types import ConfigError

SUPPORT = Path(__file__).resolve().parents[1] / "support"
EIGHT = Shards(8)


@pytest.mark.parametrize(
    ("shape", "dtype", "parts", "axis"),
    [
        ((18, 2048, 1024), "float32", 8, 1),
        ((18, 1024, 1024), "float32", 8, 2),  # of two as large, the last
        ((18, 1027, 1024), "float32", 8, 2),  # the largest that 8 divides
        ((27, 1027, 1025), "float32", 8, None),
        ((1024, 1024), "float32", 8, 1),  # 4 MiB
        ((1024, 1024), "bfloat16", 8, None),
        ((1 << 24,), "float32", 8, None),
        ((18, 2048, 1024), "float32", 1, None),
    ],
)
def test_large_arrays_are_cut_on_their_largest_axis(shape, dtype, parts, axis):
    assert Shards(parts).axis(shape, dtype) == axis


def test_nearly_all_of_pi0_is_cut_over_eight_devices():
    sizes = {True: 0, False: 0}
    cut = 0
    for leaf in leaves(PI0_PRESETS["pi0"]).values():
        sharded = EIGHT.axis(leaf.shape, leaf.dtype) is not None
        sizes[sharded] += math.prod(leaf.shape)
        cut += sharded
    assert cut == 20
    assert sizes[True] / sum(sizes.values()) == pytest.approx(0.9995, abs=5e-5)


GROUPS = [("learner.accumulate", "1"), ("learner.pretrain_steps", "0"), ("group.minibatch", "12")]
OF_GROUPS = configured(config(1), GROUPS, preset="ript")
ON_HOST = [*GROUPS, ("group.reference_on", "host"), ("group.eval_every", "0")]


TWO = Processes("a:7000", 0, 2)


@pytest.mark.parametrize(
    ("refuse", "names"),
    [
        (lambda: Processes.parse("a:7000", None), ("process", "missing", "--coordinator HOST:PORT", "I/N")),
        (lambda: Processes.parse(None, "0/2"), ("coordinator", "missing", "HOST:PORT")),
        (lambda: Processes.parse("a", "0/2"), ("coordinator", "HOST:PORT", "'a'")),
        (lambda: Processes.parse("a:7000", "2/2"), ("process", "I/N", "0 to N - 1", "'2/2'")),
        (lambda: Processes.parse("a:7000", "0/1"), ("process", "N >= 2", "'0/1'")),
        (
            lambda: TWO.check(configured(config(1), [("learner.eval_interval", "5")])),
            ("eval_interval", "Set 0", "--actor"),
        ),
        (lambda: TWO.check(configured(OF_GROUPS, [("group.eval_every", "5")])), ("group.eval_every", "Set 0", "actor")),
        (lambda: TWO.check(configured(config(1), ON_HOST, preset="flow-ipo")), ("reference_on", "Set device")),
        (lambda: rows_of_device(config(1, 20), 8), ("learner.batch_size", "20", "8 devices", "16 or 24")),
        (lambda: rows_of_device(config(1, 24, 4), 8), ("learner.batch_size", "24", "accumulate=4", "32")),
        (lambda: rows_of_device(config(1, 20), 3), ("learner.batch_size", "3 devices", "18 or 24")),  # even ones
        (lambda: rows_of_device(OF_GROUPS, 8), ("group.minibatch", "12", "8 or 16")),
        (lambda: Shards.of(config(3), 8), ("learner.fsdp_devices", "3", "1 or 2 or 4 or 8")),
        (lambda: Devices(config(2)), ("learner.fsdp_devices", "1", "got 2", "Set 1")),
    ],
)
def test_what_devices_cannot_share_is_refused_with_what_they_can(refuse, names):
    with pytest.raises(ConfigError, match=naming(*names)):
        refuse()


@pytest.mark.parametrize("name", ["acfql", "decoupled-lengths"])
def test_a_tree_is_made_anew_in_another_process(name):
    agent = made(name)
    trees = drawn(agent), named(agent, make_batches(agent.spec)), (None, [np.zeros(2)], Loss((), {}))
    leaves, structure = jax.tree.flatten(trees)
    told = json.loads(json.dumps(outline(jax.tree.unflatten(structure, range(len(leaves))))))
    assert jax.tree.structure(outlined(told)) == structure


@pytest.mark.parametrize("name", ["os:system", "builtins:tuple", "serl_chunk.types:Absent", "no.such:Loss", ""])
def test_what_is_no_node_of_a_tree_is_not_made(name):
    with pytest.raises(TypeError, match="same version"):
        outlined([name, [], [0]])


def test_one_device_runs_the_program_that_it_runs_without_devices():
    agent, devices = made("acfql"), Devices(config(1))
    before = agent.update
    devices.adopt(agent)
    assert agent.update is before
    state, batches = drawn(agent), make_batches(agent.spec)
    assert devices.place(state) is state
    placed = devices.put({"critic": batches})
    assert {leaf.sharding for leaf in jax.tree.leaves(placed)} == {jax.device_put(0).sharding}
    program = compiled(agent._update, updates=True).lower(state, {}, named(agent, batches)).as_text()
    assert before.lower(state, {}, placed).as_text() == program


class LateFailure:
    """A result whose computation fails after its program was started, as on a GPU that runs out of memory."""

    is_deleted = staticmethod(lambda: False)

    def block_until_ready(self):
        raise RuntimeError("RESOURCE_EXHAUSTED")


def test_a_late_failure_of_a_device_is_reported_while_process_0_waits(monkeypatch, caplog):
    shared, ended = queue.Queue[Any](), threading.Event()
    monkeypatch.setattr(processes, "_shared", lambda values: shared.put(values) if values else shared.get(timeout=60))
    monkeypatch.setattr(processes, "SILENCE", 2.0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # a CPU's programs are waited for
    threads = ThreadPoolExecutor(1)
    leading = threads.submit(Leader, TWO, config(1), lambda status: ended.set())
    follower = Follower(Processes("127.0.0.1:7000", 1, 2), config(1), lambda status: None)
    with contextlib.closing(leading.result()) as leader:
        follower.program(lambda x: LateFailure(), "update")
        following = threads.submit(follower.follow, lambda: None)
        leader.program(lambda x: x, "update")(np.zeros(2))
        assert ended.wait(20)
    assert "learner process 1/2: RuntimeError('RESOURCE_EXHAUSTED')" in caplog.text
    with pytest.raises(RuntimeError, match="EXHAUSTED"):
        following.result(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where eight devices leave their checkpoints."""
    return tmp_path_factory.mktemp("eight")


def started(folder: Path, devices: int, *arguments: str) -> subprocess.Popen[str]:
    """`eight_devices.py` in a process with so many devices."""
    environment = {**os.environ, "JAX_NUMPY_DTYPE_PROMOTION": "standard", "JAX_NUMPY_RANK_PROMOTION": "allow"}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {SIMULATED.format(devices)}"
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(SUPPORT / "eight_devices.py"), str(folder), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    return output


@pytest.fixture(scope="module")
def differences(folder):
    """What `eight_devices.py` prints."""
    return json.loads(printed(started(folder, 8)).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_eight_devices_train_as_one_does(case, differences, folder):
    """Losses by their size, gradients and parameters leaf by leaf by the leaf's norm, in float32."""
    check(differences[case], folder / case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_of_four_devices_train_as_one_device_does(case, tmp_path):
    where = f"127.0.0.1:{free_port()}"
    first, second = (started(tmp_path, 4, case, where, f"{i}/2") for i in range(2))
    found = json.loads(printed(first).splitlines()[-1])
    printed(second)
    check(found[case], tmp_path / case)


def check(found: dict[str, Any], checkpoints: Path) -> None:
    assert max(found["losses"]) < 1e-5
    assert max(found["gradients"]) < 1e-5
    assert max(found["parameters"]) < 2e-5  # five steps add up rounding: 4e-7 in a bias whose norm is 0.04
    assert found["large"] > 0
    assert (found["whole"], found["part"]) == (0, 1.0)  # each large leaf is cut, into equal parts
    assert found["left out"] == []  # no leaf's gradient is nothing but rounding
    assert found["saved"]
    CheckpointStore(checkpoints).restore_policy(UPDATES)  # here, on one device; raises where a checksum differs
