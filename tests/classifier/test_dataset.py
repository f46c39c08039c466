"""Labels of frames, episodes of several sources, and the split by episode."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from classifier_sets import CAMERAS, episode, toy
from errors import naming
from journal_runs import Run

from serl_chunk.classifier.dataset import (
    CLASSES,
    IGNORED,
    LABELS,
    Labelled,
    Labelling,
    camera_specs,
    frames_by_class,
    is_classifier_data,
    joined,
    read_classifier_data,
    read_source,
    split,
)
from serl_chunk.data.formats import open_episodes
from serl_chunk.data.formats.hdf5 import write_episode
from serl_chunk.data.source import ReadOptions
from serl_chunk.runs.episodes import RunSource
from serl_chunk.types import (
    IMAGE_PREFIX,
    STATE,
    Amend,
    Begin,
    CameraSpec,
    ConfigError,
    DataError,
    End,
    Episode,
    Outcome,
    RobotSpec,
    Source,
    Step,
    StepBlock,
)

N = 8
SPEC = RobotSpec("r", 10.0, 2, (-1.0,), (1.0,), (-1,), (), (CameraSpec("top", 4, 6), CameraSpec("side", 4, 4)), 50)


def recorded(number: int, outcome: Outcome, *, every: int = 1) -> Episode:
    """Frames show their tick; the side camera has one on every `every`-th step, the end record has both."""

    def look(tick: int, side: bool = True):
        images = {IMAGE_PREFIX + "top": np.full((4, 6, 3), 10 * number + tick, np.uint8)}
        images |= {IMAGE_PREFIX + "side": np.full((4, 4, 3), 100 + tick, np.uint8)} if side else {}
        return {STATE: np.array([number, tick], np.float32), **images}

    name, success = f"e{number}", outcome is Outcome.SUCCESS
    steps = [
        Step(
            t, look(t, t % every == 0), np.zeros(1, np.float32), float(success and t == N - 1), Source.HUMAN, -1, -1, t
        )
        for t in range(N)
    ]
    end = End(name, N, look(N), success, not success, outcome)
    return Episode(Begin(name, robot="r"), StepBlock.from_steps(name, steps), end)


@pytest.fixture
def folder(tmp_path) -> Path:
    for i, outcome in enumerate((Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN)):
        write_episode(tmp_path / f"episode_{i}.hdf5", recorded(i, outcome, every=2), SPEC)
    return tmp_path


def read(path: Path, cameras=("top",), labelling=None, known=None) -> Labelled:
    source = open_episodes(path, ReadOptions(cameras=cameras))
    return read_source(source, cameras, labelling or Labelling(), set() if known is None else known)


def test_the_last_frames_of_a_success_are_positive_and_those_before_them_of_no_class(folder):
    success, failure, unknown = read(folder, labelling=Labelling(2, 3)).episodes
    assert success.labels.tolist() == [0, 0, 0, 0, IGNORED, IGNORED, IGNORED, 1, 1]
    assert success.ticks.tolist() == list(range(N + 1))
    assert success.images["top"][:, 0, 0, 0].tolist() == list(range(N + 1))  # the end record's frame is the last
    assert failure.labels.tolist() == unknown.labels.tolist() == [0] * (N + 1)


def test_an_unknown_outcome_is_reported(folder):
    (note,) = read(folder).notes
    assert "1 episode of unknown outcome" in note


def test_frames_are_of_the_ticks_on_which_all_cameras_have_one(folder):
    first = read(folder, ("top", "side")).episodes[0]
    assert first.ticks.tolist() == [0, 2, 4, 6, N]
    assert first.images["top"][:, 0, 0, 0].tolist() == [0, 2, 4, 6, N]
    assert first.images["side"][:, 0, 0, 0].tolist() == [100, 102, 104, 106, 100 + N]


def test_a_camera_without_frames_is_named(folder):
    file = folder / "episode_0.hdf5"
    with pytest.raises((DataError, ConfigError), match=naming("belly", "side, top")):
        read(file, ("belly",))


def test_an_episode_that_was_read_before_is_left_out(folder):
    known: set[str] = set()
    read(folder, known=known)
    again = read(folder / "episode_1.hdf5", known=known)
    assert not again.episodes
    assert "1 episode" in again.notes[0]


def test_frame_labels_replace_the_outcome(folder):
    keys = open_episodes(folder, ReadOptions()).keys()
    ranges = [[0, 3, "far"], [3, 6, "near"], [7, 9, "in"]]
    (folder / LABELS).write_text(json.dumps({"classes": ["far", "near", "in"], "episodes": {keys[1]: ranges}}))
    data = read(folder)
    assert data.classes == ("far", "near", "in")
    assert data.episodes[1].labels.tolist() == [0, 0, 0, 1, 1, 1, IGNORED, 2, 2]
    assert data.episodes[0].labels[-1] == data.success_class == 2
    assert data.count(positive=True) == 3


@pytest.mark.parametrize(
    "saved",
    [
        [], {"classes": ["a"], "episodes": {}}, {"classes": ["a", "a"], "episodes": {}}, {"classes": ["a", "b"]},
        {"classes": ["a", "b"], "episodes": {"KEY": [[3, 3, "a"]]}},
        {"classes": ["a", "b"], "episodes": {"KEY": [[0, 3, "c"]]}},
        {"classes": ["a", "b"], "episodes": {"KEY": [[0, 3]]}},
        {"classes": ["a", "b"], "episodes": {"episode_99": [[0, 3, "b"]]}},
    ],
)  # fmt: skip
def test_frame_labels_that_are_refused(folder, saved):
    key = open_episodes(folder, ReadOptions()).keys()[0]
    (folder / LABELS).write_text(json.dumps(saved).replace("KEY", key))
    with pytest.raises(DataError, match=naming(LABELS)):
        read(folder)


def transition(state: float, after: float, value: int, done: bool = False):
    image = np.full((1, 4, 4, 3), value, np.uint8)
    observations = ({"state": np.full((1, 2), s, np.float32), "left/side": image} for s in (state, after))
    return {
        "observations": next(observations), "next_observations": next(observations),
        "actions": np.zeros(1, np.float32), "rewards": 0.0, "masks": 1.0 - done, "dones": done,
    }  # fmt: skip


@pytest.fixture
def classifier_data(tmp_path) -> Path:
    """Two episodes, in both files: states 0 to 4 with success at 2 and 3, and 10 to 12 with success at 12."""
    failures = [transition(0, 1, 0), transition(1, 2, 1), transition(4, 5, 4, done=True), transition(10, 11, 10),
                transition(11, 12, 11)]  # fmt: skip
    successes = [transition(2, 3, 2), transition(3, 4, 3), transition(12, 0, 12, done=True)]
    for name, rows in (("task_3_success_images_1.pkl", successes), ("task_5_failure_images_1.pkl", failures)):
        (tmp_path / name).write_bytes(pickle.dumps(rows))
    return tmp_path


def test_hil_serl_pickles_are_joined_to_episodes(classifier_data):
    assert is_classifier_data(classifier_data)
    data = read_classifier_data(classifier_data, ["left_side"])
    found = {tuple(e.images["left_side"][:, 0, 0, 0].tolist()): e.labels.tolist() for e in data.episodes}
    assert found == {(0, 1, 2, 3, 4): [0, 0, 1, 1, 0], (10, 11, 12): [0, 0, 1]}  # done ends one, though state 0 follows
    assert data.classes == CLASSES


def test_hil_serl_channels_may_be_swapped(classifier_data):
    file = next(classifier_data.glob("*failure*"))
    row = transition(0, 1, 0)
    row["observations"]["left/side"][..., 2] = 9
    file.write_bytes(pickle.dumps([row]))
    swapped = read_classifier_data(file, ["left_side"], bgr=True).episodes[0]
    assert swapped.images["left_side"][0, 0, 0].tolist() == [9, 0, 0]


def test_hil_serl_camera_that_is_missing(classifier_data):
    with pytest.raises(DataError, match=naming("wrist", "left_side")):
        read_classifier_data(classifier_data, ["wrist"])


def test_other_pickles_are_no_classifier_data(tmp_path):
    (tmp_path / "task_20_demos_1.pkl").write_bytes(pickle.dumps([transition(0, 1, 0)]))
    assert not is_classifier_data(tmp_path)
    assert not is_classifier_data(tmp_path / "missing")


def test_a_pickle_with_code_is_refused(tmp_path):
    class Harm:
        def __reduce__(self):
            return (print, ("harm",))

    file = tmp_path / "a_success_images.pkl"
    file.write_bytes(pickle.dumps([Harm()]))
    with pytest.raises(DataError, match=naming(file.name)):
        read_classifier_data(file, ["top"])


def test_the_split_is_by_episode_and_of_both_kinds():
    data = toy(20)
    train, held = split(data, 0.2, seed=3)
    names = [{e.name for e in part.episodes} for part in (train, held)]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {e.name for e in data.episodes}
    for part, count in ((train, 8), (held, 2)):
        kinds = [bool(e.labels.any()) for e in part.episodes]
        assert (sum(kinds), len(kinds) - sum(kinds)) == (count, count)
    assert {e.name for e in split(data, 0.2, seed=4)[1].episodes} != names[1]
    assert all(part.count(positive=True) for part in split(toy(4), 0.99, seed=0))  # one of each kind stays


def test_too_few_episodes_to_split():
    one = toy(2)
    with pytest.raises(ConfigError, match=naming("1 episode of 2")):
        split(one, 0.2, 0)
    all_success = Labelled([all_positive(e) for e in toy(6).episodes], CLASSES, [])
    with pytest.raises(ConfigError):
        split(all_success, 0.2, 0)


def all_positive(e):
    return e._replace(labels=np.ones_like(e.labels))


def test_a_class_without_frames_is_named():
    with pytest.raises(ConfigError, match=naming("success")):
        frames_by_class(Labelled([episode(1, False)], CLASSES, []))
    rows = frames_by_class(toy(2))
    assert [len(r) for r in rows] == [20, 4]
    assert rows[1] == [(0, 8), (0, 9), (0, 10), (0, 11)]


def test_sets_of_other_classes_are_not_joined():
    two, three = toy(2), toy(2)._replace(classes=("a", "b", "c"))
    assert joined([two, three]).classes == ("a", "b", "c")
    assert joined([two, three]).episodes[0].labels.max() == 2  # the success
    with pytest.raises(DataError, match=naming("a, b, c", "c, b, a")):
        joined([three, three._replace(classes=("c", "b", "a"))])


def test_frames_of_another_size_are_refused():
    data = toy(2)
    assert camera_specs(data.episodes, CAMERAS) == (CameraSpec("top", 16, 16), CameraSpec("wrist", 16, 16))
    small = data.episodes[1]._replace(images={c: np.zeros((2, 8, 8, 3), np.uint8) for c in CAMERAS}, name="small")
    with pytest.raises(DataError, match=naming("small", "top", "8x8")):
        camera_specs([data.episodes[0], small], CAMERAS)


def test_a_corrected_outcome_of_a_run_is_the_label(tmp_path):
    run = Run(tmp_path / "run", SPEC)
    with run.opened():
        for number in range(2):
            begin, steps, end = recorded(number, Outcome.SUCCESS)
            for record in (begin, steps, end):
                run.put("s", record)
        run.put("s", Amend("e1", Outcome.FAILURE, "operator", terminated=False, reward=0.0))
    data = read_source(RunSource(run.path, ReadOptions(cameras=("top",))), ("top",), Labelling(), set())
    assert [bool(e.labels.any(where=e.labels != IGNORED)) for e in data.episodes] == [True, False]
    assert data.episodes[1].labels.tolist() == [0] * (N + 1)
    assert [e.corrected for e in data.episodes] == [0, 6]  # its last frames are hard negatives


def test_frames_on_which_the_condition_does_not_hold_are_left_out(folder):
    def of(condition) -> Labelled:
        source = open_episodes(folder, ReadOptions(cameras=("top", "side")))
        return read_source(source, ("top", "side"), Labelling(), set(), condition)

    seen = []
    data = of(lambda observation: seen.append(set(observation)) or observation[STATE][1] >= 3)
    assert all(names == {STATE} for names in seen)
    assert [e.ticks.tolist() for e in data.episodes] == [[4, 6, N]] * 3
    assert data.episodes[0].images["side"][:, 0, 0, 0].tolist() == [104, 106, 100 + N]
    assert data.episodes[0].labels.tolist() == [IGNORED, IGNORED, 1]
    none = of(lambda observation: observation[STATE][0] == 1)  # the second episode alone
    assert [e.ticks.tolist() for e in none.episodes] == [[0, 2, 4, 6, N]]
    assert any("2 episodes without a frame on which the condition holds" in note for note in none.notes)


def test_a_camera_of_the_classifier_alone_has_its_last_frame(tmp_path):
    run = Run(tmp_path / "run", SPEC)
    begin, steps, end = recorded(0, Outcome.SUCCESS)
    sparse = {k: v for k, v in steps.sparse.items() if "side" not in k}
    with run.opened():
        for record in (begin, dataclasses.replace(steps, sparse=sparse), end):
            run.put("s", record)
    cameras = ("top", "side")
    data = read_source(RunSource(run.path, ReadOptions(cameras=cameras)), cameras, Labelling(), set())
    assert data.episodes[0].ticks.tolist() == [N]
    assert data.episodes[0].images["side"][:, 0, 0, 0].tolist() == [100 + N]
    assert data.episodes[0].labels.tolist() == [1]


def test_an_episode_that_a_stop_ended_lacks_the_frames_of_a_camera_of_the_classifier_alone(tmp_path):
    cameras = ("top", "side")

    def read_run(name: str, stopped: tuple[bool, ...]) -> Labelled:
        run = Run(tmp_path / name, SPEC)
        with run.opened():
            for number, by_stop in enumerate(stopped):
                begin, steps, end = recorded(number, Outcome.UNKNOWN if by_stop else Outcome.SUCCESS)
                sparse = {k: v for k, v in steps.sparse.items() if "side" not in k}
                if by_stop:
                    final = {k: v for k, v in end.final_observation.items() if "side" not in k}
                    end = end._replace(final_observation=final)
                for record in (begin, dataclasses.replace(steps, sparse=sparse), end):
                    run.put("s", record)
        return read_source(RunSource(run.path, ReadOptions(cameras=cameras)), cameras, Labelling(), set())

    data = read_run("one", (True, False))
    assert [(e.name.rpartition("/")[2], e.labels.tolist()) for e in data.episodes] == [("e1", [1])]
    (note,) = data.notes
    assert "1 episode without frames of side, left out" in note
    with pytest.raises(DataError, match=naming("e0", "no frames of camera 'side'", "it has: top")):
        read_run("all", (True, True))
