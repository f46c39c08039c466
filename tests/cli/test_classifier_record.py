"""Frames that a key labels while the robot moves: their files, and what the classifier's training reads of them."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from actor_helpers import HumanOnTicks, LineEnv, SimClock, make_config
from errors import naming
from full_disk import full_disk

from serl_chunk.classifier.dataset import LABELS, Labelling, read_source
from serl_chunk.classifier.files import read_description
from serl_chunk.cli import classifier_record as module
from serl_chunk.cli.classifier_record import LabelledFolder, run_record_labels
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.console.bindings import Action
from serl_chunk.data.formats import hdf5_writer
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.main import main
from serl_chunk.operator.operator import Operator
from serl_chunk.outcomes.classifier import Classifier
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.recording import labelled, recording
from serl_chunk.types import Amend, ConfigError, Outcome, Source

CAMERAS = ("front", "wrist")
LENGTH = 12  # ticks of an episode


class Keys:
    """A console: action -> (episode, tick) on which its key is pressed."""

    shown = None

    def __init__(self, env: LineEnv, pressed: dict[Action, list[tuple[int, int]]]) -> None:
        self.env, self.pressed = env, pressed
        self.questions: list[str] = []

    def actions(self):
        now = len(self.env.seeds) - 1, self.env.tick
        for action, moments in self.pressed.items():
            if now in moments:
                moments.remove(now)
                yield action

    def empty(self) -> None: ...

    def show(self, state) -> None:
        self.questions.append(state.question)


@pytest.fixture
def record(monkeypatch, tmp_path):
    def run(successes: int, failures: int, pressed=None, *, env=None):
        env = env or LineEnv(length=LENGTH, success_at=4)
        env.goes_on = True
        keys = Keys(env, pressed or {})
        monkeypatch.setattr(recording, "Clock", SimClock)
        monkeypatch.setattr(module, "make_env", lambda robot: env)
        monkeypatch.setattr(module, "open_human", lambda *a: HumanOnTicks(range(3, 9)))
        monkeypatch.setattr(module, "spec_of", lambda config: env.robot_spec)

        @contextlib.contextmanager
        def console_of(config, name, *, amend, end, takes, simulated):
            assert simulated
            now = lambda: 0.02 * env.tick  # noqa: E731
            more = {"now": now, "countdown": 0.0, "pause": lambda seconds: None, "takes": takes}
            yield Operator(keys, None, amend=amend, end=end, **more)

        monkeypatch.setattr(module, "console_of", console_of)
        folder = tmp_path / "labelled"
        run_record_labels(make_config(), str(folder), cameras=CAMERAS, successes=successes, failures=failures)
        return folder, keys

    return run


def labels_of(folder) -> dict[str, list[int]]:
    source = open_episodes(folder, ReadOptions(cameras=CAMERAS))
    data = read_source(source, CAMERAS, Labelling(), set())
    for e in data.episodes:  # the frames have the number of their tick
        assert e.images["wrist"][:, 0, 0, 0].tolist() == e.ticks.tolist()
    return dict(zip(source.keys(), (e.labels.tolist() for e in data.episodes), strict=True))


def test_a_key_switches_the_label_until_there_are_enough_frames(record):
    folder, keys = record(7, 20, {Action.SUCCESS: [(0, 5), (0, 9), (1, 9)], Action.FAILURE: [(2, 3)]})
    # The environment's success on tick 4 ends nothing; each episode begins as a failure; f ends the third.
    assert labels_of(folder) == {
        "episode_0.hdf5": [0] * 5 + [1] * 4 + [0] * 4,
        "episode_1.hdf5": [0] * 9 + [1] * 4,
        "episode_2.hdf5": [0] * 4,
    }
    episode = read_episode(folder / "episode_0.hdf5")
    assert [s == Source.HUMAN for s in episode.steps.source] == [3 <= t < 9 for t in range(LENGTH)]
    assert episode.end.outcome is Outcome.UNKNOWN
    assert any("labelled SUCCESS" in q for q in keys.questions)
    assert any("4 of 7 frames of success, 9 of 20" in q for q in keys.questions)


def test_the_same_command_goes_on(record):
    folder, _ = record(3, 5, {Action.SUCCESS: [(0, 9)]})
    assert labels_of(folder) == {"episode_0.hdf5": [0] * 9 + [1] * 4}
    record(3, 5, {Action.SUCCESS: [(0, 0)]})  # enough
    assert len(labels_of(folder)) == 1
    env = LineEnv(length=LENGTH)
    record(10, 5, {Action.SUCCESS: [(0, 1)]}, env=env)
    assert labels_of(folder)["episode_1.hdf5"] == [0] + [1] * 12
    assert env.seeds == [1]  # another start state
    (folder / LABELS).unlink()  # as where a recording is killed before it writes them: those belong to no class
    record(3, 2, {Action.SUCCESS: [(0, 2)]})
    assert labels_of(folder) == dict.fromkeys(("episode_0.hdf5", "episode_1.hdf5"), [-1] * 13) | {
        "episode_2.hdf5": [0] * 2 + [1] * 11
    }


@pytest.mark.parametrize(("where", "name"), [(hdf5_writer, "write_episode"), (labelled, "write_frame_labels")])
def test_a_full_disk_delays_it(record, monkeypatch, where, name):
    disk = full_disk(monkeypatch, where, name, full=2)
    folder, _ = record(3, 9, {Action.SUCCESS: [(0, 9)]})
    assert disk.full == 0
    assert labels_of(folder) == {"episode_0.hdf5": [0] * 9 + [1] * 4}


def test_a_full_disk_does_not_end_the_loop_at_a_discard(record, monkeypatch, caplog):
    discarded = LabelledFolder.amend

    def amend(self, record):
        disk = full_disk(monkeypatch, labelled, "write_frame_labels", full=1)
        discarded(self, record)
        disk.full = 0

    monkeypatch.setattr(LabelledFolder, "amend", amend)
    folder, _ = record(3, 18, {Action.SUCCESS: [(0, 5), (1, 9), (2, 9)], Action.DISCARD: [(0, 8)]})
    assert "It is written with the next episode" in caplog.text
    assert list(labels_of(folder)) == ["episode_1.hdf5", "episode_2.hdf5"]
    assert not (folder / "episode_0.hdf5").exists()


def test_ctrl_c_keeps_the_episode_under_way(record, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        record(50, 50, {Action.SUCCESS: [(0, 4)], Action.END: [(0, 7)]})
    assert labels_of(tmp_path / "labelled") == {"episode_0.hdf5": [0] * 4 + [1] * 4}


def test_labels_of_other_classes_are_refused(record, tmp_path):
    (tmp_path / "labelled").mkdir()
    (tmp_path / "labelled" / LABELS).write_text(json.dumps({"classes": ["up", "down"], "episodes": {}}))
    with pytest.raises(ConfigError, match=naming("up, down", "failure, success")):
        record(3, 3)


def test_a_discard_takes_the_labels_away_at_once_and_u_brings_them_back(tmp_path):
    (tmp_path / "episode_0.hdf5").touch()
    labels = LabelledFolder(tmp_path, (1, 1))
    labels.note_discard("a")  # within the episode
    labels.add("a", tmp_path / "episode_0.hdf5", [False, True])
    assert (labels.frames, LabelledFolder(tmp_path, (1, 1)).frames) == ((0, 0), (0, 0))
    labels.note_discard("")
    assert (labels.frames, LabelledFolder(tmp_path, (1, 1)).frames) == ((1, 1), (1, 1))
    labels.note_discard("a")
    labels.amend(Amend("a", discard=True))
    labels.note_discard("")
    assert (labels.frames, [*tmp_path.glob("*.hdf5")]) == ((0, 0), [])


CONFIG = apply_overrides(load("fake_aloha", []), [("robot.image_size", "16")])


@pytest.mark.compiles
def test_training_writes_a_folder_that_the_actor_reads_and_test_prints_its_figures(tmp_path, capsys):
    demos, trained, cameras = tmp_path / "demos", tmp_path / "c", ("top", "left_wrist")
    assert run_record(CONFIG, 6, str(demos), policy="scripted", noise=None, cameras=cameras) == 0
    words = ["classifier", "train", str(demos), "--cameras", "left_wrist,top", "--out", str(trained)]
    assert main([*words, "--steps", "20", "--batch_size", "8", "--frames", "2", "--positives", "3"]) == 0
    printed = capsys.readouterr().out
    assert "update 20 of 20: " in printed
    assert "note: 1 held-out episode " in printed  # too few for a share of 0.01
    assert f"outcome.classifier={trained}" in printed
    description = read_description(trained)
    assert [(c.name, c.height, c.width) for c in description.cameras] == [("left_wrist", 16, 16), ("top", 16, 16)]
    assert (description.frames, description.positives) == (2, 5 * 3)
    assert description.negatives > 100
    assert description.validation["successes"] == 1
    assert (trained / "validation.png").read_bytes().startswith(b"\x89PNG")
    classifier = Classifier(trained)
    classifier.check(spec_of(CONFIG))
    black = {f"images/{c}": np.zeros((16, 16, 3), np.uint8) for c in classifier.cameras}
    assert classifier.probability(black).shape == (2,)

    key = open_episodes(demos, ReadOptions()).keys()[2]
    labels = {"classes": ["failure", "success"], "episodes": {key: [[0, 10, "failure"]]}}
    (demos / LABELS).write_text(json.dumps(labels))
    assert main(["classifier", "test", str(trained), str(demos), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    figures = json.loads((tmp_path / "test.json").read_text())
    assert (figures["successes"], figures["failures"]) == (5, 1)
    assert f"AUC {figures['auc_by_episode']:.4f} by episode" in out
    assert str(tmp_path / "test.png") in out
    assert len(figures["misjudged"]) == sum(figures["faults"].values())
    for row in figures["misjudged"]:
        assert row["episode"] in out
