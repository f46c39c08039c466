"""LeRobot data sets: what is written is read back, and the same when the conversion was killed at any moment."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from data_sets import image_file, notes_of, read_all
from errors import naming

pytest.importorskip("pyarrow")
pytest.importorskip("av")


import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lerobot_sets import (
    DATA,
    EPISODES,
    HEIGHT,
    HZ,
    INFO,
    SIDE,
    TOP,
    VIDEO,
    WIDTH,
    amend,
    at,
    column,
    contents,
    drop,
    episode_of,
    feature,
    info,
    plain,
    several,
    smooth,
    write,
)
from properties import examples

from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats import choose
from serl_chunk.data.frames import Frames, decode_image
from serl_chunk.data.lerobot.shards import STAGING
from serl_chunk.data.lerobot.writer import LeRobotSink
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import Json, ReadOptions, decode_images
from serl_chunk.main import main
from serl_chunk.types import CameraSpec, DataError, Episode, Outcome, RobotSpec, Source, SparseRows

Same = Callable[[Episode, Episode], None]


class HeldFrames(Frames):
    """Frames that are in memory as image files."""

    def __init__(self, files: list[bytes]) -> None:
        super().__init__((HEIGHT, WIDTH, 3), np.arange(len(files)))
        self._files = files

    def decode(self, at: int) -> np.ndarray:
        return decode_image(self._files[at], f"frame {at}", self.shape[1:])

    def encoded_at(self, at: int) -> bytes | None:
        return self._files[at]


def read(folder: Path, **options) -> list[Episode]:
    source = pickle.loads(pickle.dumps(open_episodes(folder, ReadOptions(**options))))  # as worker processes get it
    return [decode_images(source.read(key)) for key in source.keys()]


def without_images(episode: Episode) -> Episode:
    begin, steps, end = episode
    index = {k: SparseRows(rows.index, np.zeros(0)) for k, rows in steps.sparse.items()}
    final = None if end.final_observation is None else {"state": end.final_observation["state"]}
    return Episode(begin, dataclasses.replace(steps, sparse=index), end._replace(final_observation=final))


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Of the worst frame, in dB."""
    error = np.square(a.astype(np.float64) - b).mean((1, 2, 3))
    return float(10 * np.log10(255**2 / max(error.max(), 1e-9)))


@pytest.mark.parametrize(("version", "how", "least"), [
    ("v3.0", {}, None), ("v3.0", {"image_codec": "jpeg"}, 35), ("v3.0", {"mode": "video"}, 32),
    ("v2.1", {"mode": "video"}, 32),
])  # fmt: skip
def test_png_comes_back_exactly_lossy_frames_are_close(
    tmp_path: Path, assert_same: Same, version: str, how: dict, least: float | None
):
    episodes = several()
    folder = write(LeRobotSink(tmp_path / "d", version, **how), episodes)
    assert choose(folder, None).name == "lerobot"
    for wanted, found in zip(episodes, read(folder), strict=True):
        if least is None:
            assert_same(wanted, found)
            continue
        assert_same(without_images(wanted), without_images(found))
        for key, rows in wanted.steps.sparse.items():
            assert psnr(rows.values, found.steps.sparse[key].values) > least
        for key, value in (wanted.end.final_observation or {}).items():
            assert (found.end.final_observation[key] == value).all()  # PNG in any mode
    assert {p.name for p in folder.iterdir()} == {"data", "meta"} | ({"videos"} if "mode" in how else set())
    if version == "v2.1":  # a file an episode
        files = [
            *(folder / "data/chunk-000").iterdir(),
            *(folder / "videos/chunk-000/observation.images.top").iterdir(),
        ]
        assert sorted(p.stem for p in files) == sorted([f"episode_{i:06d}" for i in range(5)] * 2)
        lines = [json.loads(line) for line in (folder / "meta/episodes_stats.jsonl").read_text().splitlines()]
        np.testing.assert_allclose(lines[2]["stats"]["action"]["mean"], episodes[2].steps.action.mean(0), rtol=1e-5)


@given(data=st.data())
@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_episode_comes_back(data, tmp_path_factory, spec: RobotSpec, drawn_episode, assert_same: Same):
    episodes = [drawn_episode(data, spec, least=1) for _ in range(data.draw(st.integers(1, 4)))]
    sink = LeRobotSink(tmp_path_factory.mktemp("d"), tolerance_s=None, data_file_mb=0.01)
    for wanted, found in zip(episodes, read(write(sink, episodes, hz=spec.control_hz), spec=spec), strict=True):
        assert_same(wanted, found)


def test_stored_images_are_copied_byte_for_byte_and_one_state_value_without_camera_is_an_episode(
    tmp_path: Path, assert_same: Same
):
    begin, steps, end = episode_of(0, 6, final_observation=None)
    bare = Episode(begin, dataclasses.replace(steps, observation={"state": steps.action[:, :1]}, sparse={}), end)
    assert_same(bare, read(write(LeRobotSink(tmp_path / "bare"), [bare]))[0])
    files = [image_file(smooth(0, t), "PNG" if t == 5 else "JPEG") for t in range(6)]
    steps.sparse["images/top"] = SparseRows(np.arange(6, dtype=np.int32), HeldFrames(files))
    source = open_episodes(write(LeRobotSink(tmp_path / "files"), [Episode(begin, steps, end)]), ReadOptions())
    frames = source.read("episode_000000").steps.sparse["images/top"].values
    assert [frames.encoded(i) for i in range(6)] == files


def test_columns_say_what_lerobot_says(tmp_path: Path):
    first, second, third, *_ = several()
    first = first._replace(begin=first.begin._replace(robot="aloha"))
    folder = write(LeRobotSink(tmp_path), [first, second, third])
    file = folder / "data/chunk-000/file-000.parquet"
    rows, n = pq.read_table(file).to_pydict(), [e.steps.n for e in (first, second, third)]
    ticks = [(e, t) for e, length in enumerate(n) for t in range(length)]
    last = np.cumsum(n) - 1
    assert rows["index"] == list(range(sum(n)))
    assert list(zip(rows["episode_index"], rows["frame_index"], strict=True)) == ticks
    assert rows["task_index"] == [[0, 1, 0][e] for e, _ in ticks]
    np.testing.assert_allclose(rows["timestamp"], [t / HZ for _, t in ticks], atol=1e-6)
    assert np.flatnonzero(rows["next.done"]).tolist() == last.tolist()
    assert np.flatnonzero(rows["next.success"]).tolist() == last[:2].tolist()
    assert [rows["next.reward"][i] for i in last[:2]] == [1.0, 1.0]  # as corrected by the end
    assert rows["complementary_info.is_intervention"][: n[0]] == (first.steps.source == 1).tolist()
    # a camera read on ticks 2 and 5 of 7: the newest frame, before the first one that one
    top = [row["bytes"] for row in rows["observation.images.top"][n[0] : n[0] + 7]]
    assert [top.index(data) for data in top] == [0, 0, 0, 0, 0, 5, 5]
    places = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pydict()
    assert (places["dataset_from_index"], places["dataset_to_index"]) == ([0, 9, 16], [9, 16, 28])
    assert places["tasks"] == [["stack"], ["insert"], ["stack"]]
    assert json.loads((folder / "meta/info.json").read_text())["robot_type"] == "aloha"
    assert pq.ParquetFile(file).num_row_groups == 3


def test_statistics_are_exact_of_images_too(tmp_path: Path):
    """Of fewer frames than are sampled: of all of them."""
    episodes = [episode_of(0, 6), episode_of(1, 5), episode_of(2, 7, task="insert")]
    folder = write(LeRobotSink(tmp_path, data_file_mb=0.02), episodes)
    found = json.loads((folder / "meta/stats.json").read_text())
    pixels = np.concatenate([e.steps.sparse["images/top"].values for e in episodes]).reshape(-1, 3) / 255
    for name, values in {
        "observation.state": np.concatenate([e.steps.observation["state"] for e in episodes]).astype(np.float64),
        "action": np.concatenate([e.steps.action for e in episodes]).astype(np.float64),
        "frame_index": np.concatenate([np.arange(e.steps.n) for e in episodes])[:, None],
        "complementary_info.policy_version": np.concatenate([e.steps.policy_version for e in episodes])[:, None],
        "observation.images.top": pixels,
    }.items():
        moments = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
        quantiles = {f"q{p:02d}": np.quantile(values, p / 100, axis=0) for p in (1, 10, 50, 90, 99)}
        for what, value in (moments | quantiles).items():
            got = np.reshape(found[name][what], np.shape(value))
            np.testing.assert_allclose(got, value, rtol=1e-9, atol=1e-9, err_msg=f"{name} {what}")
        assert found[name]["count"] == [18]
    assert np.shape(found["observation.images.top"]["mean"]) == (3, 1, 1)
    assert set(found) == set(json.loads((folder / "meta/info.json").read_text())["features"])


def test_several_videos_of_several_episodes(tmp_path: Path):
    episodes = [episode_of(seed, 6 + seed) for seed in range(6)]
    folder = write(LeRobotSink(tmp_path, mode="video", video_file_mb=0.004), episodes)
    places = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pydict()
    key = "videos/observation.images.top"
    files = len(list(folder.glob(f"{key}/*/*.mp4")))
    assert len(set(places[f"{key}/file_index"])) == files > 1
    assert sum(start > 0 for start in places[f"{key}/from_timestamp"]) == 6 - files > 0
    for wanted, found in zip(episodes, read(folder), strict=True):
        for name, rows in wanted.steps.sparse.items():
            assert psnr(rows.values, found.steps.sparse[name].values) > 32
    source = open_episodes(folder, ReadOptions(cameras=("wrist",)))  # and at random
    lazily = [source.read(key).steps.sparse["images/wrist"].values for key in source.keys()]
    for e, t in 2 * [(2, 7), (0, 0), (4, 7), (2, 3), (2, 4), (2, 4), (1, 6), (0, 5), (3, 0)]:
        assert psnr(lazily[e][t][None], episodes[e].steps.sparse["images/wrist"].values[t][None]) > 32


def test_a_frame_after_a_fork(tmp_path: Path):
    """Loaders fork when the parent has already looked at a video: what swscale's threads left must not be freed."""
    source = open_episodes(write(LeRobotSink(tmp_path, mode="video"), [episode_of(0, 6)]), ReadOptions())
    frames = source.read("episode_000000").steps.sparse["images/top"].values
    wanted = frames[3]

    def in_child(depth: int) -> int:
        """0 where a child `depth` generations on sees the frame."""
        child = os.fork()
        if child == 0:
            code = 2
            try:
                signal.alarm(5 * depth)  # the child's own child is ended first
                same = bool((frames[3] == wanted).all())
                code = 1 - same if depth == 1 or not same else in_child(depth - 1)
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert in_child(2) == 0


def test_episodes_that_a_data_set_cannot_hold_are_refused(tmp_path: Path):
    sink, episode = LeRobotSink(tmp_path, tolerance_s=1e-3), episode_of(7, 6)
    with pytest.raises(DataError, match=naming("LeRobot", "hz")):
        sink.layout(episode, None)
    layout = sink.layout(episode, HZ)
    narrow, blind, late = episode_of(1, 6), episode_of(1, 6), episode_of(7, 6)
    narrow = narrow._replace(steps=dataclasses.replace(narrow.steps, action=narrow.steps.action[:, :2].copy()))
    del blind.steps.sparse["images/top"]
    late.steps.stamp[4:] += 0.0015
    for other, named in (
        (narrow, ("e1", "action_dim", 2, 3)),
        (blind, ("e1", "cameras", "top", "wrist", "cameras")),
        (late, ("e7", 4, 50, "0.080000", 0.001)),
    ):
        with pytest.raises(DataError, match=naming(*named)):
            sink.stage(layout, 1, other)
    assert not list((tmp_path / STAGING).glob("*"))
    late.steps.stamp[:] = 0  # unknown
    sink.stage(layout, 0, late)


CHANGES = ("replace", "fsync", "unlink", "rmdir", "mkdir")  # what a writer asks of the disk


class Killed(BaseException):
    """The process is gone; nothing handles it."""


class Disk:
    """Counts changes; from the `dies_at`-th on none happens, so that what would clean up cannot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_at: int | None) -> None:
        self.changes, self.dies_at = 0, dies_at
        fsync = os.fsync
        for name in CHANGES:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name), fsync))

    def _wrapped(self, real: Callable, fsync: Callable) -> Callable:
        def change(*arguments, **named):
            if self.dies_at is not None and self.changes >= self.dies_at:
                raise Killed
            self.changes += 1
            return None if real is fsync else real(*arguments, **named)  # the power stays on

        return change


def convert(sink: LeRobotSink, episodes: Sequence[Episode], manifest: list[Json], ahead: int = 2) -> None:
    """As the pipeline does: two episodes are staged ahead, each is noted before it is placed."""
    layout = plain(sink.layout(episodes[0], HZ))
    del manifest[sink.placed(layout, manifest) :]
    ready: dict[int, Json] = {}
    for number in range(len(manifest), len(episodes)):
        for next_one in range(number, min(number + ahead, len(episodes))):
            if next_one not in ready:
                ready[next_one] = plain(sink.stage(layout, next_one, episodes[next_one]))
        manifest.append(ready[number])
        sink.place(layout, manifest)
    sink.finish(layout, manifest)


HOW = {
    "images": {"data_file_mb": 0.012},
    "videos": {"mode": "video", "data_file_mb": 0.004, "video_file_mb": 0.003},
    "version 2.1": {"mode": "video", "version": "v2.1"},
}


def killed(folder: Path, how: dict, episodes: list[Episode], *moments: int) -> int:
    """Convert, killed at each of these changes of the disk in turn, then to the end; return how often it was."""
    manifest, times = [], 0
    for moment in (*moments, None):
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, moment)
            try:
                convert(LeRobotSink(folder, **how), episodes, manifest)
            except Killed:
                times += 1
    return times


@pytest.mark.system
@pytest.mark.parametrize(("kind", "every"), [
    ("images", 7), pytest.param("videos", 9, marks=pytest.mark.slow),
    pytest.param("version 2.1", 23, marks=pytest.mark.slow),
    *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in HOW),
])  # fmt: skip
def test_killed_at_any_moment_and_continued(tmp_path: Path, kind: str, every: int):
    episodes = [episode_of(i, 3 + i % 2, task=f"task {i // 2}", every=1 + i % 2) for i in range(4)]
    wanted = contents(write(LeRobotSink(tmp_path / "whole", **HOW[kind]), episodes))
    if kind != "version 2.1":
        assert sum(name.startswith("data/") for name in wanted) == 2, sorted(wanted)
    moment = 0
    while True:
        died = killed(tmp_path / f"killed_{moment}", HOW[kind], episodes, moment)
        assert contents(tmp_path / f"killed_{moment}") == wanted, f"killed at change {moment}"
        if not died:
            break
        moment += every
    assert moment > 80


@pytest.mark.system
@pytest.mark.slow
def test_killed_twice(tmp_path: Path):
    episodes = [episode_of(i, 4) for i in range(4)]
    how = HOW["videos"]
    wanted = contents(write(LeRobotSink(tmp_path / "whole", **how), episodes))
    for first in range(5, 60, 18):
        for second in range(3, 40, 12):
            folder = tmp_path / f"killed_{first}_{second}"
            killed(folder, how, episodes, first, second)
            assert contents(folder) == wanted, (first, second)


@pytest.mark.system
def test_continued_after_the_end_and_what_never_came_leaves_nothing(tmp_path: Path):
    """`finish` was called and its caller killed before it could note that."""
    episodes = [episode_of(i, 4) for i in range(3)]
    manifest: list[Json] = []
    sink = LeRobotSink(tmp_path / "ended")
    convert(sink, episodes, manifest)
    wanted = contents(sink.folder)
    convert(sink, episodes, manifest)
    assert (len(manifest), contents(sink.folder)) == (3, wanted)
    sink = LeRobotSink(tmp_path / "begun")
    layout = sink.layout(episodes[0], HZ)
    sink.stage(layout, 0, episode_of(9, 6))
    assert sink.stage(layout, 0, episodes[0])["length"] == 4  # replaces the first attempt
    assert sink.placed(layout, []) == 0
    assert not [p for p in sink.folder.rglob("*") if p.is_file()]


ROWS = 41  # of episodes of 9, 7, 12, 5 and 8


@pytest.fixture
def ours(lerobot_copy) -> Path:
    return lerobot_copy("ours")


@pytest.fixture
def foreign(lerobot_copy) -> Path:
    return lerobot_copy("foreign")


def same_steps(found: list[Episode], wanted: list[Episode]) -> None:
    for a, b in zip(wanted, map(decode_images, found), strict=True):
        assert a.steps.observation["state"].tobytes() == b.steps.observation["state"].tobytes()
        assert a.steps.action.tobytes() == b.steps.action.tobytes()
        for key, rows in a.steps.sparse.items():
            assert (b.steps.sparse[key].values == rows.values).all()


def test_rewards_outcomes_and_who_acted_of_others(foreign: Path):
    first, _, third, *_ = read_all(foreign)
    wanted = several()[0]
    assert first.end.outcome is Outcome.SUCCESS  # the last reward is 1
    assert (first.end.length, first.end.terminated, first.end.truncated) == (8, True, False)
    assert first.steps.reward.tolist() == [*wanted.steps.reward[:7].tolist(), 1.0]
    assert (set(first.steps.source), set(first.steps.policy_version)) == ({Source.HUMAN}, {-1})
    np.testing.assert_allclose(first.steps.stamp, np.arange(8) / HZ)
    assert first.begin.task == "stack"
    final = first.end.final_observation
    assert (final["state"] == wanted.steps.observation["state"][8]).all()
    assert (final["images/wrist"] == wanted.steps.sparse["images/wrist"].values[8]).all()
    assert third.end[1:6] == (12, None, False, True, Outcome.UNKNOWN)  # no success is no outcome
    with pytest.raises(DataError, match=naming(0, 8, 1, "failure")):
        read_all(foreign, success=False)
    drop(foreign, "next.reward", "next.done")
    for success, outcome in ((True, Outcome.SUCCESS), (False, Outcome.FAILURE)):
        for before, found in zip(several(), read_all(foreign, success=success), strict=True):
            assert found.end.outcome is outcome
            assert (found.end.terminated, found.end.length) == (True, before.end.length - 1)
            assert found.steps.reward.tolist() == [0.0] * (found.steps.n - 1) + [float(success)]
    assert (read_all(foreign, success=True, reward_every_step=True)[0].steps.reward == 1).all()


@pytest.mark.parametrize(("rewarded", "marked", "options", "rewards", "note"), [
    ({7, 12}, {7, 12}, {}, ([0.0] * 7 + [1.0], [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]), ""),
    ({7}, {7, 12}, {}, ([0.0] * 7 + [1.0], [0.0] * 5 + [1.0]),
     "1 successes had no reward of 1 or more: their last step has 1"),
    (set(), None, {"success": True}, ([0.0] * 7 + [1.0], [0.0] * 5 + [1.0]), "5 successes had no"),
    ({7}, {7}, {}, ([0.0] * 7 + [1.0], [0.0] * 7), "4 episodes without a true next.success"),
])  # fmt: skip
def test_successes_and_their_rewards(foreign: Path, rewarded, marked, options, rewards, note):
    """With a reward of 1 on these rows, the others 0, and `next.success` true on those."""
    amend(foreign, DATA, column("next.reward", pa.array([float(i in rewarded) for i in range(ROWS)], pa.float32())))
    if marked is not None:
        amend(foreign, INFO, feature("next.success", dtype="bool", shape=[1], names=None))
        flags = pa.array([i in marked for i in range(ROWS)])
        amend(foreign, DATA, lambda table: table.append_column("next.success", flags))
    found, notes = read_all(foreign, **options), notes_of(foreign, **options)
    assert [e.steps.reward.tolist() for e in found[:2]] == list(rewards)
    assert (note or "had no reward") in notes or not note
    if marked == {7}:  # nowhere true is no outcome
        assert found[1].end[3:6] == (False, True, Outcome.UNKNOWN)
        failed = read_all(foreign, success=False)[1].end
        assert (failed.outcome, failed.length, failed.terminated) == (Outcome.FAILURE, 6, True)
        assert "without a true" not in notes_of(foreign, success=False)
        drop(foreign, "next.reward")
        with pytest.raises(DataError, match=naming(1, "next.success", "failure")):
            read_all(foreign, reward_every_step=True)


def test_what_we_record_counts_also_without_what_lies_beside(ours: Path):
    (ours / SIDE).unlink()
    found, wanted = read_all(ours, success=True), several()[0].steps
    assert [e.end.outcome for e in found[:3]] == [Outcome.SUCCESS, Outcome.SUCCESS, Outcome.UNKNOWN]
    assert found[0].steps.decision_tick.tolist() == wanted.decision_tick[:8].tolist()
    drop(ours, "complementary_info.source")
    assert (read_all(ours)[0].steps.source == wanted.source[:8]).all()  # by interventions


def a_file_each(folder: Path) -> Path:
    table = pq.read_table(folder / DATA)
    for i in range(table.column("episode_index")[-1].as_py() + 1):
        pq.write_table(table.filter(pc.field("episode_index") == i), folder / f"data/chunk-000/file-{i:03d}.parquet")
    return folder


def test_other_columns_several_files_and_optional_pieces_missing(foreign: Path):
    """Variable lists, float64, columns in another order, no description of pandas."""

    def change(table: pa.Table) -> pa.Table:
        for name in ("observation.state", "action"):
            table = column(name, lambda rows: pa.array(rows, pa.list_(pa.float64())))(table)
        return table.select(table.column_names[::-1]).replace_schema_metadata(None)

    wanted = [decode_images(e) for e in read_all(foreign)]
    amend(foreign, DATA, change, compression="none", row_group_size=13)
    same_steps(read_all(foreign), wanted)
    a_file_each(foreign)
    kept = ["episode_index", "length", "data/chunk_index", "data/file_index", "tasks"]
    amend(foreign, EPISODES, lambda table: table.select(kept))
    gone = ("robot_type", "total_tasks", "chunks_size", "splits", "data_path", "video_path", "total_frames", "fps")
    amend(foreign, INFO, info(**dict.fromkeys((*gone, "total_episodes"))))
    (foreign / "meta/stats.json").unlink()
    same_steps(found := read_all(foreign, hz=10.0), wanted)
    assert (open_episodes(foreign, ReadOptions()).hz, found[0].steps.stamp[1]) == (None, 0.1)


def test_other_names_texts_axes_and_images(foreign: Path):
    assert list(read_all(foreign, cameras=("wrist",))[0].steps.sparse) == ["images/wrist"]
    assert read_all(foreign, cameras=())[0].steps.sparse == {}
    assert len(read_all(foreign, proportion=0.6)) == 3
    with pytest.raises(DataError, match=naming("left", "top", "wrist")):
        read_all(foreign, cameras=("left",))
    amend(foreign, DATA, column("task_index", [0] * 3 + [1] * 6 + [1] * 7 + [0] * 25))  # several in an episode
    assert [e.begin.task for e in read_all(foreign)][:3] == ["stack; insert", "insert", "stack"]
    amend(foreign, DATA, lambda t: t.rename_columns([{"next.reward": "reward"}.get(n, n) for n in t.column_names]))
    amend(foreign, INFO, lambda a: json.loads(json.dumps(a).replace('"next.reward"', '"reward"')))
    assert read_all(foreign)[0].steps.reward[-1] == 1
    for shape, names in (
        ([3, HEIGHT, WIDTH], ["channels", "height", "width"]),
        ([3, HEIGHT, WIDTH], {"axes": ["height", "width"]}),
        ([HEIGHT, WIDTH, 3], {"axes": ["height", "width"]}),
    ):
        amend(foreign, INFO, feature(TOP, shape=shape, names=names))
        assert read_all(foreign)[0].steps.sparse["images/top"].values.shape == (8, HEIGHT, WIDTH, 3)
    files = [image_file(smooth(0, t), "PNG", "L" if t % 2 else "P") for t in range(ROWS)]  # grey, and with a palette
    amend(foreign, DATA, column(TOP, [{"bytes": file, "path": None} for file in files]))
    frames = read_all(foreign)[0].steps.sparse["images/top"].values
    assert (frames.encoded(1), frames[1].shape) == (None, (HEIGHT, WIDTH, 3))


START = "videos/observation.images.top/from_timestamp"
SMALL = image_file(smooth(0, 0, 8, 8), "PNG")


@pytest.mark.parametrize(("kind", "name", "change", "episode", "tick", "named"), [
    ("foreign", DATA, column(TOP, at(2, {"bytes": None, "path": "images/frame_000002.png"})), 0, 2,
     (0, 2, TOP, "bytes")),
    ("foreign", DATA, column(TOP, at(2, {"bytes": b"\xff\xd8\xff\xe0 no image", "path": None})), 0, 2,
     (0, 2, "JPEG", "PNG")),
    ("foreign", DATA, column(TOP, at(2, {"bytes": SMALL, "path": None})), 0, 2, (2, "8x8", f"{HEIGHT}x{WIDTH}")),
    ("video", EPISODES, column(START, [0.0, 0.16]), 1, 4, (1, 4, "file-000.mp4", "0.2400")),
    ("video", EPISODES, column(START, [0.0, 0.115]), 1, 0, ("file-000.mp4", "0.1150", "0.1200")),
])  # fmt: skip
def test_a_frame_that_is_not_what_the_data_set_says(lerobot_copy, kind, name, change, episode, tick, named):
    strict = {"tolerance_s": 0.004} if kind == "video" else {}
    frames = read_all(amend(lerobot_copy(kind), name, change), **strict)[episode].steps.sparse["images/top"].values
    looks = [frames.__getitem__, frames.encoded] if kind == "foreign" else [frames.__getitem__]
    for look in looks:
        with pytest.raises(DataError, match=naming(*named)):
            look(tick)
    if kind == "foreign":
        assert frames[1].shape == (HEIGHT, WIDTH, 3)


def test_times_of_videos_that_nothing_says(lerobot_copy):
    """Without a rate every step would get the video's first frame."""
    folder = lerobot_copy("bare")
    wanted = [decode_images(e).steps.sparse["images/top"].values for e in read_all(folder)]
    drop(folder, "timestamp")
    amend(folder, INFO, info(fps=None))
    with pytest.raises(DataError, match=naming(0, "timestamp", "fps", "hz")):
        read_all(folder)
    assert len(read_all(folder, cameras=())) == 2
    for before, episode in zip(wanted, read_all(folder, hz=HZ), strict=True):
        assert (decode_images(episode).steps.sparse["images/top"].values == before).all()
    (folder / VIDEO).unlink()
    assert len(read_all(folder, cameras=("wrist",), hz=HZ)) == 2


ARM = RobotSpec(
    "arm", HZ, 4, (-9.0,) * 3, (9.0,) * 3, (-1,) * 3, (),
    (CameraSpec("top", HEIGHT, WIDTH), CameraSpec("wrist", HEIGHT, WIDTH)), 99,
)  # fmt: skip
LAST = "data/chunk-000/file-004.parquet"
FILM = VIDEO.replace("000.mp4", "001.mp4")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize(("kind", "name", "change", "kept", "named"), [
    ("foreign", INFO, info(total_episodes=8), 5, ("total_episodes", 8, 5)),
    ("foreign", LAST, -10, 4, (LAST, "Parquet")),
    ("foreign", LAST, POINTER, 4, (LAST, "git lfs pull")),
    ("foreign", LAST, None, 4, ("/data", 33, 41)),
    ("foreign", EPISODES, lambda table: table.slice(0, 3), 3, ("/data", 41, 28)),
    ("v2.1", "meta/episodes.jsonl", -8, 4, ("episodes.jsonl", "line 5")),
    ("v2.1", LAST.replace("file-", "episode_000"), -10, 4, ("episode_000004.parquet",)),
    ("film", FILM, -700, 1, ("file-001.mp4",)),
    ("film", FILM, POINTER, 1, ("file-001.mp4", "git lfs pull")),
])  # fmt: skip
def test_what_is_whole_of_a_damaged_set_is_kept_and_the_rest_listed(
    lerobot_copy, tmp_path: Path, monkeypatch, capsys, kind, name, change, kept, named
):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    if kind == "film":
        sink = LeRobotSink(tmp_path / "set", mode="video", video_file_mb=0.001)
        folder = write(sink, [episode_of(0, 6), episode_of(1, 6)])
        (folder / SIDE).unlink()
    else:
        folder = a_file_each(lerobot_copy(kind)) if kind == "foreign" else lerobot_copy(kind)
    wanted = read_all(folder)[:kept]
    before = contents(amend(folder, name, change))
    with pytest.raises(DataError, match=naming(*named)) as caught:
        list(map(decode_images, read_all(folder)))
    one_of_its_own = kind == "film" or "episode_000004" in name  # `data convert` then names --skip-bad
    assert one_of_its_own or f"`serl-chunk data repair {folder} --out DIR`" in str(caught.value)
    loaded = load_demos([folder], ARM, options=ReadOptions(skip_bad=True))
    assert re.search(naming(*named), "".join(note for note in loaded.notes if note.startswith("left out: ")))
    assert [e.steps.action.tolist() for e in loaded.episodes] == [e.steps.action.tolist() for e in wanted]
    assert contents(folder) == before
    if change == POINTER or name not in (INFO, FILM, "meta/episodes.jsonl"):
        return  # the same is written
    assert main(["data", "repair", str(folder), "--out", str(tmp_path / "whole"), "--workers=0"]) == 0
    assert re.search(naming(*named), capsys.readouterr().out)
    repaired = open_episodes(tmp_path / "whole", ReadOptions())
    assert repaired.index.version == ("v2.1" if kind == "v2.1" else "v3.0")
    assert bool(repaired.index.videos) is (kind == "film")
    found = map(repaired.read, repaired.keys())
    assert [e.steps.action.tolist() for e in found] == [e.steps.action.tolist() for e in wanted]
    assert contents(folder) == before


def test_departures_are_lines_of_check_and_faults_if_that_is_strict(foreign: Path, capsys):
    amend(foreign, DATA, column("timestamp", lambda rows: [t + 0.003 * (i == 4) for i, t in enumerate(rows)]))
    assert [main(["data", "check", str(foreign), *strict]) for strict in ([], ["--strict"])] == [0, 1]
    departure, *_, last = capsys.readouterr().out.splitlines()
    assert re.search(naming("departure", "episode 0, step 4", "timestamp", 0.083, 0.08), departure)
    assert "BAD" in last
