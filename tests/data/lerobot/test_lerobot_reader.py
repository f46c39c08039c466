"""LeRobot data sets that others wrote: what is read of them."""

from __future__ import annotations

import json
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
    drop,
    feature,
    info,
    several,
    smooth,
)  # fmt: skip

from serl_chunk.data.formats import open_episodes
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.types import DataError, Episode, Outcome, Source

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


@pytest.mark.parametrize(
    ("rewarded", "marked", "options", "rewards", "note"),
    [
        ({7, 12}, {7, 12}, {}, ([0.0] * 7 + [1.0], [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]), ""),
        ({7}, {7, 12}, {}, ([0.0] * 7 + [1.0], [0.0] * 5 + [1.0]),
         "1 successes had no reward of 1 or more: their last step has 1"),
        (set(), None, {"success": True}, ([0.0] * 7 + [1.0], [0.0] * 5 + [1.0]), "5 successes had no"),
        ({7}, {7}, {}, ([0.0] * 7 + [1.0], [0.0] * 7), "4 episodes without a true next.success"),
    ],
)  # fmt: skip
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


def test_other_columns_several_files_and_optional_pieces_missing(foreign: Path):
    """Variable lists, float64, columns in another order, no description of pandas."""

    def change(table: pa.Table) -> pa.Table:
        for name in ("observation.state", "action"):
            table = column(name, lambda rows: pa.array(rows, pa.list_(pa.float64())))(table)
        return table.select(table.column_names[::-1]).replace_schema_metadata(None)

    wanted = [decode_images(e) for e in read_all(foreign)]
    amend(foreign, DATA, change, compression="none", row_group_size=13)
    same_steps(read_all(foreign), wanted)
    table = pq.read_table(foreign / DATA)
    for i in range(5):
        pq.write_table(table.filter(pc.field("episode_index") == i), foreign / f"data/chunk-000/file-{i:03d}.parquet")
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


@pytest.mark.parametrize(
    ("kind", "name", "change", "episode", "tick", "named"),
    [
        ("foreign", DATA, column(TOP, at(2, {"bytes": None, "path": "images/frame_000002.png"})), 0, 2,
         (0, 2, TOP, "bytes")),
        ("foreign", DATA, column(TOP, at(2, {"bytes": b"\xff\xd8\xff\xe0 no image", "path": None})), 0, 2,
         (0, 2, "JPEG", "PNG")),
        ("foreign", DATA, column(TOP, at(2, {"bytes": SMALL, "path": None})), 0, 2, (2, "8x8", f"{HEIGHT}x{WIDTH}")),
        ("video", EPISODES, column(START, [0.0, 0.16]), 1, 4, (1, 4, "file-000.mp4", "0.2400")),
        ("video", EPISODES, column(START, [0.0, 0.115]), 1, 0, ("file-000.mp4", "0.1150", "0.1200")),
    ],
)  # fmt: skip
def test_a_frame_that_is_not_what_the_data_set_says(lerobot_copy, kind, name, change, episode, tick, named):
    frames = read_all(amend(lerobot_copy(kind), name, change))[episode].steps.sparse["images/top"].values
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
