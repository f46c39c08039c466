"""Our own layout: exact round trips, atomic writes, files that are not whole, and the sink of a folder."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from errors import naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.data.formats import hdf5, hdf5_writer
from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.types import Begin, ConfigError, DataError, End, Episode, Outcome, Source, SparseRows, Step


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_round_trip_keeps_every_byte(tmp_path, spec, joints_spec, drawn_episode, assert_same, data):
    robot = data.draw(st.sampled_from([spec, joints_spec]), label="robot")
    episode = drawn_episode(data, robot)
    outcome, terminated = data.draw(st.sampled_from(Outcome)), data.draw(st.booleans())
    episode = episode._replace(
        end=episode.end._replace(outcome=outcome, terminated=terminated, truncated=not terminated)
    )
    path = tmp_path / "episode_0.hdf5"
    write_episode(path, episode, robot, compress=data.draw(st.booleans()))
    assert_same(read_episode(path, robot), episode)
    assert_same(read_episode(path), episode)


def test_layout_is_alohas(tmp_path, spec, joints_spec, make_episode):
    path = tmp_path / "a.hdf5"
    episode = make_episode(spec, 6, image_ticks={"top": list(range(6)), "wrist": [1, 4]}, decision_ticks=(0, 5))
    write_episode(path, episode, spec, sim=True)
    with h5py.File(path) as file:
        # joint_of_action is (2, 0, 1): qpos is in the order of the actions
        np.testing.assert_array_equal(file["observations/qpos"], episode.steps.observation["state"][:, [2, 0, 1]])
        np.testing.assert_array_equal(file["action"], episode.steps.action)
        top = file["observations/images/top"]
        assert (file["observations/qpos"].dtype, top.shape, top.chunks) == (np.float32, (6, 4, 6, 3), (1, 4, 6, 3))
        np.testing.assert_array_equal(file["rl/image_index/wrist"], [1, 4])
        assert file["rl/decision/chunk"].shape == (2, 4, 3)
        assert "qvel" not in file["observations"]
        assert not [name for name in file["rl"] if name.startswith("human") or name == "lost_ticks"]
        about = {name: file.attrs[name] for name in ("sim", "compress", "color", "hz")}
        assert about == {"sim": True, "compress": False, "color": "rgb", "hz": 50.0}
        assert list(file.attrs["cameras"]) == ["top", "wrist"]
    write_episode(path, make_episode(spec, 5, decision_ticks=(0,), shared=(1, 4), lost={2: 151}), spec)
    with h5py.File(path) as file:
        assert sorted(file["rl/decision"]) == ["chunk", "value"]
        assert file["rl/human_dims"][()].tolist() == [[0, 1, 0], [1, 0, 1]]
        assert (file["rl/human_dims"].dtype, file["rl/human_dims_index"].dtype) == (np.uint8, np.int32)
        assert file["rl/lost_ticks"][()].tolist() == [0, 0, 151, 0, 0]
    write_episode(path, plain := make_episode(joints_spec, 10), joints_spec)
    with h5py.File(path) as file:
        assert ("state" in file["rl"], "sim" in file.attrs) == (False, False)
    plain.steps.sparse["images/top"].values[:] = 7
    write_episode(tmp_path / "small.hdf5", plain, joints_spec, compress=True)
    assert (tmp_path / "small.hdf5").stat().st_size < path.stat().st_size - 5000


def test_only_the_chosen_cameras_are_read(tmp_path, spec, make_episode):
    path = tmp_path / "a.hdf5"
    write_episode(path, make_episode(spec, 4), spec)
    wrist = read_episode(path, spec, cameras=("wrist",))
    assert sorted(wrist.steps.sparse) == ["images/wrist"]
    assert sorted(wrist.end.final_observation) == ["images/wrist", "state"]
    assert not read_episode(path, spec, cameras=()).steps.sparse
    fewer = dataclasses.replace(spec, cameras=spec.cameras[:1])
    with pytest.raises(DataError, match=naming("arm3", "wrist", "top")):
        read_episode(path, fewer)
    assert sorted(read_episode(path, fewer, cameras=("top",)).steps.sparse) == ["images/top"]


@pytest.mark.parametrize("links", [True, False])
def test_replaces_atomically_or_refuses(tmp_path, spec, make_episode, assert_same, monkeypatch, links):
    def no_links(source, target):
        raise PermissionError("this file system has no hard links")

    calls, path = [], tmp_path / "a.hdf5"
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    for name in ("fsync", "link", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    first, second = make_episode(spec, 4), make_episode(spec, 5, seed=1)
    write_episode(path, first, spec, replace=False)
    with pytest.raises(FileExistsError):
        write_episode(path, second, spec, replace=False)
    assert_same(read_episode(path), first)
    calls.clear()
    write_episode(path, second, spec)
    assert calls == ["fsync", "replace", "fsync"]  # the content is on disk before the name
    assert_same(read_episode(path), second)
    assert os.listdir(tmp_path) == ["a.hdf5"]


@pytest.mark.parametrize(
    ("stage", "error", "expected"),
    [("_write_frames", KeyboardInterrupt(), KeyboardInterrupt), ("_publish", OSError("disk full"), DataError)],
)
def test_a_failure_at_any_stage_leaves_nothing(tmp_path, spec, make_episode, monkeypatch, stage, error, expected):
    def fail(*_args):
        raise error

    monkeypatch.setattr(hdf5, stage, fail)
    with pytest.raises(expected, match=naming("a.hdf5", "disk full") if expected is DataError else None):
        write_episode(tmp_path / "a.hdf5", make_episode(spec, 4), spec)
    assert os.listdir(tmp_path) == []


def test_a_killed_process_leaves_no_episode(tmp_path, spec, make_episode, assert_same):
    """SIGKILL right before the rename: the earlier file is whole, and nothing looks like another episode."""
    path, first = tmp_path / "a.hdf5", make_episode(spec, 4)
    write_episode(path, first, spec)
    code = (
        "import os, sys\n"
        "from serl_chunk.data.formats import hdf5\n"
        "hdf5._publish = lambda *a: os.kill(os.getpid(), 9)\n"
        "hdf5.write_episode(sys.argv[1], hdf5.read_episode(sys.argv[1]), None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert_same(read_episode(path), first)
    assert [p.name for p in tmp_path.glob("*.hdf5")] == ["a.hdf5"]


def test_a_damaged_byte_is_a_data_error_or_other_data(tmp_path, spec, make_episode):
    """Whatever byte of the structure is hit, the caller sees an episode of the same robot or a DataError."""
    path = tmp_path / "a.hdf5"
    write_episode(path, make_episode(spec, 3), spec)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.choice(len(whole), 150, replace=False):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            assert read_episode(path, spec).steps.action.shape[1] == 3
        except DataError:
            refused += 1
    assert refused > 10


def test_missing_files_are_named_and_inconsistent_episodes_not_written(tmp_path, spec, joints_spec, make_episode):
    with pytest.raises(DataError, match=naming("gone.hdf5")):
        read_episode(tmp_path / "gone.hdf5")
    path, episode = tmp_path / "a.hdf5", make_episode(spec, 4)

    def ended(**changes) -> Episode:
        return episode._replace(end=episode.end._replace(**changes))

    odd_column, nothing_of_it, odd_observation = (make_episode(spec, 4, shared=(0,)) for _ in range(3))
    odd_column.steps.sparse["depth/top"] = SparseRows(np.array([0], np.int32), np.zeros((1, 2), np.float32))
    nothing_of_it.steps.sparse["human_dims"].values[:] = 0
    odd_observation.steps.observation["force"] = np.zeros((4, 1), np.float32)
    forced = {**episode.end.final_observation, "force": np.zeros(1, np.float32)}
    for named, case in (
        (("e0", "other"), ended(episode_id="other")),
        ((9, "/action", 4), ended(length=9)),
        ((0, 3, 1), episode._replace(steps=episode.steps.slice(1, 4))),
        (("depth/top", "images/<camera>", "decision/<name>", "human_dims"), odd_column),
        (("human_dims", "tick 0", "[0, 0, 0]"), nothing_of_it),
        (("state", "images/<camera>", "['force', 'state']"), odd_observation),
        (("state", "[]"), ended(final_observation={})),
        (("state", "images/<camera>", "force"), ended(final_observation=forced)),
        (("arm3", 3, "/action", 2), make_episode(joints_spec, 4)),
        (("a.hdf5", repr("nul\0")), episode._replace(begin=episode.begin._replace(task="nul\0"))),
    ):
        with pytest.raises(DataError, match=naming(*named)):
            write_episode(path, case, spec)
    with pytest.raises(DataError, match=naming("absent/a.hdf5", os.strerror(errno.ENOENT))):
        write_episode(tmp_path / "absent" / "a.hdf5", episode, spec)
    assert os.listdir(tmp_path) == []


def _feed(writer: EpisodeWriter, records: tuple[Begin, list[Step], End], outcome: Outcome = Outcome.UNKNOWN) -> None:
    """Hand them over one by one, as a control loop does."""
    begin, steps, end = records
    writer.begin(begin)
    for step in steps:
        writer.step(step)
    writer.end(end._replace(outcome=outcome))


def test_records_become_files_and_nothing_is_overwritten(tmp_path, spec, make_records, make_episode, assert_same):
    (tmp_path / "episode_7.hdf5").write_text("mine")
    options = [{"n": 3 + k, "seed": k, "decision_ticks": (0, 2), "shared": (1,)} for k in range(3)]
    with EpisodeWriter(tmp_path, spec) as first, EpisodeWriter(tmp_path, spec) as second:
        for writer, each in zip((first, second, first), options, strict=True):
            _feed(writer, make_records(spec, **each))
            writer.flush()
    assert [[p.name for p in w.written] for w in (first, second)] == [
        ["episode_8.hdf5", "episode_10.hdf5"],
        ["episode_9.hdf5"],
    ]
    for k, each in enumerate(options):
        assert_same(read_episode(tmp_path / f"episode_{8 + k}.hdf5", spec), make_episode(spec, **each))
    assert (tmp_path / "episode_7.hdf5").read_text() == "mine"


def test_keep_chooses_and_a_failed_write_reaches_the_caller_once(tmp_path, spec, joints_spec, make_records):
    folder = tmp_path / "new" / "demos"
    writer = EpisodeWriter(folder, spec, keep=lambda e: e.end.outcome is Outcome.SUCCESS)
    _feed(writer, make_records(joints_spec, 3, seed=8), Outcome.SUCCESS)
    with pytest.raises(DataError, match=naming("episode_0.hdf5", "arm3", 3, "/action", 2)):
        writer.flush()
    for k, outcome in enumerate((Outcome.FAILURE, Outcome.SUCCESS, Outcome.UNKNOWN)):
        _feed(writer, make_records(spec, 3, seed=k), outcome)
    writer.close()
    writer.close()
    assert [read_episode(p).begin.episode_id for p in writer.written] == ["e1"]
    assert writer.written == list(folder.iterdir())


def test_an_episode_that_had_no_room_is_written_later_under_the_next_number(tmp_path, spec, make_records, monkeypatch):
    def full(*args, **options):
        raise DataError("the disk is full")

    with EpisodeWriter(tmp_path, spec) as writer:
        with monkeypatch.context() as disk:
            disk.setattr(hdf5_writer, "write_episode", full)
            _feed(writer, make_records(spec, 3, seed=8))
            for _ in range(2):
                with pytest.raises(DataError, match="full"):
                    writer.flush()
                writer.again()
            with pytest.raises(DataError, match="full"):
                writer.flush()
        writer.flush()
        assert os.listdir(tmp_path) == []
        writer.again()
        _feed(writer, make_records(spec, 3, seed=9))
        writer.flush()
    assert [read_episode(p).begin.episode_id for p in writer.written] == ["e8", "e9"]
    assert sorted(os.listdir(tmp_path)) == ["episode_0.hdf5", "episode_1.hdf5"]


def test_records_out_of_order_and_a_folder_that_cannot_be_made_are_refused(tmp_path, spec, make_records):
    step = Step(0, {"state": np.zeros(5, np.float32)}, np.zeros(3, np.float32), 0.0, Source.HUMAN, -1, -1, 0.0)
    end = End("a", 1, None, False, True, Outcome.UNKNOWN)
    with EpisodeWriter(tmp_path, spec) as writer:
        with pytest.raises(DataError, match=naming("step", 0)):
            writer.step(step)
        with pytest.raises(DataError, match=naming("a", "(none)")):
            writer.end(end)
        writer.begin(Begin("a"))
        with pytest.raises(DataError, match=naming("b", "a")):
            writer.begin(Begin("b"))
        writer.end(end._replace(length=0))  # no steps: nothing to keep
        writer.begin(Begin("a"))
        writer.step(step)
        writer.step(step._replace(tick=2))
        writer.end(end)
        with pytest.raises(DataError, match=naming("a", "ticks")):
            writer.flush()
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=naming("file", "is a file", "expected a folder")):
        EpisodeWriter(tmp_path / "file" / "demos", spec)
