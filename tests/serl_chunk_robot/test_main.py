"""The command of the robot's distribution, on its own and as a subcommand."""

from __future__ import annotations

import pytest

import serl_chunk_robot
from serl_chunk import main as whole
from serl_chunk_robot.main import main


def test_the_version_is_printed(capsys):
    for run in (lambda: main(["--version"]), lambda: whole.main(["robot", "--version"])):
        with pytest.raises(SystemExit) as done:
            run()
        assert done.value.code == 0
        assert capsys.readouterr().out == f"serl_chunk_robot {serl_chunk_robot.__version__}\n"


@pytest.mark.parametrize(
    ("run", "program"),
    [(main, "serl-chunk-robot"), (lambda arguments: whole.main(["robot", *arguments]), "serl-chunk robot")],
    ids=["alone", "subcommand"],
)
def test_help_and_errors_name_the_program(run, program, capsys):
    assert run([]) == 0
    assert f"usage: {program} " in capsys.readouterr().out
    assert run(["--fast"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{program}: ")
    assert "--fast" in err
    assert len(err.splitlines()) == 1
