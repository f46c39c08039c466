"""`serl-chunk example`: the small trained run that the package ships, copied out of it."""

from __future__ import annotations

import argparse
import io
import shutil
import zipfile
from importlib import resources
from pathlib import Path

from serl_chunk.io import os_faults
from serl_chunk.types import ConfigError

PACKED = "example.zip"  # of serl_chunk.runs, made by benchmarks/example_run.py


def example_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flag."""
    p.description = (
        "Write a small trained run of the simulated cell fake_aloha into a folder, to try without training: its "
        "newest policy, the curves of its training, and 20 of its episodes."
    )
    p.add_argument("folder", metavar="DIR", help="the run folder to write; must not exist")


def example_command(flags: argparse.Namespace) -> int:
    """Write the run and print what takes it. Raises ConfigError."""
    folder = Path(flags.folder).expanduser()
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists. Give a folder that does not, or remove it")
    packed = resources.files("serl_chunk.runs").joinpath(PACKED).read_bytes()
    part = folder.with_name(f".{folder.name}.part")
    with os_faults(ConfigError, f"{folder}: cannot be written", "Choose another folder"):
        shutil.rmtree(part, ignore_errors=True)  # of a command that was interrupted
        part.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            archive.extractall(part)
        part.rename(folder)
    print(
        f"{folder}: a trained policy of fake_aloha, the curves of its training and 20 of its episodes. To go on:\n"
        f"  serl-chunk view {folder}\n"
        f"  serl-chunk report {folder}\n"
        f"  serl-chunk serve --exp_name fake_aloha --checkpoint_path {folder}\n"
        f"  serl-chunk --exp_name fake_aloha --actor --checkpoint_path {folder} --eval_checkpoint_step latest "
        "--eval_n_trajs 20"
    )
    return 0
