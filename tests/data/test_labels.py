"""`labels.json`: what it changes in the episodes that every reader gives, and every way in which it may be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import lerobot_sets
import numpy as np
import pytest
from errors import naming

from serl_chunk.data.demos import NoDemosFoundError, load_demos
from serl_chunk.data.formats import open_episodes
from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.data.labels import FILE, as_recorded, correction, write_label
from serl_chunk.data.lerobot.writer import LeRobotSink
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import DataError, End, Outcome

NAMES = [f"episode_{i}.hdf5" for i in range(3)]


@pytest.fixture
def folder(tmp_path, spec, make_episode) -> Path:
    """Three HDF5 episodes: a success at its last step, one that ran out of time, a failure."""
    for i, outcome in enumerate((Outcome.SUCCESS, Outcome.UNKNOWN, Outcome.FAILURE)):
        episode = make_episode(spec, 10, seed=i, success_at=(9,) if i == 0 else ())
        end = episode.end._replace(outcome=outcome, terminated=i != 1, truncated=i == 1, outcome_by="environment")
        write_episode(tmp_path / NAMES[i], episode._replace(end=end), spec)
    return tmp_path


def label(folder: Path, key: str, text: str | None) -> None:
    write_label(folder, key, text, read_episode(folder / key))


def loaded(folder: Path, spec, **options) -> dict:
    demos = load_demos([folder], spec, options=ReadOptions(**options))
    return {origin.key: episode for origin, episode in zip(demos.origins, demos.episodes, strict=True)}


def test_demonstrations_have_the_labels_outcomes(folder, spec):
    before, digests = loaded(folder, spec)[NAMES[0]], [load_demos([folder], spec).digest]
    for key, text in zip(NAMES, ("failure", "success", "discard"), strict=True):
        label(folder, key, text)
        digests.append(load_demos([folder], spec).digest)
    assert len(set(digests)) == 4
    stored = json.loads((folder / FILE).read_text())["labels"]
    assert [stored[key]["label"] for key in NAMES] == ["failure", "success", "discard"]
    assert sorted(p.name for p in folder.iterdir()) == [*NAMES, FILE]
    found = loaded(folder, spec)
    assert list(found) == NAMES[:2]
    failed, succeeded = found[NAMES[0]], found[NAMES[1]]
    assert (failed.end.outcome, failed.end.outcome_by, failed.end.terminated) == (Outcome.FAILURE, "operator", True)
    assert (failed.steps.n, failed.end.reward, failed.steps.reward.max() < 1) == (10, 0, True)
    assert (succeeded.end.outcome, succeeded.end.terminated, succeeded.end.reward) == (Outcome.SUCCESS, True, 1)
    assert list(loaded(folder, spec, labels=False)) == NAMES
    source = open_episodes(folder, ReadOptions(spec=spec))  # applies them and counts them
    assert source.keys() == NAMES[:2]
    assert source.read(NAMES[0]).end.outcome is Outcome.FAILURE
    assert [note.split()[0] for note in source.notes() if FILE in note] == ["2", "1"]
    for key in NAMES:
        label(folder, key, None)  # taken back: as recorded
    assert load_demos([folder], spec).digest == digests[0]
    after = loaded(folder, spec)[NAMES[0]]
    assert after.end._replace(final_observation=None) == before.end._replace(final_observation=None)
    np.testing.assert_array_equal(after.steps.reward, before.steps.reward)


def test_labels_lie_next_to_their_files_and_may_discard_all_of_a_folder(folder, spec):
    (folder / "score_5").mkdir()
    shutil.copy(folder / NAMES[1], folder / "score_5" / "x.hdf5")
    label(folder / "score_5", "x.hdf5", "success")
    source = open_episodes(folder, ReadOptions(spec=spec))
    assert source.read("score_5/x.hdf5").end.outcome is Outcome.SUCCESS
    assert source.read(NAMES[1]).end.outcome is Outcome.UNKNOWN
    (folder / NAMES[0]).write_bytes(b"no HDF5")
    write_label(folder, NAMES[0], "discard", None)
    assert list(loaded(folder, spec)) == NAMES[1:]
    for name in NAMES[1:]:
        label(folder, name, "discard")
    with pytest.raises(NoDemosFoundError, match=naming(FILE)):
        load_demos([folder], spec)


def test_a_file_that_was_recorded_again_has_no_label(folder, spec, make_episode):
    label(folder, NAMES[0], "failure")
    label(folder, NAMES[1], "discard")
    write_episode(folder / NAMES[0], make_episode(spec, 10, seed=7), spec)
    with pytest.raises(DataError, match=naming(folder / NAMES[0], FILE)):
        loaded(folder, spec)
    write_episode(folder / NAMES[1], make_episode(spec, 10, seed=8), spec)
    with pytest.raises(DataError, match=naming(NAMES[1], FILE)):
        open_episodes(folder, ReadOptions(spec=spec)).keys()


def test_lerobot_episodes_are_labelled_by_their_index(tmp_path):
    lerobot_sets.write(LeRobotSink(tmp_path / "set"), [lerobot_sets.episode_of(k, 6) for k in range(3)])
    source = open_episodes(tmp_path / "set", ReadOptions())
    for key, text in (("episode_000001", "failure"), ("episode_000000", "discard")):
        write_label(source.path, key, text, source.read(key))
    source = open_episodes(tmp_path / "set", ReadOptions())
    ends = {key: source.read(key).end for key in source.keys()}
    assert {key: end.outcome for key, end in ends.items()} == {
        "episode_000001": Outcome.FAILURE,
        "episode_000002": Outcome.SUCCESS,
    }
    assert ends["episode_000001"].reward == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "damaged"),
        ('{"format": 1}', "labels"),
        ('{"format": 2, "labels": {}}', 2),
        ('{"format": 1, "labels": {"episode_0.hdf5": "failure"}}', "episode_0.hdf5"),
        ('{"format": 1, "labels": {"episode_0.hdf5": {"label": "good"}}}', "good"),
        ('{"format": 1, "labels": {"episode_0.hdf5": {"label": "failure", "steps": "9"}}}', "steps='9'"),
    ],
)
def test_a_damaged_file_is_an_error_for_readers_and_is_not_overwritten(folder, spec, text, named):
    path = folder / FILE
    path.write_text(text)
    for action in (lambda: loaded(folder, spec), lambda: label(folder, NAMES[0], "failure")):
        with pytest.raises(DataError, match=naming(path, named)):
            action()
    assert path.read_text() == text
    path.unlink()
    path.mkdir()  # cannot be written
    with pytest.raises(DataError, match=naming(path)):
        label(folder, NAMES[0], "failure")


@pytest.mark.parametrize(
    ("label", "terminated", "reward", "expected"),
    [
        ("success", False, 0.0, (Outcome.SUCCESS, True, 1.0)),
        ("success", True, 3.0, (Outcome.SUCCESS, True, 3.0)),
        ("failure", False, 0.0, (Outcome.FAILURE, False, 0.0)),
        ("failure", True, 1.0, (Outcome.FAILURE, True, 0.0)),
        ("failure", False, -0.5, (Outcome.FAILURE, False, -0.5)),
    ],
)
def test_what_a_label_means(label, terminated, reward, expected):
    end = End("e", 5, None, terminated, not terminated, Outcome.UNKNOWN, "environment")
    amended = correction(label, end, reward).correct(end)
    assert (amended.outcome, amended.terminated, amended.reward) == expected
    assert amended.truncated is not amended.terminated
    back = as_recorded(end, reward).correct(amended)
    assert back == end._replace(reward=reward)
