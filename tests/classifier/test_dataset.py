"""Labels of frames, episodes of several sources, and the split by episode."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from classifier_sets import CAMERAS, episode, toy
from data_sets import pickled
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
from serl_chunk.data.formats.hdf5 import write_episode
from serl_chunk.data.paths import open_episodes
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
    rewards = [float(success and t == N - 1) for t in range(N)]
    steps = [
        Step(t, look(t, t % every == 0), np.zeros(1, np.float32), reward, Source.HUMAN, -1, -1, t)
        for t, reward in enumerate(rewards)
    ]
    end = End(name, N, look(N), success, not success, outcome)
    return Episode(Begin(name, robot="r"), StepBlock.from_steps(name, steps), end)


@pytest.fixture
def folder(tmp_path) -> Path:
    for i, outcome in enumerate((Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN)):
        write_episode(tmp_path / f"episode_{i}.hdf5", recorded(i, outcome, every=2), SPEC)
    return tmp_path


def read(path: Path, cameras=("top",), labelling=None, known=None, condition=None) -> Labelled:
    source = open_episodes(path, ReadOptions(cameras=cameras))
    known = set() if known is None else known
    return read_source(source, cameras, labelling or Labelling(), known, *([condition] if condition else []))


def shown(episode, camera: str) -> list[int]:
    return episode.images[camera][:, 0, 0, 0].tolist()


def test_the_last_frames_of_a_success_are_positive_and_those_before_them_of_no_class(folder):
    known: set[str] = set()
    data = read(folder, labelling=Labelling(2, 3), known=known)
    success, failure, unknown = data.episodes
    assert success.labels.tolist() == [0, 0, 0, 0, IGNORED, IGNORED, IGNORED, 1, 1]
    assert success.ticks.tolist() == shown(success, "top") == list(range(N + 1))  # the end record's frame is the last
    assert failure.labels.tolist() == unknown.labels.tolist() == [0] * (N + 1)
    assert not read(folder / "episode_1.hdf5", known=known).episodes  # was read before
    first = read(folder, ("top", "side")).episodes[0]  # of the ticks on which all cameras have a frame
    assert first.ticks.tolist() == shown(first, "top") == [0, 2, 4, 6, N]
    assert shown(first, "side") == [100, 102, 104, 106, 100 + N]
    with pytest.raises((DataError, ConfigError), match=naming("belly", "side, top")):
        read(folder / "episode_0.hdf5", ("belly",))


def test_frame_labels_replace_the_outcome(folder):
    keys = open_episodes(folder, ReadOptions()).keys()
    ranges = [[0, 3, "far"], [3, 6, "near"], [7, 9, "in"]]
    (folder / LABELS).write_text(json.dumps({"classes": ["far", "near", "in"], "episodes": {keys[1]: ranges}}))
    data = read(folder)
    assert data.classes == ("far", "near", "in")
    assert data.episodes[1].labels.tolist() == [0, 0, 0, 1, 1, 1, IGNORED, 2, 2]
    assert data.episodes[0].labels[-1] == data.success_class == 2
    assert data.count(positive=True) == 3
    two = {"classes": ["a", "b"]}
    for saved in (
        [],
        {"classes": ["a", "a"], "episodes": {}},
        two,
        *({**two, "episodes": {keys[0]: [labels]}} for labels in ([3, 3, "a"], [0, 3, "c"], [0, 3])),
        {**two, "episodes": {"episode_99": [[0, 3, "b"]]}},
    ):
        (folder / LABELS).write_text(json.dumps(saved))
        with pytest.raises(DataError, match=naming(LABELS)):
            read(folder)


def transition(state: float, after: float, value: int, done: bool = False):
    image = np.full((1, 4, 4, 3), value, np.uint8)
    observations = ({"state": np.full((1, 2), s, np.float32), "left/side": image} for s in (state, after))
    return {
        "observations": next(observations), "next_observations": next(observations),
        "actions": np.zeros(1, np.float32), "rewards": 0.0, "masks": 1.0 - done, "dones": done,
    }  # fmt: skip


def test_hil_serl_pickles_are_joined_to_episodes(tmp_path):
    """Two episodes, in both files: states 0 to 4 with success at 2 and 3, and 10 to 12 with success at 12."""
    failures = [transition(0, 1, 0), transition(1, 2, 1), transition(4, 5, 4, done=True), transition(10, 11, 10),
                transition(11, 12, 11)]  # fmt: skip
    successes = [transition(2, 3, 2), transition(3, 4, 3), transition(12, 0, 12, done=True)]
    assert not is_classifier_data(tmp_path)
    pickled(tmp_path / "task_3_success_images_1.pkl", successes)
    file = pickled(tmp_path / "task_5_failure_images_1.pkl", failures)
    assert is_classifier_data(tmp_path)
    data = read_classifier_data(tmp_path, ["left_side"])
    found = {tuple(shown(e, "left_side")): e.labels.tolist() for e in data.episodes}
    assert found == {(0, 1, 2, 3, 4): [0, 0, 1, 1, 0], (10, 11, 12): [0, 0, 1]}  # done ends one, though state 0 follows
    assert data.classes == CLASSES
    with pytest.raises(DataError, match=naming("wrist", "left_side")):
        read_classifier_data(tmp_path, ["wrist"])
    row = transition(0, 1, 0)
    row["observations"]["left/side"][..., 2] = 9
    swapped = read_classifier_data(pickled(file, [row]), ["left_side"], bgr=True).episodes[0]
    assert swapped.images["left_side"][0, 0, 0].tolist() == [9, 0, 0]
    with pytest.raises(DataError, match=naming(file.name)):
        read_classifier_data(pickled(file, [print]), ["top"])  # code is refused


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
    successes = [e._replace(labels=np.ones_like(e.labels)) for e in toy(6).episodes]
    for few, named in ((toy(2), "1 episode of 2"), (Labelled(successes, CLASSES, []), "frames without success")):
        with pytest.raises(ConfigError, match=naming(named)):
            split(few, 0.2, 0)


def test_sets_that_do_not_fit_are_refused():
    data = toy(2)
    with pytest.raises(ConfigError, match=naming("success")):
        frames_by_class(Labelled([episode(1, False)], CLASSES, []))
    rows = frames_by_class(data)
    assert (len(rows[0]), rows[1]) == (20, [(0, 8), (0, 9), (0, 10), (0, 11)])
    three = data._replace(classes=("a", "b", "c"))
    assert joined([data, three]).classes == ("a", "b", "c")
    assert joined([data, three]).episodes[0].labels.max() == 2  # the success
    with pytest.raises(DataError, match=naming("a, b, c", "c, b, a")):
        joined([three, three._replace(classes=("c", "b", "a"))])
    assert camera_specs(data.episodes, CAMERAS) == (CameraSpec("top", 16, 16), CameraSpec("wrist", 16, 16))
    small = data.episodes[1]._replace(images={c: np.zeros((2, 8, 8, 3), np.uint8) for c in CAMERAS}, name="small")
    with pytest.raises(DataError, match=naming("small", "top", "8x8")):
        camera_specs([data.episodes[0], small], CAMERAS)


def test_frames_on_which_the_condition_does_not_hold_are_left_out(folder):
    seen = []
    cameras = ("top", "side")
    data = read(folder, cameras, condition=lambda o: seen.append(set(o)) or o[STATE][1] >= 3)
    assert all(names == {STATE} for names in seen)
    assert [e.ticks.tolist() for e in data.episodes] == [[4, 6, N]] * 3
    assert shown(data.episodes[0], "side") == [104, 106, 100 + N]
    assert data.episodes[0].labels.tolist() == [IGNORED, IGNORED, 1]
    none = read(folder, cameras, condition=lambda o: o[STATE][0] == 1)  # the second episode alone
    assert [e.ticks.tolist() for e in none.episodes] == [[0, 2, 4, 6, N]]


def without_side(observation):
    return {k: v for k, v in observation.items() if "side" not in k}


def read_run(path: Path, *outcomes: Outcome, cameras=("top", "side")) -> Labelled:
    """Of a run whose side camera is the classifier's alone; a stop ended episodes of unknown outcome."""
    run = Run(path, SPEC)
    with run.opened():
        for number, outcome in enumerate(outcomes):
            begin, steps, end = recorded(number, outcome)
            if outcome is Outcome.UNKNOWN:
                end = end._replace(final_observation=without_side(end.final_observation))
            sparse = without_side(steps.sparse) if "side" in cameras else steps.sparse
            for record in (begin, dataclasses.replace(steps, sparse=sparse), end):
                run.put("s", record)
        if len(outcomes) == 3:
            run.put("s", Amend("e2", Outcome.FAILURE, "operator", terminated=False, reward=0.0))
    return read_source(RunSource(run.path, ReadOptions(cameras=cameras)), cameras, Labelling(), set())


def test_of_a_run_the_corrected_outcome_is_the_label_and_a_camera_of_the_classifier_alone_has_its_last_frame(tmp_path):
    success, unknown = Outcome.SUCCESS, Outcome.UNKNOWN
    data = read_run(tmp_path / "top", success, success, success, cameras=("top",))
    assert [bool(e.labels.any(where=e.labels != IGNORED)) for e in data.episodes] == [True, True, False]
    assert data.episodes[2].labels.tolist() == [0] * (N + 1)
    assert [e.corrected for e in data.episodes] == [0, 0, 6]  # its last frames are hard negatives
    data = read_run(tmp_path / "side", unknown, success)
    (found,), (note,) = data.episodes, data.notes
    assert (found.name.rpartition("/")[2], found.ticks.tolist(), found.labels.tolist()) == ("e1", [N], [1])
    assert shown(found, "side") == [100 + N]
    assert "1 episode without frames of side, left out" in note
    with pytest.raises(DataError, match=naming("e0", "no frames of camera 'side'", "it has: top")):
        read_run(tmp_path / "stopped", unknown, unknown)
