"""`record --ip`: what is sent of a folder, when, and what happens without a learner or with another one."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from errors import naming
from hypothesis import given, settings
from ports import free_port
from properties import examples
from streamed_demos import LENGTH, SPEC, demo_rows, episode, make_router
from transport_tools import CONFIG, CONTRACT, LIMITS, eventually, serving, shared, step

from serl_chunk.data.formats.hdf5 import write_episode
from serl_chunk.recording.stream import DemonstrationStream, steps_of
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire.handshake import RefusedError
from serl_chunk.types import ConfigError, Outcome, StepBlock


class Receiver:
    def __init__(self) -> None:
        self.replay, self.router = make_router()
        self.began: list[str] = []
        self.infos: set = set()
        self.fail_after = 10**9

    def on_record(self, info, record) -> None:
        self.infos.add((info.actor_id, info.demonstrations))
        if hasattr(record, "init_state"):
            self.began.append(record.episode_id)
        self.router.insert(f"{info.actor_id}/{info.session}", record, demonstrations=info.demonstrations)

    def serving(self, port: int, **changes):
        return serving(
            port,
            on_record=self.on_record,
            digests=lambda: self.router.demonstrations.digests,
            allowance=lambda session: 3,
            **changes,
        )


def write(folder: Path, number: int, outcome: Outcome = Outcome.SUCCESS) -> Path:
    begin, steps, end = episode(number, f"demo-{number}")
    path = folder / f"episode_{number}.hdf5"
    folder.mkdir(exist_ok=True)
    steps = dataclasses.replace(steps, reward=steps.reward * (outcome is Outcome.SUCCESS))
    write_episode(path, (begin, steps, end._replace(outcome=outcome)), SPEC)
    return path


@contextlib.contextmanager
def stream(port: int, spool: Path, *, contract=CONTRACT):
    link = LearnerLink(
        CONFIG, host="127.0.0.1", port=port, actor_id="robot-demonstrations", contract=contract,
        spools=lambda run: Spool(spool / run, LIMITS), demonstrations=True,
    )  # fmt: skip
    stream = DemonstrationStream(link, (), SPEC, f"127.0.0.1:{port}")
    try:
        yield stream
    finally:
        stream.close(wait=False)


def test_the_successes_of_a_folder_and_new_ones_are_sent_once(tmp_path):
    port, receiver, folder = free_port(), Receiver(), tmp_path / "d"
    write(folder, 0)
    write(folder, 1, Outcome.FAILURE)
    with receiver.serving(port) as server:
        with stream(port, tmp_path / "spool") as s:
            s.start(folder)
            eventually(lambda: demo_rows(receiver.replay)[0] == 1)
            assert server.sessions()[0].connection.allowance_told is None  # it takes no step from an actor
            s.add(write(folder, 2))
            assert s.close()
        assert demo_rows(receiver.replay) == (2, 2 * (LENGTH + 1), 0)
        with stream(port, tmp_path / "spool") as s:  # the same command again
            s.start(folder)
            assert s.close()
        with stream(port, tmp_path / "other spool") as s:  # another folder, whose names begin at 0 again
            other = write(tmp_path / "other", 3)
            other.rename(other.with_name("episode_0.hdf5"))
            s.start(tmp_path / "other")
            assert s.close()
    assert [name.rpartition("-")[0] for name in receiver.began] == ["demo-0", "demo-2", "demo-3"]
    assert demo_rows(receiver.replay) == (3, 3 * (LENGTH + 1), 0)
    assert receiver.infos == {("robot-demonstrations", True)}
    assert receiver.router.env_steps == 0


def test_without_a_learner_files_wait_for_one(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "serl_chunk")
    monkeypatch.setattr("serl_chunk.recording.stream.CONNECT_S", 0.2)
    port, receiver, folder = free_port(), Receiver(), tmp_path / "d"
    write(folder, 0)
    with stream(port, tmp_path / "spool") as s:
        s.start(folder)
        s.add(write(folder, 1))
        assert not s.close()
    assert "no learner answers" in caplog.text
    with stream(port, tmp_path / "spool") as s:
        s.start(folder)
        with receiver.serving(port):
            eventually(lambda: demo_rows(receiver.replay)[0] == 2)
            assert s.close()
    assert "the learner has all 2" in caplog.text


def test_a_learner_that_lost_them_gets_them_again(tmp_path):
    """Another run answers at the address, or a learner without a journal was restarted."""
    port, folder = free_port(), tmp_path / "d"
    for number in range(3):
        write(folder, number)
    with stream(port, tmp_path / "spool") as s:
        first, second, third = Receiver(), Receiver(), Receiver()
        with first.serving(port):
            s.start(folder)
            eventually(lambda: demo_rows(first.replay)[0] == 3)
        with second.serving(port):
            eventually(lambda: demo_rows(second.replay)[0] == 3)
        with third.serving(port, run_id="another"):
            eventually(lambda: demo_rows(third.replay)[0] == 3)
            assert s.close()


def test_what_a_learner_refuses_ends_the_stream_and_not_the_recording(tmp_path, caplog):
    port, receiver, folder = free_port(), Receiver(), tmp_path / "d"
    receiver.replay, receiver.router = make_router(demo_capacity=21)
    for number in range(3):
        write(folder, number)
    with receiver.serving(port), stream(port, tmp_path / "spool") as s:
        s.start(folder)
        assert not s.close()
        s.add(write(folder, 3))
    assert demo_rows(receiver.replay)[0] == 2
    assert "replay.demo_capacity" in caplog.text
    assert "the learner lacks 1" in caplog.text


def test_another_experiment_and_an_older_learner_are_refused_before_anything_moves(tmp_path):
    port = free_port()
    other, named = CONTRACT | {"horizon": "9"}, naming("chunk.horizon")
    started = stream(port, tmp_path / "spool", contract=other)
    with Receiver().serving(port), started as s, pytest.raises(RefusedError, match=named):
        s.start(tmp_path)
    port = free_port()
    named = naming("takes no demonstrations", "--ip")
    with serving(port), stream(port, tmp_path / "spool") as s, pytest.raises(ConfigError, match=named):
        s.start(tmp_path)


@given(st.integers(1, 20), st.sets(st.integers(0, 19)))
@settings(max_examples=examples(15), deadline=None)
def test_steps_of_a_block_make_the_same_block(n, by_human):
    block = StepBlock.from_steps("e", [shared(step(t, t)) if t in by_human else step(t, t) for t in range(n)])
    again = StepBlock.from_steps("e", list(steps_of(block)))
    for name, value in vars(block).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(again, name), value)
    np.testing.assert_array_equal(again.observation["state"], block.observation["state"])
    assert again.sparse.keys() == block.sparse.keys()
    for key, rows in block.sparse.items():
        np.testing.assert_array_equal(again.sparse[key].index, rows.index)
        np.testing.assert_array_equal(again.sparse[key].values, rows.values)
        assert again.sparse[key].values.dtype == rows.values.dtype
