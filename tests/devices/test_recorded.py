"""replayed: what was recorded comes back on its ticks, and a file that is not a recording is refused by name."""

import types

import numpy as np
import pytest
from errors import naming

from serl_chunk.devices.recorded import ReplayedIntervention, save_interventions
from serl_chunk.devices.registry import make_intervention
from serl_chunk.types import ConfigError, DataError, RobotSpec

SPEC = RobotSpec("toy", 10.0, 2, (-1.0, -1.0), (1.0, 1.0), (0, 1), (), (), 20)


def columns(**changes):
    actions = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], np.float32)
    good = {"episode": [0, 0, 2], "tick": [3, 4, 0], "action": actions, "idle": [False, True, False]}
    return {name: np.array(value) for name, value in {**good, **changes}.items()}


def test_commands_come_back_on_their_ticks(tmp_path):
    path = tmp_path / "human.npz"
    save_interventions(path, **columns())
    source, found = ReplayedIntervention(path, SPEC), {}
    assert source.poll(3, {}, decision_tick=False, last=None) is None, "before the first reset"
    for episode in range(4):
        source.reset(seed=0)
        for tick in range(6):
            command = source.poll(tick, {}, decision_tick=False, last=None)
            if command is not None:
                found[episode, tick] = (command.action.tolist(), command.idle)
                assert command.action.dtype == np.float32
                command.action[:] = 7  # the caller's to keep
    assert found == {
        (0, 3): (pytest.approx([0.1, 0.2]), False),
        (0, 4): (pytest.approx([0.3, 0.4]), True),
        (2, 0): (pytest.approx([0.5, 0.6]), False),
    }
    np.testing.assert_allclose(source._commands[0, 3].action, [0.1, 0.2])


def test_a_file_is_found_by_the_registry(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_interventions(tmp_path / "human.npz", **columns())
    env = types.SimpleNamespace(robot_spec=SPEC)
    assert isinstance(make_intervention("~/human.npz", env), ReplayedIntervention)
    with pytest.raises(ConfigError, match=naming("actor.intervention", "other.npz", "none", "scripted")):
        make_intervention("other.npz", env)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"tick": [3, 3, 0]}, ("tick", "episode")), ({"tick": [3, -1, 0]}, ("episodes", "ticks", 0)),
     ({"tick": [3.0, 4.0, 0.0]}, ("tick", "int[N]", "float64[3]")), ({"idle": [False, True]}, ("tick", 3, "idle", 2)),
     ({"action": np.full((3, 2), np.inf, np.float32)}, ("action", 0))],
)  # fmt: skip
def test_bad_columns_are_refused_when_written_and_when_read(tmp_path, changes, named):
    path = tmp_path / "p.npz"
    with pytest.raises(DataError, match=naming("p.npz", *named)):
        save_interventions(path, **columns(**changes))
    assert not list(tmp_path.iterdir())
    np.savez(path, **columns(**changes))
    with pytest.raises(DataError, match=naming("p.npz", *named)):
        ReplayedIntervention(path, SPEC)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize(
    ("write", "named"),
    [(lambda path: save_interventions(path, **columns(action=np.zeros((3, 7), np.float32))), ("toy", 7, 2)),
     (lambda path: None, ("pickles", "No such file")), (lambda path: path.write_bytes(b"PK\3\4"), ("pickles",)),
     (lambda path: path.write_bytes(b"junk"), ("pickles", "no archive")),
     (lambda path: np.savez(path, episode=np.zeros(1, int)), ("'tick'",)),
     (lambda path: np.savez(path, **columns(action=np.array([[Bomb(), Bomb()]] * 3, object))),
      ("pickles", "objects"))],
)  # fmt: skip
def test_other_files_and_other_robots_are_refused_by_name_and_no_pickle_is_loaded(tmp_path, write, named):
    write(tmp_path / "p.npz")
    with pytest.raises(DataError, match=naming("p.npz", *named)):
        ReplayedIntervention(tmp_path / "p.npz", SPEC)
