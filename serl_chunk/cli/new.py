"""`serl-chunk new`: an experiment with a small robot, to fill in."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from serl_chunk.config.loader import packaged_folder
from serl_chunk.types import ConfigError

DESCRIPTION = "Write an experiment with a small robot, to fill in with yours."
TEMPLATE = "_template.py"


def add_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.add_argument("file", metavar="FILE", help="the file to write, such as my_robot.py; it must not exist")


def run(flags: argparse.Namespace, rest: Sequence[str]) -> int:
    """Write the template to a new .py file, and print the next commands. Raises ConfigError."""
    file = flags.file
    path = Path(file).expanduser()
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ConfigError(f"{file}: an experiment is a Python file with a name such as my_robot.py")
    if not path.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {path.parent}. Make it first.")
    try:
        template = (packaged_folder() / TEMPLATE).read_text()
        with path.open("x") as out:
            out.write(template.replace("my_robot", path.stem))
    except FileExistsError:
        raise ConfigError(f"{file}: it exists already. Choose another name, or remove it.") from None
    shown = file if "/" in file else f"./{file}"
    print(f"wrote {file}: an arm that reaches a target. It runs as it is; replace its environment by your robot's.")
    print("next:")
    print(f"  serl-chunk record --exp_name {shown} --n_demos 10 --out demos/{path.stem}")
    print(f"  serl-chunk --exp_name {shown} --learner --actor --demo_path demos/{path.stem}")
    return 0
