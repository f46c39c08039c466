"""LeRobot data sets that others wrote, or spoilt: what is read of them, and a sentence for what is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import image_file, notes_of, read_all
from errors import naming

pytest.importorskip("pyarrow")
pytest.importorskip("av")

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from lerobot_sets import HEIGHT, HZ, WIDTH, episode_of, rewrite, several, shared, smooth, write

from serl_chunk.data.formats import open_episodes
from serl_chunk.data.lerobot.writer import LeRobotSink
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.types import DataError, Episode, Outcome, Source

DATA, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
TASKS, SIDE, INFO = "meta/tasks.parquet", "meta/serl_chunk.parquet", "meta/info.json"
TOP, VIDEO = "observation.images.top", "videos/observation.images.top/chunk-000/file-000.mp4"
ROWS = 41  # of episodes of 9, 7, 12, 5 and 8
Change = Callable[[Any], Any]


def column(name: str, values: Any) -> Change:
    """A table with these values in a column, or what a function makes of the list of those that were there."""

    def change(table: pa.Table) -> pa.Table:
        new = values(table.column(name).to_pylist()) if callable(values) else values
        new = new if isinstance(new, pa.Array) else pa.array(new)
        return table.set_column(table.schema.get_field_index(name), name, new)

    return change


def at(i: int, value: Any) -> Change:
    return lambda rows: [value(row) if k == i and callable(value) else value if k == i else row
                         for k, row in enumerate(rows)]  # fmt: skip


def without(*names: str) -> Change:
    return lambda table: table.drop_columns(list(names))


def info(**values: Any) -> Change:
    return lambda about: {k: v for k, v in (about | values).items() if v is not None}


def feature(name: str, **values: Any) -> Change:
    return lambda about: about | {"features": about["features"] | {name: about["features"].get(name, {}) | values}}


def kept_type(name: str, i: int, change: Change) -> Change:
    """Change entry `i` of a column of lists of structures, whose type remains."""

    def changed(table: pa.Table) -> pa.Table:
        rows = table.column(name).to_pylist()
        rows[i] = change(rows[i])
        return column(name, pa.array(rows, table.schema.field(name).type))(table)

    return changed


def amend(folder: Path, name: str, change: Change | int | str | None, **options: Any) -> Path:
    """Change a table or a JSON file; keep so many bytes of it; write a text; or remove it."""
    path = folder / name
    if change is None:
        path.unlink()
    elif isinstance(change, int):
        path.write_bytes(path.read_bytes()[:change])
    elif isinstance(change, str):
        path.write_text(change)
    elif path.suffix == ".json":
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    else:
        rewrite(path, change, **options)
    return folder


def drop(folder: Path, *columns: str) -> None:
    """A data set that never had these columns."""
    amend(folder, DATA, without(*columns))
    amend(folder, INFO, lambda about: about | {
        "features": {k: v for k, v in about["features"].items() if k not in columns}
    })  # fmt: skip


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, Path]:
    """Ours; with partial interventions; with videos; and without what only we write, also of the older version."""
    root = tmp_path_factory.mktemp("sets")
    episodes = several()
    found = {
        "ours": write(LeRobotSink(root / "ours"), episodes),
        "shared": write(LeRobotSink(root / "shared"), [episodes[0], shared(episodes[1], 2, 6), *episodes[2:]]),
        "v2.1": write(LeRobotSink(root / "v2.1", "v2.1"), episodes),
        "video": write(LeRobotSink(root / "video", mode="video"), [episode_of(0, 6), episode_of(1, 6)]),
    }
    for name, of in (("foreign", "ours"), ("bare", "video")):
        found[name] = Path(shutil.copytree(found[of], root / name))
    features = json.loads((found["foreign"] / INFO).read_text())["features"]
    drop(found["foreign"], *(k for k in features if k.startswith("complementary_info.") or k == "next.success"))
    for name in ("foreign", "v2.1", "bare"):
        (found[name] / SIDE).unlink()
    return found


@pytest.fixture
def copy(sets: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    return lambda kind, name="set": Path(shutil.copytree(sets[kind], tmp_path / name))


@pytest.fixture
def ours(copy) -> Path:
    return copy("ours")


@pytest.fixture
def foreign(copy) -> Path:
    return copy("foreign")


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
    notes = notes_of(foreign)
    assert "a reward of 1 or more" in notes
    assert "source of actions is not recorded" in notes
    with pytest.raises(DataError, match=naming(0, 8, 1, "failure")):
        read_all(foreign, success=False)
    drop(foreign, "next.reward", "next.done")
    assert "success or failure" in notes_of(foreign)
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
    amend(ours, DATA, column("next.success", pa.array([None] * ROWS, pa.bool_())))
    source = open_episodes(ours, ReadOptions())
    assert not any("without a true" in note for note in source.notes())  # damage is left to reading
    (ours / DATA).unlink()
    assert not any("without a true" in note for note in source.notes())


@pytest.mark.parametrize("codec", ["snappy", "none"])
def test_other_ways_to_write_it(foreign: Path, codec: str):
    """Variable lists, float64, one row group for several episodes, compressed images, columns in another order."""

    def change(table: pa.Table) -> pa.Table:
        for name in ("observation.state", "action"):
            table = column(name, lambda rows: pa.array(rows, pa.list_(pa.float64())))(table)
        table = column("timestamp", lambda rows: np.array(rows, np.float64))(table)
        return table.select(table.column_names[::-1]).replace_schema_metadata(None)

    wanted = [decode_images(e) for e in read_all(foreign)]
    amend(foreign, DATA, change, compression=codec, row_group_size=13)
    same_steps(read_all(foreign), wanted)


def test_several_files_and_optional_pieces_missing(foreign: Path):
    wanted = [decode_images(e) for e in read_all(foreign)]
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


def cut_anew() -> Change:
    """Lists that are as long together as they should be."""
    lists = [[0.0] * {2: 2, 3: 4}.get(i, 3) for i in range(ROWS)]
    return column("action", pa.array(lists, pa.list_(pa.float32())))


def pandas(about: bytes | None) -> Change:
    return lambda table: table.replace_schema_metadata(about and {"pandas": about})


def entry(name: str, **values: Any) -> Change:
    return kept_type(name, 1, lambda there: [{**(there or [DECISION])[0], **values}])


def partial(**values: Any) -> Change:
    return kept_type("human_dims", 1, lambda there: there | values)


DECISION = {"name": "x", "dtype": "<f4", "shape": [1], "ticks": [0], "data": b"\0\0\0\0"}
THIRD = "data/chunk-000/episode_000002.parquet"
TRAPS: list[tuple[str, str, Change | int | str | None, tuple[Any, ...]]] = [
    ("ours", DATA, without("next.reward"), ("file-000.parquet", "next.reward", "meta/info.json")),
    ("ours", DATA, lambda t: t.append_column("effort", pa.array(np.zeros(ROWS))),
     ("file-000.parquet", "effort", "meta/info.json")),
    ("ours", TASKS, pandas(None), ("tasks.parquet", "pandas", "__index_level_0__")),
    ("ours", TASKS, pandas(b"{"), ("tasks.parquet", "pandas", "(char 1)")),
    ("ours", TASKS, lambda t: t.take([1, 0]).replace_schema_metadata(t.schema.metadata),
     ("tasks.parquet", "task_index", "[1, 0]")),
    ("ours", DATA, lambda t: t.take([*range(11), 12, 11, *range(13, ROWS)]),
     (1, 2, "frame_index", 3, "file-000.parquet")),
    ("ours", EPISODES, lambda t: t.take([0, 2, 1, 3, 4]), (EPISODES, 1, 2)),
    ("ours", DATA, column("timestamp", at(13, lambda v: v + 0.002)), (1, 4, "timestamp", "0.082000", 50, "0.080000")),
    ("ours", DATA, column("action", at(2, [0.0, np.nan, 0.0])), (0, 2, "action")),
    ("ours", DATA, column("next.reward", at(3, None)), (0, 3, "next.reward")),
    ("ours", DATA, column("action", at(3, [0.0] * 2)), (0, "action", "file-000.parquet", 3, "row 0", 2, "row 3")),
    ("ours", DATA, cut_anew(), (0, "action", "file-000.parquet", 3, "row 0", 2, "row 2")),
    ("ours", DATA, column("action", [{"x": 0.0}] * ROWS), (0, "action", "file-000.parquet", "struct<x: double>")),
    ("ours", DATA, column("action", [[0.0] * 7] * ROWS), (0, "action", "[7]", "[3]")),
    ("ours", EPISODES, column("length", ["nine"] * 5), ("file-000.parquet", "length", "string")),
    ("ours", INFO, feature("action", shape="nine"), ("info.json", "action", "nine")),
    ("ours", DATA, lambda t: t.slice(0, 30), ("/data", 30, 1, 41)),
    ("ours", EPISODES, column("dataset_from_index", [0, 9, 15, 28, 33]), (EPISODES, 2, 15, 16)),
    ("ours", DATA, column("task_index", [7] * ROWS), (0, "task_index", 7, 2)),
    ("ours", DATA, -200, (DATA, "Parquet")),
    ("ours", EPISODES, -200, (EPISODES, "Parquet")),
    ("ours", INFO, -200, ("info.json", "char")),
    ("ours", DATA, None, ("/data", "chunk-*/*.parquet")),
    ("ours", EPISODES, None, ("meta/episodes", "chunk-*/*.parquet")),
    ("ours", TASKS, None, ("meta/tasks.parquet",)),
    ("ours", INFO, info(codebase_version="v1.6"), ("info.json", "codebase_version", "v1.6", "v3.0", "v2.1")),
    ("ours", INFO, info(fps=-1), ("info.json", "fps", -1)),
    ("ours", INFO, info(features=None), ("info.json", "features", "dtype")),
    ("ours", INFO, info(total_episodes=9), ("info.json", "total_episodes", 9, 5)),
    ("ours", INFO, info(data_path="data/{nonsense}.parquet"), ("info.json", "data_path", "video_path", "nonsense")),
    # Whoever removes episodes numbers the others anew: what lies beside them would be another episode's.
    ("ours", DATA, column("action", [[0.0] * 3] * ROWS), (0, SIDE, "changed")),
    ("ours", SIDE, lambda t: t.take([1, 0, 2, 3, 4]), (0, SIDE, 1)),
    ("ours", SIDE, without("outcome"), (0, SIDE, "outcome")),
    ("ours", SIDE, entry("image_ticks", ticks=[2, 99]), (1, SIDE, "top", 99, 7)),
    ("ours", SIDE, entry("decisions", ticks=[7]), (1, SIDE, "x", 7)),
    ("ours", SIDE, entry("decisions", dtype="O"), (1, SIDE, "decision/x", "object")),
    ("ours", SIDE, entry("decisions", dtype="nonsense"), (1, SIDE, "nonsense")),
    ("ours", SIDE, entry("decisions", shape=[2]), (1, SIDE, "(2,)")),
    ("shared", SIDE, partial(ticks=[2, 99]), (1, "human_dims", 99, 7)),
    ("shared", SIDE, partial(ticks=[2]), (1, "human_dims", 2)),
    ("shared", SIDE, partial(data=b"\0\1\0\0\1"), (1, 3)),
    ("shared", SIDE, partial(data=bytes(6)), (1, "human_dims", "tick 2", "[0, 0, 0]")),
    ("v2.1", "meta/tasks.jsonl", '{"task_index": 1, "task": "a"}', ("tasks.jsonl", 0)),
    ("v2.1", "meta/tasks.jsonl", "{", ("tasks.jsonl", 1, "task_index", "task")),
    ("v2.1", "meta/episodes.jsonl", '{"episode_index": 1, "length": 4}', ("episodes.jsonl", 0)),
    ("v2.1", "meta/episodes.jsonl", '{"episode_index": 0, "length": "nine"}', ("episodes.jsonl", 1, "length", "nine")),
    ("v2.1", "meta/episodes.jsonl", '{"episode_index": 0, "length": 0}', ("episodes.jsonl", 1, "length", 0)),
    ("v2.1", "meta/episodes.jsonl", '{"episode_index": 0}', ("episodes.jsonl", 1, "episode_index", "length")),
    ("v2.1", THIRD, None, (2, "episode_000002.parquet")),
    ("v2.1", THIRD, lambda t: t.slice(0, 5), ("episode_000002.parquet", 5, "meta/episodes.jsonl", 12)),
    ("video", VIDEO, None, (0, "file-000.mp4", "cameras")),
    ("bare", INFO, feature(TOP, shape=[8, 8, 3]), ("16x24", "meta/info.json", "8x8")),
    ("video", EPISODES, without("videos/observation.images.top/from_timestamp"),
     ("videos/observation.images.top/from_timestamp",)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "change", "named"), TRAPS)
def test_spoilt(copy, kind: str, name: str, change: Any, named: tuple[Any, ...]):
    folder = amend(copy(kind), name, change, **({"row_group_size": 16} if name == SIDE else {}))
    with pytest.raises(DataError, match=naming(*named)) as error:
        read_all(folder)
    assert str(error.value).startswith(str(folder))


def test_without_what_belongs_to_it_it_is_read_or_named(ours: Path, copy, tmp_path: Path):
    with pytest.raises(DataError, match=naming(tmp_path, "meta/info.json")):
        open_episodes(tmp_path, ReadOptions(), "lerobot")
    assert open_episodes(ours, ReadOptions()).notes() == []
    assert {e.begin.conditions for e in read_all(ours)} == {'{"profile": "p"}'}
    amend(ours, SIDE, without("conditions"), row_group_size=16)
    assert {e.begin.conditions for e in read_all(ours)} == {""}
    amend(ours, DATA, column("action", [[0.0] * 3] * ROWS))
    (ours / SIDE).unlink()
    assert len(read_all(ours)) == 5


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
        ("video", VIDEO, -300, 1, 3, (1, 3, "file-000.mp4", "0.1800")),
        ("video", EPISODES, column(START, [0.0, 0.16]), 1, 4, (1, 4, "file-000.mp4", "0.2400")),
        ("video", EPISODES, column(START, [0.0, 0.115]), 1, 0, ("file-000.mp4", "0.1150", "0.1200")),
    ],
)  # fmt: skip
def test_a_frame_that_is_not_what_the_data_set_says(copy, kind, name, change, episode, tick, named):
    frames = read_all(amend(copy(kind), name, change))[episode].steps.sparse["images/top"].values
    looks = [frames.__getitem__, frames.encoded] if kind == "foreign" else [frames.__getitem__]
    for look in looks:
        with pytest.raises(DataError, match=naming(*named)):
            look(tick)
    if kind == "foreign":
        assert frames[1].shape == (HEIGHT, WIDTH, 3)


def test_times_of_videos_that_nothing_says(copy):
    """Without a rate every step would get the video's first frame."""
    folder = copy("bare")
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
