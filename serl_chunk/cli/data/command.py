"""`serl-chunk data`: convert, export, inspect, check, statistics, and weights of encoders."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serl_chunk.data.encoder_weights import read_resnet10, write_weights
from serl_chunk.types import ConfigError, SerlChunkError


def add_encoder_parser(commands: Any) -> None:
    """Add `serl-chunk data encoder`."""
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
    """Write the file, and return 0. Raises ConfigError and DataError."""
    source, out = Path(flags.path).expanduser(), Path(flags.out).expanduser()
    if out.suffix != ".npz":
        raise ConfigError(f"{out}: weights are written as .npz. Give a name that ends in .npz")
    if out.exists():
        raise ConfigError(f"{out} exists. Give another name, or remove it")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder. Make it first")
    weights, left_out = read_resnet10(source)
    write_weights(out, weights)
    numbers = sum(w.size for w in weights.values())
    print(f"{out}: {len(weights)} arrays, {numbers / 1e6:.3f} million weights")
    if left_out:
        print(f"skipped parameters not present in the backbone: {', '.join(left_out)}")
    return 0


Parser = Callable[..., argparse.ArgumentParser]


def run_data(arguments: Sequence[str], parser: Parser) -> int:
    """Run `serl-chunk data` with `arguments`, and return the exit status."""
    from serl_chunk.cli.data import convert, export, inspect, stats

    p = parser(
        prog="serl-chunk data",
        description="Episodes at rest: into this project's formats and out of them, and what is in them.",
        allow_abbrev=False,
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="convert|export|inspect|check|stats|encoder")
    for module in (convert, export, inspect, stats):
        module.add_parsers(commands)
    add_encoder_parser(commands)
    flags = p.parse_args(list(arguments))
    run: Callable[[argparse.Namespace], int] | None = getattr(flags, "run", None)
    if run is None:
        raise ConfigError("no command selected. See serl-chunk data --help")
    try:
        return run(flags)
    except SerlChunkError as error:
        if error.parameter in vars(flags):  # a flag has the name of the parameter that it sets
            error.args, error.parameter = (f"--{error.parameter}: {error.message}",), ""
        raise
