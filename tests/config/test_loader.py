"""Finding experiments by name or path, and what is said where one cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from errors import naming

from serl_chunk.config.loader import known_experiments, load_experiment
from serl_chunk.types import ConfigError

GOOD = """
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig
def experiment():
    return ExperimentConfig(name={name!r}, robot=FakeAlohaConfig())
"""
VARIANTS = {  # experiments whose variants are experiments of their own
    "libero": "libero_goal_0",
    "hil_serl_template": "hil_serl_ram_insertion",
    "hil_serl_franka": "hil_serl_franka_ram_insertion",
    "aloha": "aloha_ros1",
    "fake_pick_return": "fake_pick",
}


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    copy = list(sys.path)
    monkeypatch.setattr(sys, "path", copy)
    return copy


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    return tmp_path / "experiments"


def write(path: Path, name: str = "mine", before: str = "") -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(before + GOOD.format(name=name))
    return str(path)


@pytest.mark.parametrize("name", sorted(known_experiments()))
def test_every_packaged_experiment_loads_under_its_own_name(name):
    assert load_experiment(name).name == VARIANTS.get(name, name)


def test_a_local_experiment_is_found_and_wins_over_a_packaged_one(folder):
    assert "fake_aloha" in known_experiments()
    write(folder / "mine.py")
    write(folder / "fake_aloha.py", "shadow")
    (folder / "_private.py").write_text("raise RuntimeError")
    assert [load_experiment(name).name for name in ("mine", "fake_aloha")] == ["mine", "shadow"]
    assert "_private" not in known_experiments()


def test_a_file_imports_the_modules_beside_it_when_it_is_loaded_and_later(tmp_path, search_path):
    (tmp_path / "beside_one.py").write_text("NAME = 'mine'")
    (tmp_path / "beside_two.py").write_text("NAME = 'later'")
    source = "from beside_one import NAME\n" + GOOD.format(name="x").replace("'x'", "NAME")
    (tmp_path / "mine.py").write_text(source + "def later():\n    from beside_two import NAME\n    return NAME\n")
    for _ in range(2):
        assert load_experiment(str(tmp_path / "mine.py")).name == "mine"
    assert sys.modules["serl_chunk_experiment_mine"].later() == "later"
    assert search_path[0] == str(tmp_path)
    assert search_path.count(str(tmp_path)) == 1


def test_folders_with_colons_in_their_names_are_no_variants(tmp_path):
    path = tmp_path / "a:b.py:c" / "mine.py"
    assert load_experiment(write(path)).name == "mine"
    path.write_text(path.read_text().replace("experiment()", "experiment(variant='')", 1))
    assert load_experiment(f"{path}:other").name == "mine"


CHUNK = "from serl_chunk.config.experiment import ChunkConfig\n"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("fake_alhoa", ("fake_alhoa", "'fake_aloha'", "mine", ".py")),
        ("zzz", ("zzz", "fake_aloha", "mine", ".py")),
        *(
            (name, (f"'{name}'", "hil_serl_template:ram_insertion"))
            for name in ("ram_insertion", "ram_insertoin", "hil_serl_ram_insertion")
        ),
        ("nowhere/x.py", ("exp_name", "nowhere/x.py", "fake_aloha")),
    ],
)
def test_a_name_that_is_unknown_comes_with_those_that_are_and_the_nearest(folder, name, named):
    write(folder / "mine.py")
    with pytest.raises(ConfigError, match=naming(*named)):
        load_experiment(name)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("x = 1", ("broken.py", "experiment()", "ExperimentConfig")),
        ("def experiment(): return 3", ("broken.py", "experiment()", "int", "ExperimentConfig")),
        ("x = 1\ndef experiment(:", ("broken.py", 2, "SyntaxError")),
        ("import no_such_module", ("broken.py", 1, "ModuleNotFoundError", "no_such_module", sys.executable)),
        ("import sys\nsys.exit(3)", ("broken.py", 2, "SystemExit", 3)),
        ("x = '\0'", ("broken.py", "SyntaxError")),
        (f"{CHUNK}def experiment():\n    return ChunkConfig(horizn=5)",
         ("broken.py", 3, "experiment()", "TypeError", "horizn")),
        ("import json\ndef experiment():\n    return json.loads('')",
         ("broken.py", 3, "experiment()", "JSONDecodeError", "decoder.py")),
        (f"{CHUNK}CHUNK = ChunkConfig(0)", ("chunk.horizon", 0, 1)),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(folder, source, named):
    (folder / "broken.py").write_text(source)
    for path in ("experiments/broken.py", str(folder / "broken.py")):
        with pytest.raises(ConfigError, match=naming(*named)):
            load_experiment(path)
