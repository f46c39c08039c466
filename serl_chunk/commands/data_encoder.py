"""`serl-chunk data encoder`: pretrained weights of an image encoder, in the format that the learner reads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from serl_chunk.commands.setup import say
from serl_chunk.data.encoder_weights import read_resnet10, write_weights
from serl_chunk.types import ConfigError


def add_parsers(commands: Any) -> None:
    """Add this module's commands."""
    p = commands.add_parser(
        "encoder",
        help="HIL-SERL's pretrained ResNet-10 as a file for agent.encoder.weights",
        description="Make the file that --config.agent.encoder.weights names (with --config.agent.encoder.kind="
        "resnet10) of the pickle that HIL-SERL publishes, resnet10_params.pkl. Nothing in the pickle is run.",
        allow_abbrev=False,
    )
    p.set_defaults(run=run_encoder)
    p.add_argument("path", metavar="FROM", help="resnet10_params.pkl")
    p.add_argument("out", metavar="TO", help="the file to write, .npz; must not exist")


def run_encoder(flags: argparse.Namespace) -> int:
    """Write the file; returns 0. Raises ConfigError and DataError."""
    source, out = Path(flags.path).expanduser(), Path(flags.out).expanduser()
    if out.suffix != ".npz":
        raise ConfigError(f"{out}: weights are written as .npz: give a name that ends so")
    if out.exists():
        raise ConfigError(f"{out} exists: give another name, or remove it")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder: make it first")
    weights, left_out = read_resnet10(source)
    write_weights(out, weights)
    numbers = sum(w.size for w in weights.values())
    say(f"{out}: {len(weights)} arrays, {numbers / 1e6:.3f} million weights")
    if left_out:
        say(f"left out, for the backbone has no such: {', '.join(left_out)}")
    return 0
