"""The `serl-chunk-robot` command. With the whole of serl_chunk installed, `serl-chunk robot` is the same."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn, Sequence

from serl_chunk_robot import __version__
from serl_chunk_robot.errors import ConfigError, SerlChunkError

DONE, FAILED, WRONG_USAGE = 0, 1, 2


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None, program: str = "serl-chunk-robot") -> int:
    """Run the command line; return the exit status (0 done, 1 failed, 2 wrong usage).

    `--help` and `--version` raise SystemExit, as argparse does. `program` is the name to show in messages.
    """
    parser = Parser(
        prog=program,
        description="Serve a robot to actors on other machines. Runs on Python 3.8 and newer.",
        epilog="The subcommands follow with the robot server.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"serl_chunk_robot {__version__}")
    try:
        parser.parse_args(argv)
    except SerlChunkError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return WRONG_USAGE if isinstance(error, ConfigError) else FAILED
    parser.print_help()
    return DONE
