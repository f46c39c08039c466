"""The `serl-chunk-robot` command. With the whole of serl_chunk installed, `serl-chunk robot` is the same."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path
from typing import Any, Dict, NoReturn, Sequence

from serl_chunk_robot import __version__
from serl_chunk_robot.errors import ConfigError, SerlChunkError

DONE, FAILED, WRONG_USAGE = 0, 1, 2
REQUESTS = {  # command -> what it does, for its help
    "stop": "Stop the robot. It stands, with torque on, until an operator clears it.",
    "clear": "Let a stopped robot move again. Look at the cell first.",
    "hold": "Brake a moving robot and let it stand.",
    "status": "Print what the robot does, and why.",
    "park": "Move a standing robot to the pose in which it may lose its torque.",
    "jog": "Move one joint of a standing robot.",
    "torque-off": "Switch the torque of a standing robot off: arms without brakes fall. Park it first.",
    "profile": "Choose the limits of a standing robot.",
}


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None, program: str = "serl-chunk-robot") -> int:
    """Run the command line; return the exit status (0 done, 1 failed, 2 wrong usage).

    `--help` and `--version` raise SystemExit, as argparse does. `program` is the name to show in messages.
    """
    parser = _parser(program)
    try:
        arguments = parser.parse_args(argv)
        if arguments.command == "serve":
            _serve(arguments)
        elif arguments.command:
            _request(arguments)
        else:
            parser.print_help()
    except SerlChunkError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return WRONG_USAGE if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:  # before the robot was connected, or while a request waits for its reply
        return FAILED
    return DONE


def _parser(program: str) -> Parser:
    parser = Parser(
        prog=program,
        description="Serve a robot to actors on other machines. Runs on Python 3.8 and newer.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"serl_chunk_robot {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    what = "Serve the robot of a file. It moves only once an operator has cleared it."
    serve = commands.add_parser("serve", help=what, description=what, allow_abbrev=False)
    serve.add_argument("file", type=Path, metavar="robot.toml")
    serve.add_argument("--driver", default="", metavar="NAME|FILE.py:Class", help="replaces the file's")
    for name, what in REQUESTS.items():
        command = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        command.add_argument("--robot", default="127.0.0.1", metavar="HOST[:PORT]", help="default: 127.0.0.1:5600")
        command.add_argument("--keys", type=Path, metavar="FILE", help="this machine's keys for the robot's server")
        if name == "jog":
            command.add_argument("--joint", type=int, required=True, help="from 0, in the order of the command")
            command.add_argument("--angle", type=float, required=True, help="rad, or a gripper's own unit")
        elif name == "profile":
            command.add_argument("name", metavar="NAME")
    return parser


def _serve(arguments: argparse.Namespace) -> None:
    from serl_chunk_robot.serve import serve

    serve(arguments.file, arguments.driver)


def _request(arguments: argparse.Namespace) -> None:
    """Send a command's request and print what the robot does then. Raises ConfigError or RobotError."""
    from serl_chunk_robot.client import Keys, RobotClient

    command = arguments.command
    keys = None if arguments.keys is None else Keys.of_file(arguments.keys)
    role = "any" if command in ("stop", "status") else "operator"
    name = f"{command} of {socket.gethostname()}"[:64]
    with RobotClient(arguments.robot, name=name, role=role, keys=keys) as client:
        if command == "status":
            client.request("ping")
            _print_status(client.next_state())
            return
        wants = {"jog": ("joint", "angle"), "profile": ("name",)}.get(command, ())
        reply = client.request(command.replace("-", "_"), **{name: getattr(arguments, name) for name in wants})
        print(f"{reply['state']}: {reply['word']}")


def _print_status(state: Dict[str, Any]) -> None:
    print(f"{state['robot']}  {state['state']}: {state['word']}")
    print(f"controller  {state['controller'] or 'none'}")
    print(f"profile  {state['profile']} ({state['digest']})")
    late = " ".join("{} {:.1f} ms".format(name, 1e3 * state["late"][name]) for name in ("p50", "p99", "max"))
    print(f"passes  {state['pass']}, late by {late}")
    counts = ", ".join(f"{name} {n}" for name, n in sorted(state["counts"].items()) if n)
    print(f"counted  {counts or 'nothing'}")
    for name in ("q", "set_point"):
        values = state[name]
        print(f"{name}  {'unknown' if values is None else ' '.join(f'{x:.3f}' for x in values)}")
