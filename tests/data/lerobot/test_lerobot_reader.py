"""LeRobot data sets that others wrote, or spoilt: what is read of them, and a sentence for what is not."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errors import naming

pytest.importorskip("pyarrow")
pytest.importorskip("av")

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from lerobot_sets import HEIGHT, HZ, WIDTH, edit, episode_of, rewrite, several, shared, smooth, write
from PIL import Image

from serl_chunk.data.formats import open_episodes
from serl_chunk.data.lerobot.writer import LeRobotSink
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.types import DataError, Episode, Outcome, Source

DATA, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
TASKS = "meta/tasks.parquet"
SIDE, INFO = "meta/serl_chunk.parquet", "meta/info.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return write(LeRobotSink(tmp_path_factory.mktemp("sets") / "whole"), several())


@pytest.fixture
def ours(whole: Path, tmp_path: Path) -> Path:
    """A copy of a data set of ours."""
    return Path(shutil.copytree(whole, tmp_path / "set"))


@pytest.fixture
def foreign(ours: Path) -> Path:
    """The same without what only we write."""
    (ours / SIDE).unlink()
    about = json.loads((ours / INFO).read_text())
    left_out = [k for k in about["features"] if k.startswith("complementary_info.") or k == "next.success"]
    rewrite(ours / DATA, lambda table: table.drop_columns(left_out))
    edit(ours / INFO, features={k: v for k, v in about["features"].items() if k not in left_out})
    return ours


def read(folder: Path, **options: Any) -> list[Episode]:
    source = open_episodes(folder, ReadOptions(**options))
    return [source.read(key) for key in source.keys()]


def drop(folder: Path, *columns: str) -> None:
    """A data set that never had these columns."""
    rewrite(folder / DATA, lambda table: table.drop_columns(list(columns)))
    features = json.loads((folder / INFO).read_text())["features"]
    edit(folder / INFO, features={k: v for k, v in features.items() if k not in columns})


def replaced(table: pa.Table, name: str, values: Any) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, name, values if isinstance(values, pa.Array) else pa.array(values))


class TestForeign:
    """Data sets without what only we write."""

    def test_reward_and_who_acted(self, foreign: Path):
        first, *_ = read(foreign)
        wanted = several()[0]
        assert first.end.outcome is Outcome.SUCCESS  # the last reward is 1
        assert (first.end.length, first.end.terminated, first.end.truncated) == (8, True, False)
        assert first.steps.reward.tolist() == [*wanted.steps.reward[:7].tolist(), 1.0]
        assert (first.steps.source == Source.HUMAN).all()
        assert (first.steps.policy_version == -1).all()
        np.testing.assert_allclose(first.steps.stamp, np.arange(8) / HZ)
        assert first.begin.task == "stack"
        final = first.end.final_observation
        assert final is not None
        assert (final["state"] == wanted.steps.observation["state"][8]).all()
        assert (final["images/wrist"] == wanted.steps.sparse["images/wrist"].values[8]).all()

    def test_no_success_is_no_outcome(self, foreign: Path):
        third = read(foreign)[2]
        assert third.end.outcome is Outcome.UNKNOWN
        assert (third.end.length, third.end.terminated, third.end.truncated) == (12, False, True)
        assert third.end.final_observation is None

    @pytest.mark.parametrize("success", [True, False])
    def test_outcome_given(self, foreign: Path, success: bool):
        drop(foreign, "next.reward", "next.done")
        for wanted, found in zip(several(), read(foreign, success=success), strict=True):
            assert found.end.outcome is (Outcome.SUCCESS if success else Outcome.FAILURE)
            assert (found.end.terminated, found.end.length) == (True, wanted.end.length - 1)
            assert found.steps.reward.tolist() == [0.0] * (found.steps.n - 1) + [float(success)]
        every = read(foreign, success=True, reward_every_step=True)[0]
        assert (every.steps.reward == 1).all()

    def test_all_texts_of_an_episode_with_several(self, foreign: Path):
        """Parts of a task: the steps of one episode have different task_index values."""
        parts = [0] * 3 + [1] * 6 + [1] * 7 + [0] * 25
        rewrite(foreign / DATA, lambda table: replaced(table, "task_index", pa.array(parts)))
        tasks = [e.begin.task for e in read(foreign, success=True)]
        assert tasks[:3] == ["stack; insert", "insert", "stack"]

    def test_success_recorded(self, ours: Path):
        (ours / SIDE).unlink()
        found = read(ours, success=True)  # what is recorded counts
        assert [e.end.outcome for e in found[:3]] == [Outcome.SUCCESS, Outcome.SUCCESS, Outcome.UNKNOWN]
        assert found[0].steps.decision_tick.tolist() == several()[0].steps.decision_tick[:8].tolist()

    def judged(self, folder: Path, reward: dict[int, float], success: set[int]) -> Path:
        """`foreign` with these rewards by row, the others 0, and `next.success` true on these rows; episodes of 9, 7,
        12, 5 and 8 steps."""
        features = json.loads((folder / INFO).read_text())["features"]
        edit(folder / INFO, features=features | {"next.success": {"dtype": "bool", "shape": [1], "names": None}})

        def change(table: pa.Table) -> pa.Table:
            table = replaced(table, "next.reward", pa.array([reward.get(i, 0.0) for i in range(41)], pa.float32()))
            return table.append_column("next.success", pa.array([i in success for i in range(41)]))

        rewrite(folder / DATA, change)
        return folder

    def test_a_success_before_the_last_row_keeps_its_reward(self, foreign: Path):
        first, second, *_ = read(self.judged(foreign, {7: 1.0, 12: 1.0}, {7, 12}))
        assert first.steps.reward.tolist() == [0.0] * 7 + [1.0]
        assert second.steps.reward.tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]

    def test_a_success_without_reward_gets_one(self, foreign: Path):
        self.judged(foreign, {7: 1.0}, {7, 12})
        second = read(foreign)[1]
        assert second.steps.reward.tolist() == [0.0] * 5 + [1.0]
        notes = open_episodes(foreign, ReadOptions()).notes()
        assert "1 successes had no reward of 1 or more: their last step has 1" in notes

    def test_success_said_of_rewards_that_are_zero(self, foreign: Path):
        rewrite(foreign / DATA, lambda t: replaced(t, "next.reward", pa.array(np.zeros(41, np.float32))))
        assert read(foreign, success=True)[1].steps.reward.tolist() == [0.0] * 5 + [1.0]
        assert any(
            n.startswith("5 successes had no") for n in open_episodes(foreign, ReadOptions(success=True)).notes()
        )

    def test_failure_said_of_a_reward_of_1(self, foreign: Path):
        with pytest.raises(DataError, match=naming(0, 8, 1, "failure")):
            read(foreign, success=False)

    def test_nowhere_true_is_no_outcome(self, foreign: Path):
        self.judged(foreign, {7: 1.0}, {7})
        first, second, *_ = read(foreign)
        assert (first.end.outcome, first.end.length) == (Outcome.SUCCESS, 8)
        assert (second.end.outcome, second.end.length) == (Outcome.UNKNOWN, 7)
        assert (second.end.terminated, second.end.truncated) == (False, True)
        notes = open_episodes(foreign, ReadOptions()).notes()
        assert any(note.startswith("4 episodes without a true next.success") for note in notes)
        failed = read(foreign, success=False)[1].end
        assert (failed.outcome, failed.length, failed.terminated) == (Outcome.FAILURE, 6, True)
        assert not any("without a true" in note for note in open_episodes(foreign, ReadOptions(success=False)).notes())
        drop(foreign, "next.reward")
        with pytest.raises(DataError, match=naming(1, "next.success", "failure")):
            read(foreign, reward_every_step=True)

    def test_notes_of_damaged_files_are_left_to_reading(self, ours: Path):
        (ours / SIDE).unlink()
        source = open_episodes(ours, ReadOptions())
        rewrite(ours / DATA, lambda t: replaced(t, "next.success", pa.array([None] * len(t), pa.bool_())))
        assert not any("without a true" in note for note in source.notes())
        (ours / DATA).unlink()
        assert not any("without a true" in note for note in source.notes())

    def test_reward_under_its_other_name(self, foreign: Path):
        other = {"next.reward": "reward"}
        rewrite(foreign / DATA, lambda t: t.rename_columns([other.get(n, n) for n in t.column_names]))
        features = json.loads((foreign / INFO).read_text())["features"]
        edit(foreign / INFO, features={"reward" if k == "next.reward" else k: v for k, v in features.items()})
        assert read(foreign)[0].steps.reward[-1] == 1

    def test_interventions(self, ours: Path):
        (ours / SIDE).unlink()
        drop(ours, "complementary_info.source")
        first = read(ours)[0]
        assert (first.steps.source == several()[0].steps.source[:8]).all()

    @pytest.mark.parametrize("codec", ["snappy", "none"])
    def test_other_ways_to_write_it(self, foreign: Path, codec: str):
        """Variable lists, float64, one row group for several episodes, compressed images, columns in another order."""

        def change(table: pa.Table) -> pa.Table:
            for name in ("observation.state", "action"):
                table = replaced(table, name, pa.array(table.column(name).to_pylist(), pa.list_(pa.float64())))
            table = replaced(table, "timestamp", table.column("timestamp").to_numpy().astype(np.float64))
            return table.select(table.column_names[::-1]).replace_schema_metadata(None)

        wanted = [decode_images(e) for e in read(foreign)]
        rewrite(foreign / DATA, change, compression=codec, row_group_size=13)
        for a, b in zip(wanted, read(foreign), strict=True):
            assert a.steps.observation["state"].tobytes() == b.steps.observation["state"].tobytes()
            assert a.steps.action.tobytes() == b.steps.action.tobytes()
            for key, rows in a.steps.sparse.items():
                assert (np.asarray(b.steps.sparse[key].values) == rows.values).all()

    def test_several_files_and_optional_pieces_missing(self, foreign: Path):
        wanted = [decode_images(e) for e in read(foreign)]
        table = pq.read_table(foreign / DATA)
        for i in range(5):
            part = table.filter(pc.field("episode_index") == i)
            pq.write_table(part, foreign / f"data/chunk-000/file-{i:03d}.parquet")
        kept = ["episode_index", "length", "data/chunk_index", "data/file_index", "tasks"]
        rewrite(foreign / EPISODES, lambda table: table.select(kept))
        gone = ("robot_type", "total_tasks", "chunks_size", "splits", "data_path", "video_path", "total_frames")
        edit(foreign / INFO, **dict.fromkeys((*gone, "total_episodes")))
        (foreign / "meta/stats.json").unlink()
        for a, b in zip(wanted, read(foreign), strict=True):
            assert a.steps.action.tobytes() == b.steps.action.tobytes()
            assert (a.steps.sparse["images/top"].values == np.asarray(b.steps.sparse["images/top"].values)).all()

    def test_no_rate(self, foreign: Path):
        edit(foreign / INFO, fps=None)
        assert open_episodes(foreign, ReadOptions()).hz is None
        assert read(foreign, hz=10.0)[0].steps.stamp[1] == 0.1

    def test_grey_images_and_those_with_a_palette(self, foreign: Path):
        def file(t: int) -> bytes:
            out = io.BytesIO()
            Image.fromarray(smooth(0, t)).convert("L" if t % 2 else "P").save(out, "PNG")
            return out.getvalue()

        rows = [{"bytes": file(t), "path": None} for t in range(41)]
        rewrite(foreign / DATA, lambda table: replaced(table, "observation.images.top", rows))
        frames = read(foreign)[0].steps.sparse["images/top"].values
        assert frames.encoded(1) is None
        assert frames[1].shape == (HEIGHT, WIDTH, 3)

    def test_cameras_and_proportion(self, foreign: Path):
        assert list(read(foreign, cameras=("wrist",))[0].steps.sparse) == ["images/wrist"]
        assert read(foreign, cameras=())[0].steps.sparse == {}
        assert len(read(foreign, proportion=0.6)) == 3
        with pytest.raises(DataError, match=naming("left", "top", "wrist")):
            read(foreign, cameras=("left",))

    def test_channels_first(self, foreign: Path):
        features = json.loads((foreign / INFO).read_text())["features"]
        features["observation.images.top"] |= {"shape": [3, HEIGHT, WIDTH], "names": ["channels", "height", "width"]}
        edit(foreign / INFO, features=features)
        assert read(foreign)[0].steps.sparse["images/top"].values.shape == (8, HEIGHT, WIDTH, 3)

    def test_axes_as_a_mapping(self, foreign: Path):
        for shape in ([3, HEIGHT, WIDTH], [HEIGHT, WIDTH, 3]):
            features = json.loads((foreign / INFO).read_text())["features"]
            features["observation.images.top"] |= {"shape": shape, "names": {"axes": ["height", "width"]}}
            edit(foreign / INFO, features=features)
            assert read(foreign)[0].steps.sparse["images/top"].values.shape == (8, HEIGHT, WIDTH, 3)

    def test_notes(self, foreign: Path):
        notes = open_episodes(foreign, ReadOptions()).notes()
        assert any("a reward of 1 or more" in note for note in notes)
        assert any("source of actions is not recorded" in note for note in notes)
        drop(foreign, "next.reward")
        assert any("success or failure" in note for note in open_episodes(foreign, ReadOptions()).notes())

    def test_ours_needs_no_notes(self, ours: Path):
        assert open_episodes(ours, ReadOptions()).notes() == []


def _column_gone(folder: Path) -> None:
    rewrite(folder / DATA, lambda table: table.drop_columns(["next.reward"]))


def _column_more(folder: Path) -> None:
    rewrite(folder / DATA, lambda table: table.append_column("effort", pa.array(np.zeros(len(table)))))


def _tasks_without_index(folder: Path) -> None:
    rewrite(folder / TASKS, lambda table: table.replace_schema_metadata(None))


def _tasks_out_of_order(folder: Path) -> None:
    about = pq.read_schema(folder / TASKS).metadata
    rewrite(folder / TASKS, lambda table: table.take([1, 0]).replace_schema_metadata(about))


def _rows_out_of_order(folder: Path) -> None:
    rewrite(folder / DATA, lambda table: table.take([*range(11), 12, 11, *range(13, len(table))]))


def _episodes_out_of_order(folder: Path) -> None:
    rewrite(folder / EPISODES, lambda table: table.take([0, 2, 1, 3, 4]))


def _late(folder: Path) -> None:
    def change(table: pa.Table) -> pa.Table:
        stamps = table.column("timestamp").to_numpy().copy()
        stamps[9 + 4] += 0.002
        return replaced(table, "timestamp", stamps)

    rewrite(folder / DATA, change)


def _nan(folder: Path) -> None:
    def change(table: pa.Table) -> pa.Table:
        values = np.array(table.column("action").to_pylist(), np.float32)
        values[2, 1] = np.nan
        return replaced(table, "action", pa.array(values.tolist(), pa.list_(pa.float32())))

    rewrite(folder / DATA, change)


def _null(folder: Path) -> None:
    rewrite(folder / DATA, lambda t: replaced(t, "next.reward", [None if i == 3 else 0.0 for i in range(len(t))]))


def _unequal(folder: Path) -> None:
    rewrite(folder / DATA, lambda t: replaced(t, "action", [[0.0] * (2 if i == 3 else 3) for i in range(len(t))]))


def _wide(folder: Path) -> None:
    rewrite(folder / DATA, lambda t: replaced(t, "action", [[0.0] * 7 for _ in range(len(t))]))


def _cut_anew(kind: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Lists that are as long together as they should be."""

    def spoil(folder: Path) -> None:
        lists = [[0.0] * {2: 2, 3: 4}.get(i, 3) for i in range(41)]
        rewrite(folder / DATA, lambda table: replaced(table, "action", pa.array(lists, kind(pa.float32()))))

    return spoil


def _structures(folder: Path) -> None:
    rewrite(folder / DATA, lambda table: replaced(table, "action", [{"x": 0.0}] * len(table)))


def _pandas(about: bytes) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / TASKS, lambda table: table.replace_schema_metadata({"pandas": about}))


def _lengths_as_texts(folder: Path) -> None:
    rewrite(folder / EPISODES, lambda table: replaced(table, "length", ["nine"] * len(table)))


def _shape(shape: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        features = json.loads((folder / INFO).read_text())["features"]
        features["action"]["shape"] = shape
        edit(folder / INFO, features=features)

    return spoil


def _cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-200]) and None


def _gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _info(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / INFO, **values)


def _fewer_rows(folder: Path) -> None:
    rewrite(folder / DATA, lambda table: table.slice(0, 30))


def _wrong_start(folder: Path) -> None:
    rewrite(folder / EPISODES, lambda table: replaced(table, "dataset_from_index", [0, 9, 15, 28, 33]))


def _task_unknown(folder: Path) -> None:
    rewrite(folder / DATA, lambda table: replaced(table, "task_index", [7] * len(table)))


TRAPS = [
    (_column_gone, ("file-000.parquet", "next.reward", "meta/info.json")),
    (_column_more, ("file-000.parquet", "effort", "meta/info.json")),
    (_tasks_without_index, ("tasks.parquet", "pandas", "__index_level_0__")),
    (_tasks_out_of_order, ("tasks.parquet", "task_index", "[1, 0]")),
    (_rows_out_of_order, (1, 2, "frame_index", 3, "file-000.parquet")),
    (_episodes_out_of_order, ("meta/episodes/chunk-000/file-000.parquet", 1, 2)),
    (_late, (1, 4, "timestamp", "0.082000", 50, "0.080000")),
    (_nan, (0, 2, "action")),
    (_null, (0, 3, "next.reward")),
    (_unequal, (0, "action", "file-000.parquet", 3, "row 0", 2, "row 3")),
    (_cut_anew(pa.list_), (0, "action", "file-000.parquet", 3, "row 0", 2, "row 2")),
    (_cut_anew(pa.large_list), (0, "action", "file-000.parquet", 3, "row 0", 2, "row 2")),
    (_structures, (0, "action", "file-000.parquet", "struct<x: double>")),
    (_pandas(b"{"), ("tasks.parquet", "pandas", "(char 1)")),
    (_pandas(b"[]"), ("tasks.parquet", "pandas", "__index_level_0__")),
    (_lengths_as_texts, ("file-000.parquet", "length", "string")),
    (_shape("nine"), ("info.json", "action", "nine")),
    (_wide, (0, "action", "[7]", "[3]")),
    (_fewer_rows, ("/data", 30, 1, 41)),
    (_wrong_start, ("meta/episodes/chunk-000/file-000.parquet", 2, 15, 16)),
    (_task_unknown, (0, "task_index", 7, 2)),
    (_cut(DATA), ("data/chunk-000/file-000.parquet", "Parquet")),
    (_cut(EPISODES), ("meta/episodes/chunk-000/file-000.parquet", "Parquet")),
    (_cut(INFO), ("info.json", "char")),
    (_gone(DATA), ("/data", "chunk-*/*.parquet")),
    (_gone(EPISODES), ("meta/episodes", "chunk-*/*.parquet")),
    (_gone(TASKS), ("meta/tasks.parquet",)),
    (_info(codebase_version="v1.6"), ("info.json", "codebase_version", "v1.6", "v3.0", "v2.1")),
    (_info(fps=-1), ("info.json", "fps", -1)),
    (_info(features=None), ("info.json", "features", "dtype")),
    (_info(total_episodes=9), ("info.json", "total_episodes", 9, 5)),
    (_info(data_path="data/{nonsense}.parquet"), ("info.json", "data_path", "video_path", "nonsense")),
    (_info(fps=25), (0, 1, "timestamp", "0.020000", 25)),
]


@pytest.mark.parametrize(("spoil", "named"), TRAPS, ids=[" ".join(map(str, named))[:40] for _, named in TRAPS])
@pytest.mark.parametrize("kind", ["ours", "foreign"])
def test_spoilt(request: pytest.FixtureRequest, kind: str, spoil: Callable[[Path], None], named: tuple):
    folder = request.getfixturevalue(kind)
    spoil(folder)
    with pytest.raises(DataError, match=naming(*named)) as error:
        read(folder)
    assert str(error.value).startswith(str(folder))


def test_no_info(tmp_path: Path):
    with pytest.raises(DataError, match=naming(tmp_path, "meta/info.json")):
        open_episodes(tmp_path, ReadOptions(), "lerobot")


def test_changed_since_it_was_written(ours: Path):
    """Whoever removes episodes numbers the others anew: what lies beside them would be another episode's."""

    def change(table: pa.Table) -> pa.Table:
        return replaced(table, "action", pa.array(np.zeros((len(table), 3)).tolist(), pa.list_(pa.float32())))

    rewrite(ours / DATA, change)
    with pytest.raises(DataError, match=naming(0, "meta/serl_chunk.parquet", "changed")):
        read(ours)
    (ours / SIDE).unlink()
    assert len(read(ours)) == 5


def test_a_data_set_without_conditions_is_read(ours: Path):
    assert {e.begin.conditions for e in read(ours)} == {'{"profile": "p"}'}
    rewrite(ours / SIDE, lambda table: table.drop_columns(["conditions"]), row_group_size=16)
    assert {e.begin.conditions for e in read(ours)} == {""}


def test_partial_interventions_are_beside_where_there_are_some(ours: Path, tmp_path: Path, assert_same):
    assert "human_dims" not in pq.read_schema(ours / SIDE).names
    episodes = several()
    episodes[1] = shared(episodes[1], 2, 6)
    folder = write(LeRobotSink(tmp_path / "shared"), episodes)
    assert pq.read_schema(folder / SIDE).names[-1] == "human_dims"
    found = read(folder)
    for wanted, got in zip(episodes, found, strict=True):
        assert_same(wanted, decode_images(got))
    assert found[1].steps.sparse["human_dims"].values.tolist() == [[0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ticks": [2, 99]}, ("human_dims", 99, 7)),
        ({"ticks": [2]}, ("human_dims", 2)),
        ({"data": b"\0\1\0\0\1"}, (3,)),
        ({"data": bytes(6)}, ("human_dims", "tick 2", "[0, 0, 0]")),
        ({"data": None}, ("NoneType",)),
    ],
)
def test_a_damaged_partial_intervention_is_named(tmp_path: Path, change: dict[str, Any], named: tuple):
    def damage(table: pa.Table) -> pa.Table:
        rows = table.column("human_dims").to_pylist()
        rows[1] = rows[1] | change
        return replaced(table, "human_dims", pa.array(rows, table.schema.field("human_dims").type))

    episodes = several()
    folder = write(LeRobotSink(tmp_path / "shared"), [episodes[0], shared(episodes[1], 2, 6)])
    rewrite(folder / SIDE, damage, row_group_size=16)
    with pytest.raises(DataError, match=naming(1, *named)):
        read(folder)


def test_what_lies_beside_is_damaged(ours: Path):
    rewrite(ours / SIDE, lambda table: table.take([1, 0, 2, 3, 4]), row_group_size=16)
    with pytest.raises(DataError, match=naming(0, "meta/serl_chunk.parquet", 1)):
        read(ours)
    rewrite(ours / SIDE, lambda table: table.drop_columns(["outcome"]).take([1, 0, 2, 3, 4]), row_group_size=16)
    with pytest.raises(DataError, match=naming(0, "meta/serl_chunk.parquet", "outcome")):
        read(ours)


def _with(name: str, **values: Any) -> Callable[[pa.Table], pa.Table]:
    """Change the first entry of a column of lists of structures, in row 1."""

    def change(table: pa.Table) -> pa.Table:
        rows = table.column(name).to_pylist()
        rows[1] = [{**(rows[1] or [DECISION])[0], **values}]
        return replaced(table, name, pa.array(rows, table.schema.field(name).type))

    return change


DECISION = {"name": "x", "dtype": "<f4", "shape": [1], "ticks": [0], "data": b"\0\0\0\0"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_with("image_ticks", ticks=[2, 99]), ("top", 99, 7)),
        (_with("image_ticks", ticks=[-1, 5]), ("top", -1, 7)),
        (_with("decisions", ticks=[7]), ("x", 7)),
        (_with("decisions", dtype="O"), ("decision/x", "object")),
        (_with("decisions", dtype="nonsense"), ("nonsense",)),
        (_with("decisions", shape=[2]), ("(2,)",)),
        (_with("decisions", data=None), ("NoneType",)),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_an_episode_beside_is_damaged(ours: Path, change: Callable[[pa.Table], pa.Table], named: tuple):
    rewrite(ours / SIDE, change, row_group_size=16)
    with pytest.raises(DataError, match=naming(1, "meta/serl_chunk.parquet", *named)):
        read(ours)


class TestImages:
    """Frames that are not what the data set says."""

    def spoil(self, folder: Path, row: dict[str, Any]) -> Any:
        def change(table: pa.Table) -> pa.Table:
            rows = table.column("observation.images.top").to_pylist()
            rows[2] = row
            return replaced(table, "observation.images.top", rows)

        rewrite(folder / DATA, change)
        return read(folder)[0].steps.sparse["images/top"].values

    def test_elsewhere(self, foreign: Path):
        frames = self.spoil(foreign, {"bytes": None, "path": "images/frame_000002.png"})
        assert frames[1].shape == (HEIGHT, WIDTH, 3)
        with pytest.raises(DataError, match=naming(0, 2, "observation.images.top", "bytes")):
            frames[2]

    def test_damaged(self, foreign: Path):
        frames = self.spoil(foreign, {"bytes": b"\xff\xd8\xff\xe0 not an image", "path": None})
        with pytest.raises(DataError, match=naming(0, 2, "JPEG", "PNG")):
            frames[2]
        with pytest.raises(DataError, match=naming(0, 2, "JPEG", "PNG")):
            frames.encoded(2)

    def test_of_another_size(self, foreign: Path):
        out = io.BytesIO()
        Image.fromarray(smooth(0, 0, 8, 8)).save(out, "PNG")
        frames = self.spoil(foreign, {"bytes": out.getvalue(), "path": None})
        for look in (frames.__getitem__, frames.encoded):
            with pytest.raises(DataError, match=naming(2, "8x8", f"{HEIGHT}x{WIDTH}")):
                look(2)


class TestVideos:
    """Videos that are not what the data set says."""

    VIDEO = "videos/observation.images.top/chunk-000/file-000.mp4"

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write(LeRobotSink(tmp_path, mode="video"), [episode_of(0, 6), episode_of(1, 6)])

    def test_gone(self, folder: Path):
        (folder / self.VIDEO).unlink()
        with pytest.raises(DataError, match=naming(0, "file-000.mp4", "cameras")):
            read(folder)
        assert len(read(folder, cameras=("wrist",))) == 2

    def test_truncated(self, folder: Path):
        video = folder / self.VIDEO
        video.write_bytes(video.read_bytes()[:-300])
        frames = read(folder)[1].steps.sparse["images/top"].values
        with pytest.raises(DataError, match=naming(1, 3, "file-000.mp4", "0.1800")):
            frames[3]

    def test_too_short(self, folder: Path):
        rewrite(folder / EPISODES, lambda t: replaced(t, "videos/observation.images.top/from_timestamp", [0.0, 0.16]))
        frames = read(folder)[1].steps.sparse["images/top"].values
        with pytest.raises(DataError, match=naming(1, 4, "file-000.mp4", "0.2400")):
            frames[4]

    def test_times_that_do_not_agree(self, folder: Path):
        rewrite(folder / EPISODES, lambda t: replaced(t, "videos/observation.images.top/from_timestamp", [0.0, 0.115]))
        frames = read(folder)[1].steps.sparse["images/top"].values
        with pytest.raises(DataError, match=naming("file-000.mp4", "0.1150", "0.1200")):
            frames[0]

    def test_of_another_size(self, folder: Path):
        features = json.loads((folder / INFO).read_text())["features"]
        features["observation.images.top"]["shape"] = [8, 8, 3]
        edit(folder / INFO, features=features)
        (folder / SIDE).unlink()
        with pytest.raises(DataError, match=naming("16x24", "meta/info.json", "8x8")):
            read(folder)

    def test_times_that_nothing_says(self, folder: Path):
        """Without a rate every step would get the video's first frame."""
        wanted = [decode_images(e).steps.sparse["images/top"].values for e in read(folder)]
        (folder / SIDE).unlink()
        drop(folder, "timestamp")
        edit(folder / INFO, fps=None)
        with pytest.raises(DataError, match=naming(0, "timestamp", "fps", "hz")):
            read(folder)
        assert len(read(folder, cameras=())) == 2
        for before, episode in zip(wanted, read(folder, hz=HZ), strict=True):
            assert (decode_images(episode).steps.sparse["images/top"].values == before[: episode.steps.n]).all()

    def test_columns_of_the_table_of_episodes(self, folder: Path):
        rewrite(folder / EPISODES, lambda t: t.drop_columns(["videos/observation.images.top/from_timestamp"]))
        with pytest.raises(DataError, match=naming("videos/observation.images.top/from_timestamp")):
            read(folder)


class TestVersion21:
    """Files of the older version."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = write(LeRobotSink(tmp_path, "v2.1"), several())
        (folder / SIDE).unlink()
        return folder

    def test_read(self, folder: Path):
        found = read(folder)
        assert [e.begin.task for e in found] == [e.begin.task for e in several()]
        assert found[1].end.outcome is Outcome.SUCCESS

    @pytest.mark.parametrize(
        ("name", "text", "named"),
        [
            ("tasks", '{"task_index": 1, "task": "a"}', ("tasks.jsonl", 0)),
            ("tasks", "{", ("tasks.jsonl", 1, "task_index", "task")),
            ("episodes", '{"episode_index": 1, "length": 4}', ("episodes.jsonl", 0)),
            ("episodes", '{"episode_index": 0, "length": "nine"}', ("episodes.jsonl", 1, "length", "nine")),
            ("episodes", '{"episode_index": 0, "length": 0}', ("episodes.jsonl", 1, "length", 0)),
            ("tasks", '{"task_index": [0], "task": "a"}', ("tasks.jsonl", 0)),
            ("episodes", '{"episode_index": 0}', ("episodes.jsonl", 1, "episode_index", "length")),
        ],
    )
    def test_lines(self, folder: Path, name: str, text: str, named: tuple):
        (folder / f"meta/{name}.jsonl").write_text(text + "\n")
        with pytest.raises(DataError, match=naming(*named)):
            read(folder)

    def test_a_file_gone(self, folder: Path):
        (folder / "data/chunk-000/episode_000002.parquet").unlink()
        with pytest.raises(DataError, match=naming(2, "episode_000002.parquet")):
            read(folder)

    def test_a_file_too_short(self, folder: Path):
        rewrite(folder / "data/chunk-000/episode_000002.parquet", lambda table: table.slice(0, 5))
        with pytest.raises(DataError, match=naming("episode_000002.parquet", 5, "meta/episodes.jsonl", 12)):
            read(folder)
