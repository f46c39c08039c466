"""The documents' tables are those of the results files, whose fields are checked, and which benchmarks write."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from errors import naming

from serl_chunk.types import DataError

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import render_results
from support import documented_tables, published_code, result_tables, results
from support.result_tables import Table, Where
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
    """The name of a results file of these runs, as tables have it."""
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


def test_a_row_without_a_run_and_a_table_of_another_shape_are_refused(tmp_path: Path):
    where = {"file": saved(tmp_path, [Run("ours", 0, "e", [], [Checkpoint(0, 1, 2)])])}
    rows = "| seed | rate |\n|---|---|\n| x | |"
    with pytest.raises(DataError, match=naming("some", "'x'", "'theirs'")):
        Table([(result_tables.percent, {})], [{"run": "theirs"}], where).markdown("some", rows)
    with pytest.raises(DataError, match=naming("some", (1, 1), (2, 1))):
        Table([(result_tables.percent, {})], [{"run": "ours"}] * 2, where).markdown("some", rows)


AT_POINT = "runs.0.checkpoints.0"


@pytest.mark.parametrize(("path", "value", "named"), [
    ("commit", ..., ("commit",)),
    ("commit", "main", ("commit", "'main'")),
    ("transcribed", "no", ("transcribed", "'no'")),
    ("runs", [], ("runs",)),
    ("runs.0.seed", "3", ("runs[0].seed", "'3'")),
    ("runs.0.colour", "red", ("runs[0].colour", "settings")),
    ("runs.0.settings", ..., ("runs[0]", "settings")),
    ("runs.0.checkpoints", [], ("runs[0].checkpoints",)),
    (f"{AT_POINT}.successes", 11, ("checkpoints[0].successes", 11, 10)),
    (f"{AT_POINT}.episodes", 0, ("checkpoints[0].successes", 3, 0)),
    (f"{AT_POINT}.updates", -1, ("checkpoints[0].updates", -1)),
    (f"{AT_POINT}.updates", True, ("checkpoints[0].updates", "True")),
    (f"{AT_POINT}.starts", "training", ("checkpoints[0].starts", "'training'", "validation")),
])  # fmt: skip
def test_a_field_that_is_not_what_it_must_be_is_named(path: str, value: Any, named: tuple[object, ...]):
    changed = json.loads(json.dumps(VALID))
    *parents, last = path.split(".")
    at: Any = changed
    for name in parents:
        at = at[int(name) if name.isdigit() else name]
    at.pop(last) if value is ... else at.update({last: value})
    with pytest.raises(DataError, match=naming("results.json", *named)):
        results.parse(changed, "results.json: ")


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path):
    (tmp_path / "there.json").write_text("{")
    for file, named in (("other.json", "there"), ("there.json", "--json")):
        with pytest.raises(DataError, match=naming(file, named)):
            results.read(tmp_path / file)


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


def test_a_part_joins_the_others_and_runs_keep_their_commit(tmp_path: Path):
    file = tmp_path / "some.json"
    saved(tmp_path, [Run(name, 0, "e", [], [Checkpoint(0, 1, 2)]) for name in ("ours", "bc")], details={"record": 1})
    both = results.write(file, [Run("bc", 0, "e", [], [Checkpoint(9, 2, 2)])], join=True)
    assert [(r.name, r.checkpoints[0].updates, r.commit) for r in both.runs] == [("ours", 0, "0123456"), ("bc", 9, "")]
    assert results.write(file, [], details={"plan": 2}, join=True).details == {"record": 1, "plan": 2}
    assert results.read(file) == results.write(file, [], join=True)


@pytest.mark.parametrize(("seeds", "transcribed"), [((0, 1), True), ((0,), False)])
def test_a_file_is_transcribed_while_it_has_such_runs(tmp_path: Path, seeds: tuple[int, ...], transcribed: bool):
    file = tmp_path / "results.json"
    runs = [Run("ours", seed, "e", [], [Checkpoint(0, 1, 2)]) for seed in seeds]
    file.write_text(results.dumps(Results("c", "0123456", True, runs, "From the table.")))
    made = results.write(file, [Run("ours", 0, "e", [], [Checkpoint(9, 2, 2)])], join=True)
    assert (made.transcribed, made.note) == (transcribed, "From the table." if transcribed else "")


def test_results_of_unknown_or_changed_code_and_of_two_tasks_are_not_shown(tmp_path: Path):
    for commit in (results.UNKNOWN, "0123456-dirty"):
        (tmp_path / f"{commit}.json").write_text(json.dumps({**VALID, "commit": commit}))
        with pytest.raises(DataError, match=naming(f"{commit}.json", "commit", commit)):
            render_results.refuse_unknown_code(tmp_path)
        (tmp_path / f"{commit}.json").unlink()
    two = saved(tmp_path, [Run("default", 0, name, [], [Checkpoint(0, 1, 2)]) for name in ("fake_aloha", "ogbench")])
    with pytest.raises(DataError, match=naming("'default'", "fake_aloha, ogbench")):
        result_tables.interval(Where(two, "default"))


def test_checkpoints_are_found_by_updates_and_role_and_shown_with_seeds_and_episodes(tmp_path: Path):
    points = [Checkpoint(0, 1, 9, "validation"), Checkpoint(4, 2, 9, best=True), Checkpoint(8, 3, 9)]
    run = Run("ours", 0, "e", [], points)
    assert [run.at(which) for which in ("first", "last", "best", 8)] == [points[1], points[2], points[1], points[2]]
    assert (run.at(0), run.at(0, "validation")) == (None, points[0])
    points = [Checkpoint(10, 9, 25), Checkpoint(30, 25, 50)]
    runs = [Run("qc", seed, "e", [], some) for seed, some in ((0, points), (0, points[1:]), (1, points[1:]))]
    file = saved(tmp_path, runs)
    texts = [result_tables.bare(50)(Where(file, "qc", at=(at,))) for at in (10, 30, 40)]
    assert texts == ["36 (25 episodes)", "50, 50; 50", ""]


@pytest.mark.parametrize(("words", "names", "named"), [
    ([], ["published-qc"], ("--methods", "published-qc", "--published", published_code.SOURCE)),
    (["--published_python", "p"], ["qc"], ("--published_python", "--published")),
    (["--published", "."], ["published-qc"], ("--published", "agents/acfql.py", published_code.SOURCE)),
    (["--published", "code"], ["qc"], ("--published", "--methods", "published-qc")),
    (["--published", "code", "--offline_steps", "0"], ["published-qc"], ("--published", "--offline_steps", "0")),
])  # fmt: skip
def test_the_published_code_needs_its_checkout(words, names, named, tmp_path, monkeypatch, capsys):
    (tmp_path / "code" / "agents").mkdir(parents=True)
    (tmp_path / "code" / "agents" / "acfql.py").touch()
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    parser.add_argument("--published", type=Path)
    parser.add_argument("--published_python")
    parser.add_argument("--offline_steps", type=int, default=1500)
    with pytest.raises(SystemExit):
        published_code.check(parser, names, parser.parse_args(words))
    error = capsys.readouterr().err.partition("error: ")[2]
    assert all(word in error for word in named)


def test_a_folder_without_a_repository_of_its_own_has_no_commit(tmp_path: Path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "acfql.py").touch()
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    assert results.COMMIT.fullmatch(published_code.commit_of(tmp_path))
    (tmp_path / "agents" / "acfql.py").write_text("x = 1")
    assert published_code.commit_of(tmp_path).endswith("-dirty")
    assert published_code.commit_of(tmp_path / "agents") == results.UNKNOWN
