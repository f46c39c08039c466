"""Finding experiments by name or path, and what is said where one cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from errors import naming

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import known_experiments, load_experiment
from serl_chunk.types import ConfigError

GOOD = """
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig
def experiment():
    return ExperimentConfig(name={name!r}, robot=FakeAlohaConfig())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty ./experiments of the present directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    return tmp_path / "experiments"


@pytest.mark.parametrize("name", sorted(known_experiments()))
def test_every_packaged_experiment_loads_under_its_own_name(name):
    named = {  # whose variants are experiments of their own
        "hil_serl_template": "hil_serl_ram_insertion",
        "hil_serl_franka": "hil_serl_franka_ram_insertion",
        "aloha": "aloha_ros1",
    }
    assert load_experiment(name).name == named.get(name, name)


def test_fake_aloha_is_packaged():
    assert "fake_aloha" in known_experiments()


def test_a_local_experiment_is_found_and_wins_over_a_packaged_one(folder):
    (folder / "mine.py").write_text(GOOD.format(name="mine"))
    (folder / "fake_aloha.py").write_text(GOOD.format(name="shadow"))
    (folder / "_private.py").write_text("raise RuntimeError")
    assert load_experiment("mine").name == "mine"
    assert load_experiment("fake_aloha").name == "shadow"
    assert "_private" not in known_experiments()


def test_a_path_is_loaded_from_anywhere(tmp_path):
    path = tmp_path / "elsewhere.py"
    path.write_text(GOOD.format(name="elsewhere"))
    assert isinstance(load_experiment(str(path)), ExperimentConfig)


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A copy of sys.path: an experiment's folder is added to it."""
    copy = list(sys.path)
    monkeypatch.setattr(sys, "path", copy)
    return copy


def test_a_file_imports_the_modules_beside_it_when_it_is_loaded_and_later(tmp_path, search_path):
    (tmp_path / "beside_one.py").write_text("NAME = 'mine'")
    (tmp_path / "beside_two.py").write_text("NAME = 'later'")
    source = "from beside_one import NAME\n" + GOOD.format(name="x").replace("'x'", "NAME")
    (tmp_path / "mine.py").write_text(source + "def later():\n    from beside_two import NAME\n    return NAME\n")
    assert load_experiment(str(tmp_path / "mine.py")).name == "mine"
    assert load_experiment(str(tmp_path / "mine.py")).name == "mine"
    assert sys.modules["serl_chunk_experiment_mine"].later() == "later"
    assert search_path[0] == str(tmp_path)
    assert search_path.count(str(tmp_path)) == 1


def test_a_file_does_not_hide_the_package_it_is_called_as(tmp_path, search_path, folder):
    for path in (tmp_path / "wave.py", folder / "mine.py"):
        path.write_text(GOOD.format(name="x"))
        load_experiment(str(path))
        assert (path.parent.name, search_path[-1]) == (path.parent.name, str(path.parent))


@pytest.mark.parametrize("beside", ["wave.py", "wave/__init__.py"])
def test_a_file_does_not_hide_a_package_by_what_lies_beside_it(tmp_path, search_path, beside):
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    (tmp_path / beside).write_text("raise AssertionError")
    (tmp_path / "mine.py").write_text("import wave\nassert wave.open\n" + GOOD.format(name="x"))
    load_experiment(str(tmp_path / "mine.py"))
    assert search_path[-1] == str(tmp_path)


def test_folders_with_colons_in_their_names_are_no_variants(tmp_path):
    (tmp_path / "a:b.py:c").mkdir()
    path = tmp_path / "a:b.py:c" / "mine.py"
    path.write_text(GOOD.format(name="mine"))
    assert load_experiment(str(path)).name == "mine"
    path.write_text(GOOD.format(name="mine").replace("experiment()", "experiment(variant='')", 1))
    assert load_experiment(f"{path}:other").name == "mine"


def test_an_unknown_name_lists_the_valid_ones_and_the_nearest(folder):
    (folder / "mine.py").write_text(GOOD.format(name="mine"))
    with pytest.raises(ConfigError, match=naming("fake_alhoa", "'fake_aloha'", "mine", ".py")):
        load_experiment("fake_alhoa")
    with pytest.raises(ConfigError, match=naming("zzz", "fake_aloha", "mine", ".py")):
        load_experiment("zzz")


@pytest.mark.parametrize("name", ["ram_insertion", "ram_insertoin", "hil_serl_ram_insertion"])
def test_a_task_of_hil_serls_is_named_with_its_experiment(name):
    with pytest.raises(ConfigError, match=naming(f"'{name}'", "hil_serl_template:ram_insertion")):
        load_experiment(name)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=naming("exp_name", "nowhere/x.py", "fake_aloha")):
        load_experiment("nowhere/x.py")


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("x = 1", ("broken.py", "experiment()", "ExperimentConfig")),
        ("experiment = 3", ("broken.py", "experiment()", "ExperimentConfig")),
        ("def experiment(): return 3", ("broken.py", "experiment()", "int", "ExperimentConfig")),
        ("x = 1\ndef experiment(:", ("broken.py", 2, "SyntaxError")),
        (
            "import no_such_module",
            ("broken.py", 1, "ModuleNotFoundError", "no_such_module", sys.executable),
        ),
        ("from serl_chunk.types import Nothing", ("broken.py", 1, "ImportError", "Nothing")),
        ("\nundefined", ("broken.py", 2, "NameError", "undefined")),
        ("x = {}\n\nx['hz']", ("broken.py", 3, "KeyError", "hz")),
        ("import sys\nsys.exit(3)", ("broken.py", 2, "SystemExit", 3)),
        ("x = '\0'", ("broken.py", "SyntaxError")),
        ("def experiment(x): return x", ("broken.py", "experiment()", "TypeError", "x")),
        (
            "from serl_chunk.config.experiment import ChunkConfig\ndef experiment():\n    return ChunkConfig(horizn=5)",
            ("broken.py", 3, "experiment()", "TypeError", "horizn"),
        ),
        (
            "import json\ndef experiment():\n    return json.loads('')",
            ("broken.py", 3, "experiment()", "JSONDecodeError", "decoder.py"),
        ),
        (
            "from serl_chunk.config.experiment import ChunkConfig\nCHUNK = ChunkConfig(0)",
            ("chunk.horizon", 0, 1),
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path, source, named):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(ConfigError, match=naming(*named)):
        load_experiment(str(path))


def test_a_relative_path_names_its_line_too(folder):
    (folder / "broken.py").write_text("x = 1\nx.y")
    with pytest.raises(ConfigError, match=naming("experiments/broken.py", 2, "AttributeError")):
        load_experiment("experiments/broken.py")
