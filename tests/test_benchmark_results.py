"""The documents' tables and figures are those of the results files, which benchmarks compute and write."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errors import naming

from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import to_dict
from serl_chunk.config.presets import configured
from serl_chunk.types import DataError

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import ablations
import cube_single
import device_latency
import learn_fake_aloha
import render_results
from support import cli_args, documented_tables, learning, result_tables, results
from support.mouse_cell import Answer, Braking, answer_of, braking_of, ways_of
from support.result_tables import Count, Where, difference_interval
from support.results import Checkpoint, Results, Run

POINT = {"updates": 0, "successes": 3, "episodes": 10, "starts": "validation"}
RUN = {
    "name": "ours",
    "seed": 3,
    "experiment": "fake_aloha",
    "settings": ["agent.candidates=8"],
    "checkpoints": [POINT],
}
VALID = {"command": "learn.py --seeds 3", "commit": "0123456789ab", "transcribed": False, "runs": [RUN]}


def saved(folder: Path, runs: list[Run], **more: Any) -> str:
    (folder / "some.json").write_text(results.dumps(Results("c", "0123456", False, runs, **more)))
    return str(folder / "some")


def test_the_documents_tables_are_those_of_the_results():
    """Where this fails: python benchmarks/render_results.py."""
    assert [str(path) for path, _, _ in render_results.differences()] == []


def test_every_results_file_is_shown_in_a_table():
    described = Path(documented_tables.__file__).read_text()
    assert [file for file in results.FOLDER.glob("*.json") if f'"{file.stem}"' not in described] == []


def test_a_figure_that_differs_is_found_and_rewritten_and_every_table_has_its_marker(tmp_path: Path):
    root = render_results.ROOT
    shutil.copytree(root / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("figures"))
    for name in ("README.md", "benchmarks/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    assert list(render_results.differences(tmp_path)) == []
    document = tmp_path / "docs" / "results.md"
    text = document.read_text()
    document.write_text(text.replace("58 % (48 .. 67)", "85 % (48 .. 67)"))
    [(path, _, made)] = render_results.differences(tmp_path)
    assert (path, made) == (document, text)
    document.write_text(text.replace("<!-- results: going-online -->", ""))
    with pytest.raises(DataError, match=naming("going-online", 0, "<!-- results: going-online -->")):
        list(render_results.differences(tmp_path))
    with pytest.raises(DataError, match=naming("nothing", "clones")):
        result_tables.render("<!-- results: nothing -->\n<!-- end of results -->", documented_tables.TABLES)


def with_run(**changes: Any) -> dict[str, Any]:
    return {**VALID, "runs": [{**RUN, **changes}]}


def with_point(**changes: Any) -> dict[str, Any]:
    return with_run(checkpoints=[{**POINT, **changes}])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({**VALID, "commit": "main"}, ("commit", "'main'")),
        (with_run(colour="red"), ("runs[0]", "colour")),
        (with_point(successes=11), ("checkpoints[0].successes", 11, 10)),
        (with_point(starts="training"), ("checkpoints[0].starts", "'training'", "validation")),
    ],
)
def test_a_field_that_is_not_what_it_must_be_is_named(changed: dict[str, Any], named: tuple[object, ...]):
    with pytest.raises(DataError, match=naming("results.json", *named)):
        results.parse(changed, "results.json: ")


def test_what_is_written_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "results.json"
    more = ["--data", "/home/a/b.npz", "--out=/x", "--quick"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/learn.py", "--seeds", "3", "--json", str(file), *more])
    point = Checkpoint(0, 3, 10, env_steps=0, human_ticks=0, wall=1.5, best=True)
    run = Run("ours", 3, "fake_aloha", ["a=b"], [point, Checkpoint(5, 0, 10)], {"share": 0.5})
    results.write(file, [run], details={"x": [1]})
    again = results.read(file)
    assert again.command == "learn.py --seeds 3 --data b.npz --quick"
    assert (list(again.runs), again.transcribed, again.details) == ([run], False, {"x": [1]})
    assert '{"updates": 5, "successes": 0, "episodes": 10, "starts": "reported"}\n' in file.read_text()


def test_results_of_unknown_or_changed_code_and_of_two_tasks_are_not_shown(tmp_path: Path):
    for commit in (results.UNKNOWN, "0123456-dirty"):
        (tmp_path / f"{commit}.json").write_text(json.dumps({**VALID, "commit": commit}))
        with pytest.raises(DataError, match=naming(f"{commit}.json", "commit", commit)):
            render_results.refuse_unknown_code(tmp_path)
        (tmp_path / f"{commit}.json").unlink()
    two = saved(tmp_path, [Run("default", 0, name, [], [Checkpoint(0, 1, 2)]) for name in ("fake_aloha", "ogbench")])
    with pytest.raises(DataError, match=naming("'default'", "fake_aloha, ogbench")):
        result_tables.interval(Where(two, "default"))


TICKS = 0.02 * np.arange(6)


def test_newcombes_example():
    """Newcombe 1998, table II, (a) method 10: 56/70 - 48/80."""
    assert difference_interval(Count(56, 70), Count(48, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    low, high = difference_interval(Count(10, 10), Count(0, 20))
    assert (round(low, 4), high) == (0.6791, 1.0)


@pytest.mark.parametrize(("task", "experiment"), ablations.EXPERIMENTS.items())
def test_every_option_is_an_experiment_of_its_own(task, experiment):
    made = {
        option: str(to_dict(ablations.configuration(experiment, settings)))
        for option, settings in ablations.OPTIONS.items()
        if not ablations.says_nothing(option, experiment, [])
    }
    assert len({*made.values()}) == len(made) > 15
    assert ("helper_errs" in made) is (task == "fake_aloha")  # where a human intervenes
    offline = {option for option in made if not ablations.says_nothing(option, experiment, [], online=False)}
    assert made.keys() - offline == ablations.ONLINE & made.keys()
    assert set(ablations.BESIDE) | set(ablations.BESIDE.values()) <= set(ablations.OPTIONS)


def test_every_method_on_cube_single_is_a_configuration_of_its_own():
    made = {
        str(to_dict(configured(load_experiment("ogbench"), [*map(cli_args.split, m.settings)], preset=m.preset)))
        for m in cube_single.EVERY.values()
    }
    by_name = [*cube_single.METHODS, *cube_single.SAVINGS, *cube_single.LONGER]
    assert len(made) == len(cube_single.EVERY) == len(by_name)


def rows(run) -> list[tuple]:
    return [(c.updates, c.successes, c.starts, c.best) for c in run.checkpoints]


def test_the_best_checkpoint_is_chosen_on_validation_starts_and_marked(monkeypatch):
    """Validation of every checkpoint comes first, then the chosen and the last one on reported starts."""
    successes = {("a", 0): 1, ("a", 20): 7, ("a", 40): 5, (200, 0): 3, (400, 0): 2}

    class Trained:
        def __init__(self, name: Any, steps: list[int]) -> None:
            self.name, self.steps = name, steps

        def evaluate(self, step: int, n: int, starts: str = "reported", **more: Any) -> Checkpoint:
            found = successes[self.name, step] - (starts == "reported")
            return Checkpoint(**{"updates": step, "successes": found, "episodes": n, "starts": starts, **more})

    def train(config, run, demos):
        updates = run.name.rpartition("_")[2]
        return Trained(int(updates), [0]) if run.name.startswith("bc") else Trained("a", [0, 20, 40])

    monkeypatch.setattr(learning, "train", train)
    monkeypatch.setattr(learn_fake_aloha, "BC_NORMALISERS", ("relative",))
    monkeypatch.setattr(learn_fake_aloha, "BC_UPDATES", (200, 400))
    args = argparse.Namespace(out=Path(), episodes=10, set=["agent.lr=0.1"], overrides=[])
    run = learn_fake_aloha.online("qc", 4, Path(), args)
    assert (run.name, run.seed, run.experiment, run.settings) == ("qc", 4, "fake_aloha", ["agent.lr=0.1"])
    assert rows(run) == [
        (0, 1, "validation", False),
        (20, 7, "validation", False),
        (40, 5, "validation", False),
        (20, 6, "reported", True),
        (40, 4, "reported", False),
    ]
    successes["a", 40] = 9
    assert rows(learn_fake_aloha.online("qc", 4, Path(), args))[3:] == [(40, 8, "reported", True)]
    # Clones are counted by their updates of imitation.
    assert rows(learn_fake_aloha.cloned(0, Path(), args)) == [
        (200, 3, "validation", False),
        (200, 2, "reported", True),
        (400, 2, "validation", False),
        (400, 1, "reported", False),
    ]


def test_a_reports_answer_is_the_first_command_and_set_point_that_change():
    """Ticks at 0, 20, 40 ms ...; the report comes at 23 ms, is seen at 40, and the driver moves at 45."""
    targets = np.repeat([0.0, 0.01], [2, 4])[:, None] * np.ones(14)
    commands = [(k, t, 0.0, t + 0.001, row.tolist()) for k, (t, row) in enumerate(zip(TICKS, targets, strict=True))]
    moments = 0.005 * np.arange(100)
    points = np.maximum(moments - 0.040, 0)[:, None] * 0.1 * np.ones(14)
    answer = answer_of(0.023, commands, moments, points)
    assert answer[:4] == pytest.approx((0.017, 0, 0.018, 0.022))
    slow = [(k, t, r, s, [0.01 * (t > 0.07)] * 14) for k, t, r, s, _ in commands]
    assert answer_of(0.023, slow, moments, points).late == 2


def test_braking_is_timed_by_the_joint_that_was_fastest():
    """200 passes a second at 0.4 rad/s; unplugged at 0.5 s, braked from 0.52 to 0.56, back by 2 mrad until 0.6."""
    moments = 0.005 * np.arange(400)
    speed = np.interp(moments, [0.52, 0.56], [-0.4, 0.0]) + np.where((moments > 0.56) & (moments <= 0.6), 0.05, 0.0)
    points = np.zeros((400, 14))
    points[:, 1] = np.cumsum(speed) * 0.005
    points[:, 0] = points[:, 1] / 4
    points[:, 9] = moments  # the other arm moves on
    braking = braking_of(0.5, moments, points)
    assert (braking.speed, braking.returned) == pytest.approx((0.4, 0.002))
    assert 0.02 < braking.began <= 0.03
    assert 0.055 <= braking.stopped <= 0.065
    assert 0.095 <= braking.settled <= 0.106


def test_a_report_is_as_old_as_the_server_receives_the_command_that_is_made_of_it():
    """Reports every 8 ms from 20 ms on, ticks every 20 ms; each command is at the server 2 ms after its tick."""
    commands = [(k, t, 0.02 + 0.008 * ((t - 0.02) // 0.008), t + 0.001, []) for k, t in enumerate(TICKS)]
    received = {k: t + 0.002 for k, t in enumerate(TICKS) if k != 3}  # one is overtaken
    ways = ways_of(0.019, commands, received, held=0.07)
    assert ways["received"] == pytest.approx(0.022 - 0.019)
    assert ways["ages"] == pytest.approx((0.002, 0.002 + 0.004, 0.002 + 0.004), abs=1e-9)
    assert ways["on_its_way"] == pytest.approx((0.002,) * 3)


def test_the_published_latency_of_a_device_is_in_time():
    file = Path(__file__).resolve().parents[1] / "docs" / "figures" / "device_latency.json"
    published = json.loads(file.read_text())
    answers = {kind: [Answer(**row) for row in published["each"][kind]] for kind in device_latency.KINDS}
    brakings = [Braking(**row) for row in published["each"]["unplugs"]]
    assert sum(map(len, answers.values())) >= 200
    assert len(brakings) >= 25
    again = device_latency.figures(answers, brakings)
    assert again["holds"]
    assert again == {name: published[name] for name in again}
