"""The `serl-chunk-robot` command. With the whole of serl_chunk installed, `serl-chunk robot` is the same."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, NoReturn, Optional, Sequence

from serl_chunk_robot import __version__
from serl_chunk_robot.errors import ConfigError, SerlChunkError

if TYPE_CHECKING:
    from serl_chunk_robot.client.client import RobotClient

DONE, FAILED, WRONG_USAGE = 0, 1, 2
REQUESTS = {  # command -> what it does, for its help
    "stop": "Stop the robot. It stands, with torque on, until an operator clears it.",
    "clear": "End a stop. The robot is HELD then: no actor moves it before `go`. Look at the cell first.",
    "go": "Let the actor that holds the lease move a held robot. Only a key press at a terminal sends it.",
    "hold": "Brake a moving robot. It is HELD then: no actor moves it before `go`.",
    "take": "End the lease of the actor that controls the robot, which is HELD then.",
    "status": "Print what the robot does, and why.",
    "proceed": "End the wait for the operator at the end of a step of a reset.",
    "park": "Move a standing robot to the pose in which it may lose its torque.",
    "jog": "Move one joint of a standing robot.",
    "measure": "Swing one joint of a standing robot, and print how late it follows and how late each camera shows it.",
    "torque-off": "Switch the torque of a standing robot off: arms without brakes fall. Park it first.",
    "profile": "Choose the limits of a standing robot.",
    "reboot": "Reboot one motor of a stopped robot, as of a gripper in overload. The robot stays stopped.",
    "end": "End the day: park a standing robot, and only if it got there, switch its torque off. Where it is stopped, "
    "cannot be reached or Ctrl-C is pressed before that, torque stays on.",
}
READING = {  # commands that read episodes: serl_chunk.cli.robot.dry and replay
    "dry": "With serl_chunk: send recorded episodes through each profile's limits, without a robot.",
    "replay": "With serl_chunk: play a recorded episode's actions on the served robot.",
}
SWING = 0.05  # rad: amplitude of `measure`


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
        if not arguments.command:
            parser.print_help()
            return DONE
        return arguments.run(arguments) or DONE
    except SerlChunkError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return WRONG_USAGE if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:  # before the robot was connected, or while a request waits for its reply
        return FAILED


def _parser(program: str) -> Parser:
    description = "Serve a robot to actors on other machines. Runs on Python 3.8 and newer."
    parser = Parser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"serl_chunk_robot {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], Optional[int]], what: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        command.set_defaults(run=run, program=program)
        return command

    serve = add("serve", _serve, "Serve the robot of a file. It moves only once an operator has cleared it.")
    serve.add_argument("file", type=Path, metavar="robot.toml")
    serve.add_argument("--driver", default="", metavar="NAME|FILE.py:Class", help="replaces the file's")
    what = "Make the keys of a robot's server, without which other machines do not reach it, or admit a client."
    keys = add("keys", _keys, what)
    keys.add_argument("folder", type=Path, metavar="FOLDER", help="that robot.toml names as `keys`")
    one = keys.add_mutually_exclusive_group()
    one.add_argument("--add", metavar="NAME", help="admit one more client, and write its own file")
    one.add_argument("--revoke", metavar="NAME", help="admit that client no longer, from the next second on")
    keys.add_argument("--operator", action="store_true", help="with --add: it may also clear, jog and park")
    keys.add_argument("--out", type=Path, metavar="FILE", help="with --add: default: NAME.json next to FOLDER")
    new = add("new", _new, "Find this machine's devices, and write a robot's file to fill in. It overwrites none.")
    new.add_argument("file", type=Path, metavar="robot.toml")
    new.add_argument("--driver", default="fake", metavar="NAME|FILE.py:Class", help="default: fake, simulated arms")
    address = "an arm's address, to try; may be repeated"
    new.add_argument("--address", action="append", default=[], metavar="HOST:PORT", help=address)
    what = "Move each joint of a cleared robot by 2 degrees and back, provoke each stop, and write a report."
    check = add("check", _check, what)
    check.add_argument("--out", type=Path, metavar="FOLDER", help="of the report; default: the file's")
    what = "Record the ends of each joint while you move the arms without torque, and write a file with these limits."
    teach = add("teach", _teach, what)
    teach.add_argument("--seconds", type=float, default=60.0, help="default: 60")
    teach.add_argument("--margin", type=float, default=0.05, metavar="RAD", help="inside of the ends; default: 0.05")
    teach.add_argument("--out", type=Path, metavar="FILE", help="default: NAME_taught.toml next to robot.toml")
    for command in (check, teach):
        command.add_argument("file", type=Path, metavar="robot.toml", help="of the served robot")
        _add_address(command, "")
    for name, what in READING.items():
        add(name, _read, what).add_argument("rest", nargs="*")
    for name, what in REQUESTS.items():
        command = add(name, _request, what)
        _add_address(command, "127.0.0.1")
        if name not in ("stop", "hold", "take", "status", "go"):
            what = "for scripts: carry it out in that state alone, as `status` printed it, without Enter"
            command.add_argument("--generation", type=int, metavar="N", help=what)
        if name == "status":
            what = "print also who held, stopped, cleared and let the robot go on"
            command.add_argument("--history", action="store_true", help=what)
        if name in ("jog", "measure"):
            command.add_argument("--joint", type=int, required=True, help="from 0, in the order of the command")
            unit = "rad; m for x, y and z of a robot commanded by poses; or a gripper's own unit"
            command.add_argument("--angle", type=float, required=name == "jog", default=SWING, help=unit)
        elif name == "profile":
            command.add_argument("name", metavar="NAME")
        elif name == "reboot":
            command.add_argument("name", metavar="NAME", help="of the motor, as ARM/gripper of ALOHA's arms")
            what = "an arm falls while a motor that carries it reboots: you hold it"
            command.add_argument("--arm-is-supported", action="store_true", help=what)
    return parser


def _add_address(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument("--robot", default=default, metavar="HOST[:PORT]", help="default: 127.0.0.1:5600")
    command.add_argument("--keys", type=Path, metavar="FILE", help="this machine's keys for the robot's server")


def _serve(arguments: argparse.Namespace) -> None:
    from serl_chunk_robot.server.serve import serve

    serve(arguments.file, arguments.driver)


def _read(arguments: argparse.Namespace) -> NoReturn:
    raise ConfigError(
        f"{arguments.command} reads episodes, and needs the whole of serl_chunk. Install it, and run "
        f"serl-chunk robot {arguments.command}"
    )


def _keys(arguments: argparse.Namespace) -> None:
    """Change a folder of keys, and print what to do next. Raises ConfigError."""
    from serl_chunk_robot.commands import access_keys

    folder, name, program = arguments.folder, arguments.add, arguments.program
    if name is None and (arguments.operator or arguments.out is not None):
        raise ConfigError("goes with --add NAME", parameter="--operator" if arguments.operator else "--out")
    if arguments.revoke is not None:
        print(f"{arguments.revoke} is revoked ({access_keys.revoke(folder, arguments.revoke)}).")
    elif name is None:
        print(
            f"The keys of this robot's server ({access_keys.make(folder)}) are in {folder}. In robot.toml:\n\n"
            f'  keys = "{folder}"  # relative to robot.toml\n  host = "0.0.0.0"\n\n'
            f"Admit each client: {program} keys {folder} --add NAME, with --operator for one that may clear it."
        )
    else:
        file, digits = access_keys.add(folder, name, arguments.out, operator=arguments.operator)
        print(
            f"{name} is admitted ({digits}). Move {file} to its machine, and leave no copy here. There:\n\n"
            f"  {program} status --robot HOST --keys {file.name}\n"
            f"  serl-chunk ... --actor --config.robot.server=HOST --config.robot.server_keys={file.name}"
        )


def _new(arguments: argparse.Namespace) -> None:
    """Write a robot's file, and print what was found. Raises ConfigError."""
    from serl_chunk_robot.commands.new import find, write_new

    found = find(arguments.address)
    missing = write_new(arguments.file, arguments.driver, found)
    for line in [*found.ports, *found.cameras, *found.addresses, *([found.ros] if found.ros else [])]:
        print(f"found  {line}")
    if missing:
        print(f"{arguments.file} does not load yet: {missing}")
    print(f"Fill in what {arguments.file} marks with FILL IN. Then:\n\n  {arguments.program} serve {arguments.file}")


def _client(arguments: argparse.Namespace, robot: str, role: str) -> RobotClient:
    from serl_chunk_robot.client.client import Keys, RobotClient

    keys = None if arguments.keys is None else Keys.of_file(arguments.keys)
    return RobotClient(robot, name=f"{arguments.command} of {socket.gethostname()}"[:64], role=role, keys=keys)


def _check(arguments: argparse.Namespace) -> int:
    """Check the served robot of a file; returns the exit status. Raises ConfigError or RobotError."""
    from serl_chunk_robot.commands.check import RobotCheck, outcome, write_report
    from serl_chunk_robot.robot_file.config import load

    file = load(arguments.file)
    robot = arguments.robot or f"127.0.0.1:{file.port}"
    folder = arguments.out or arguments.file.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", parameter="--out")

    with _client(arguments, robot, "operator") as operator:
        check = RobotCheck(
            operator, lambda: _client(arguments, robot, "controller"), file, lambda line: print(line, flush=True)
        )
        findings = check.run()
    text, ok = outcome(findings)
    try:
        print(f"check: {text}; {write_report(findings, file.name, folder)}")
    except OSError as e:
        raise ConfigError(f"no report can be written there ({e.strerror or e})", parameter="--out") from e
    return DONE if ok else FAILED


def _teach(arguments: argparse.Namespace) -> None:
    """Write limits that are taught by hand. Raises ConfigError or RobotError."""
    from serl_chunk_robot.commands.teach import extremes, taught, write_taught
    from serl_chunk_robot.robot_file.config import checked, load, load_driver

    if not (0 < arguments.seconds <= 3600 and 0 <= arguments.margin < 1):
        raise ConfigError("teach takes up to 3600 --seconds, and a --margin from 0 to 1 rad")
    file = load(arguments.file)
    out = arguments.out or arguments.file.with_name(f"{arguments.file.stem}_taught.toml")
    if out.exists():
        raise ConfigError(f"{out} exists, and is not overwritten. Choose another name.", parameter="--out")
    spec = load_driver(file).spec()
    with _client(arguments, arguments.robot or f"127.0.0.1:{file.port}", "any") as client:
        low, high = extremes(client, arguments.seconds)
    low, high, still = taught(file, spec, low, high, arguments.margin)
    names = write_taught(file, spec, low, high, out)
    for joint in range(len(low)):
        print(f"joint {joint}  {low[joint]:.3f} to {high[joint]:.3f}" + ("  (the driver's)" if joint in still else ""))
    print(f"{out} has these limits in {', '.join(names)}. Serve it instead of {arguments.file}.")
    try:
        checked(load(out), spec)
    except ConfigError as e:
        print(f"{out} is not served yet: {e}")


def _request(arguments: argparse.Namespace) -> None:
    """Send a command's request and print what the robot does then. Raises ConfigError or RobotError."""
    from serl_chunk_robot.commands import measure, requests

    command = arguments.command
    with _client(arguments, arguments.robot, "any" if command in ("stop", "status") else "operator") as client:
        generation = getattr(arguments, "generation", None)
        if command == "status":
            poses = client.hello()["spec"].get("targets") == "poses"
            _print_status(client.next_state(), "x y z (m) and orientation (rad) of each arm: " if poses else "")
            if arguments.history:
                print("\n".join(requests.history(client)))
        elif command == "end":
            print(requests.end_day(client, generation))
        elif command == "measure":
            cameras, state = client.cameras(), requests.agreed(client, "measure", generation)
            swing = arguments.joint, arguments.angle, [name for name, *_ in cameras], state["generation"]
            print("\n".join(measure.report(measure.record(client, *swing))))
        elif command in requests.MOVING:
            of = {"jog": ("joint", "angle"), "profile": ("name",), "reboot": ("name", "arm_is_supported")}
            values = {name: getattr(arguments, name) for name in of.get(command, ())}
            print(requests.send_moving(client, command, values, generation))
        elif command == "take":
            reply = client.request(command)
            print(f"{reply['state']}: {reply['word']}")
        else:
            print(requests.send_calming(client, command))


def _print_status(state: Dict[str, Any], unit: str) -> None:
    from serl_chunk_robot.commands.requests import shown

    print(shown(state["robot"], state))
    for event, detail in state.get("causes", {}).items():
        print(f"{event}  {detail}")
    process = f" (process {state['process']})" if state["process"] else ""
    print(f"controller  {state['controller'] or 'none'}{process}")
    print(f"profile  {state['profile']} ({state['digest']})")
    late = " ".join("{} {:.1f} ms".format(name, 1e3 * state["late"][name]) for name in ("p50", "p99", "max"))
    print(f"passes  {state['pass']}, late by {late}")
    counts = ", ".join(f"{name} {n}" for name, n in sorted(state["counts"].items()) if n)
    print(f"counted  {counts or 'nothing'}")
    for name in ("q", "set_point"):
        values = state[name]
        print(f"{name}  {unit}{'unknown' if values is None else ' '.join(f'{x:.3f}' for x in values)}")
