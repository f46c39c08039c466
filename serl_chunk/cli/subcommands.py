"""The commands other than training. Their modules are imported when they run: `serl-chunk keys` waits for no JAX."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

from serl_chunk.logs import add_log_flags, configure
from serl_chunk.types import ConfigError, RobotSpec


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing its usage and exiting."""

    flags: ClassVar[set[str]] = set()
    """Flags of the current command, with their dashes."""

    def parse_known_args(self, *args: Any, **keywords: Any) -> Any:
        Parser.flags.update(self._option_string_actions)
        return super().parse_known_args(*args, **keywords)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser(name: str, description: str) -> Parser:
    return Parser(prog=f"serl-chunk {name}", description=description, allow_abbrev=False)


def quiet_libraries() -> None:
    """Silence Orbax at saves and XLA at the start, whose lines would hide those of this package."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from absl import logging

    logging.set_verbosity(logging.WARNING)


def _record(arguments: list[str]) -> int:
    p = _parser(
        "record",
        "Record demonstrations as HDF5 episodes: of the robot's script, or by hand with the device of "
        "actor.intervention. Each episode by hand begins at the first motion, and each file is checked once it is "
        "written. The same command continues an interrupted recording.",
    )
    p.add_argument("--exp_name", help="the experiment whose robot and task are recorded")
    p.add_argument("--n_demos", type=int, default=10, help="successful episodes the folder shall hold (default: 10)")
    p.add_argument("--out", required=True, metavar="DIR", help="folder for episode_0.hdf5, episode_1.hdf5, ...")
    p.add_argument("--policy", metavar="WHO", help="who demonstrates: scripted (default), human, or server "
                   "(actor.policy, the default where it is set)")  # fmt: skip
    p.add_argument("--keep", default="successes", metavar="WHAT",
                   help="of a human or server: successes (default), or all judged")  # fmt: skip
    p.add_argument("--noise", type=float, help="standard deviation of the script's noise, radians")
    p.add_argument("--cameras", metavar="A,B", help="cameras to record: names, all, or none (default: the agent's)")
    p.add_argument("--viewer", metavar="PORT", help="show the robot on a page at this port of this machine (0: any)")
    p.add_argument("--ip", help="also stream the successes into the running learner at this address")
    p.add_argument("--port", type=int, help="first of the learner's three ports (default: 5588)")
    p.add_argument("--keys", metavar="DIR", help="folder of the keys (default: ~/.config/serl-chunk/keys)")
    p.add_argument("--insecure", action="store_true", help="use no keys")
    p.add_argument("--actor_id", help="name of this robot at the learner (default: as --actor)")
    p.add_argument("--spool_path", metavar="DIR", help="where records on their way are kept (default: runs/spool)")
    from serl_chunk.cli.process import add_experiment_flags, load_flags, spec_of

    add_experiment_flags(p)
    add_log_flags(p)
    flags, rest = p.parse_known_args(arguments)
    configure(flags)
    from serl_chunk.cli.record import run_record

    config = load_flags(flags, rest)
    spec, cameras = spec_of(config), config.agent.image_keys
    if flags.cameras is not None:
        cameras = _recorded_cameras(flags.cameras, spec)
    policy = flags.policy or ("server" if config.actor.policy else "scripted")
    record = partial(
        run_record, config, flags.n_demos, flags.out,
        policy=policy, noise=flags.noise, cameras=cameras, keep=flags.keep, viewer=flags.viewer,
    )  # fmt: skip
    if flags.ip is None:
        for name in ("port", "keys", "insecure", "actor_id", "spool_path"):
            if getattr(flags, name):
                raise ConfigError("is of the learner that --ip names. Give --ip too, or remove it", parameter=name)
        return record()
    if flags.keys is not None and flags.insecure:
        raise ConfigError("--insecure means no keys: leave it out, or --keys")
    if missing := [name for name in config.agent.image_keys if name not in cameras]:
        got = f"lacks {missing[0]!r}, which the learner trains on (got {', '.join(cameras) or 'none'})"
        raise ConfigError(f"{got}. Leave --cameras out, or --ip", parameter="cameras")
    from serl_chunk.cli.keys import LearnerAddress
    from serl_chunk.cli.record import record_streaming
    from serl_chunk.transport.sockets import DEFAULT_PORT

    quiet_libraries()
    port = DEFAULT_PORT if flags.port is None else flags.port
    address = LearnerAddress(flags.ip, port, flags.actor_id, flags.keys, flags.insecure)
    return record_streaming(config, address, flags.spool_path, record)


def _serve(arguments: list[str]) -> int:
    p = _parser(
        "serve",
        "Serve a policy by openpi-client's protocol, for programs that send observations and execute the chunks that "
        "come back: that of a run's checkpoint, or a learner's newest. Several clients are decided together.",
    )
    from serl_chunk.cli.process import add_experiment_flags, load_flags

    p.add_argument("--exp_name", help="the experiment that the policy was trained in")
    p.add_argument("--checkpoint_path", metavar="RUN", help="the run folder whose checkpoint is served")
    p.add_argument("--checkpoint_step", metavar="N", help="the checkpoint: a step, latest (default) or best")
    p.add_argument("--ip", help="follow the learner at this address instead, as an actor does")
    p.add_argument("--learner_port", type=int, help="first of the learner's three ports (default: 5588)")
    p.add_argument("--keys", metavar="DIR", help="folder of this machine's keys for that learner")
    p.add_argument("--actor_id", help="name of this server at the learner (default: as --actor)")
    p.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)")
    p.add_argument("--port", type=int, default=8000, metavar="N", help="port to listen on (default: %(default)s)")
    p.add_argument("--api_key", metavar="FILE", help="clients must send the key in this file; needed beyond loopback")
    p.add_argument("--insecure", action="store_true", help="no keys, of clients and for the learner")
    p.add_argument("--max_batch", type=int, default=8, metavar="N", help="clients decided at once (default: 8)")
    add_experiment_flags(p)
    add_log_flags(p)
    flags, rest = p.parse_known_args(arguments)
    configure(flags)
    quiet_libraries()
    from serl_chunk.cli.serve import ServeOptions, run_serve

    return run_serve(load_flags(flags, rest), ServeOptions.of(flags))


def _report(arguments: list[str]) -> int:
    p = _parser("report", "Write report.html and report.png of a run, or one page that compares several.")
    p.add_argument("run", nargs="+", help="a run folder; several are compared")
    p.add_argument("--out", metavar="FILE", help="of a comparison (default: report_vs_<others>.html in the first run)")
    p.add_argument("--films", type=int, default=0, metavar="N", help="also film the newest N training episodes")
    flags = p.parse_args(arguments)
    if len(flags.run) > 1:
        if flags.films:
            raise ConfigError("is for the report of one run. Remove it, or give one run", parameter="films")
        from serl_chunk.runs.report.compare import build_comparison

        print(build_comparison(flags.run, flags.out))
        return 0
    if flags.out is not None or flags.films < 0:
        raise ConfigError("--out is for a comparison of runs, and --films is 0 or more")
    if flags.films:
        from serl_chunk.runs.films import film_training_episodes

        film_training_episodes(Path(flags.run[0]), flags.films)
    from serl_chunk.runs.report.report import build_report

    print(build_report(flags.run[0]))
    return 0


def _rollback(arguments: list[str]) -> int:
    p = _parser(
        "rollback",
        "Let a run go on from an earlier policy version, after its learner was stopped. The checkpoints after it are "
        "moved aside, all recorded episodes stay, and the next snapshots have new versions.",
    )
    p.add_argument("run", metavar="RUN", help="the run folder")
    p.add_argument("--to", type=int, metavar="VERSION", help="a policy version with a checkpoint (default: list them)")
    flags = p.parse_args(arguments)
    quiet_libraries()
    from serl_chunk.cli.rollback import run_rollback

    return run_rollback(Path(flags.run).expanduser(), flags.to)


def _presets(arguments: list[str]) -> int:
    _parser("presets", "List the algorithms that --preset names.").parse_args(arguments)
    from serl_chunk.cli.experiments import run_presets

    return run_presets()


def _experiments(arguments: list[str]) -> int:
    _parser("experiments", "List the experiments: name, robot, purpose.").parse_args(arguments)
    from serl_chunk.cli.experiments import run_experiments

    return run_experiments()


def _config(arguments: list[str]) -> int:
    p = _parser("config", "Show an experiment's settings: value, unit, meaning. * marks what differs from the default.")
    p.add_argument("exp_name", metavar="EXP", help="a packaged experiment, one in ./experiments, or a .py file")
    p.add_argument("field", nargs="?", default="", metavar="FIELD", help="a setting or a group, such as agent.critic")
    from serl_chunk.cli.experiments import run_config
    from serl_chunk.cli.process import add_experiment_flags, load_flags

    add_experiment_flags(p)
    flags, rest = p.parse_known_args(arguments)
    return run_config(load_flags(flags, rest), flags.field)


def _new(arguments: list[str]) -> int:
    p = _parser("new", "Write an experiment with a small robot, to fill in with yours.")
    p.add_argument("file", metavar="FILE", help="the file to write, such as my_robot.py; it must not exist")
    flags = p.parse_args(arguments)
    from serl_chunk.cli.experiments import run_new

    return run_new(flags.file)


def _data(arguments: list[str]) -> int:
    from serl_chunk.cli.data import convert, inspect

    p = _parser("data", "Episodes at rest: into this project's formats and out of them, and what is in them.")
    commands = p.add_subparsers(dest="command", required=True, metavar="convert|export|inspect|check|stats|encoder")
    convert.add_parsers(commands)
    inspect.add_parsers(commands)
    flags = p.parse_args(arguments)
    return int(flags.run(flags))


def _pi0(arguments: list[str]) -> int:
    from serl_chunk.cli import pi0

    quiet_libraries()
    return pi0.run(_parser("pi0", pi0.DESCRIPTION), arguments)


def _view(arguments: list[str]) -> int:
    p = _parser(
        "view",
        "Look at the episodes of a run, file or folder in a browser of this machine: list and filter all of them, "
        "play cameras, curves, Q and interventions, and label them as success, failure or discarded. The address "
        "holds a secret; other machines cannot connect.",
    )
    from serl_chunk.cli.view import add_flags, run_view

    add_flags(p)
    return run_view(p.parse_args(arguments))


def _classifier(arguments: list[str]) -> int:
    from serl_chunk.cli import classifier

    if arguments[:1] == ["record"]:  # it takes the settings of an experiment
        return _classifier_record(arguments[1:])
    p = _parser("classifier", "A network that looks at cameras and decides whether the task succeeded.")
    commands = p.add_subparsers(dest="command", required=True, metavar="record|train|test")
    commands.add_parser("record", help="record frames of success and failure, labelled by a key", add_help=False)
    classifier.add_parsers(commands)
    flags = p.parse_args(arguments)
    return int(flags.run(flags))


def _attention(arguments: list[str]) -> int:
    from serl_chunk.cli import attention

    p = _parser("attention", "An alarm on a fall of Q, which draws the operator's attention to a failure to come.")
    commands = p.add_subparsers(dest="command", required=True, metavar="fit|test")
    attention.add_parsers(commands)
    flags = p.parse_args(arguments)
    return int(flags.run(flags))


def _classifier_record(arguments: list[str]) -> int:
    p = _parser(
        "classifier record",
        "Record episodes with a label for each frame: the key s switches 'this is a success' on and off, f ends an "
        "episode. You move the robot with the device of actor.intervention. The same command continues.",
    )
    p.add_argument("--exp_name", help="the experiment whose robot is recorded")
    p.add_argument("--out", required=True, metavar="DIR", help="folder for the episodes and frame_labels.json")
    p.add_argument("--successes", type=int, default=200, metavar="N", help="frames of success (default: %(default)s)")
    p.add_argument("--failures", type=int, default=1000, metavar="N", help="frames of failure (default: %(default)s)")
    p.add_argument("--cameras", metavar="A,B", help="cameras to record: names or all (default: all)")
    from serl_chunk.cli.process import add_experiment_flags, load_flags, spec_of

    add_experiment_flags(p)
    add_log_flags(p)
    flags, rest = p.parse_known_args(arguments)
    configure(flags)
    from serl_chunk.cli.classifier_record import run_record_labels

    config = load_flags(flags, rest)
    cameras = _recorded_cameras(flags.cameras or "all", spec_of(config))
    return run_record_labels(config, flags.out, cameras=cameras, successes=flags.successes, failures=flags.failures)


def _recorded_cameras(text: str, spec: RobotSpec) -> tuple[str, ...]:
    from serl_chunk.cli.data.options import parse_cameras

    named = parse_cameras(text)
    cameras = tuple(c.name for c in spec.cameras) if named is None else named
    if twice := [c for i, c in enumerate(cameras) if c in cameras[:i]]:
        raise ConfigError(f"{twice[0]!r} is named twice. Remove one of them.", parameter="cameras")
    return cameras


def _keys(arguments: list[str]) -> int:
    p = _parser(
        "keys",
        "Keys let robot PCs talk to a learner over a network, and no other machine. The first learner with "
        "--bind makes them and prints the line for the first robot PC; these commands are for the others.",
    )
    folder = Parser(add_help=False)
    folder.add_argument("--keys", metavar="DIR", help="the key folder (default: ~/.config/serl-chunk/keys)")
    commands = p.add_subparsers(dest="command", required=True, metavar="init|add|join|list|revoke")
    commands.add_parser("init", parents=[folder], help="learner's machine: make its keys")
    add = commands.add_parser("add", parents=[folder], help="learner's machine: print the line of one robot PC")
    add.add_argument("name", metavar="NAME", help="what to call the robot PC")
    add.add_argument("--host", help="where the robot PC finds the learner (default: this machine's address)")
    add.add_argument("--port", type=int, help="first of the learner's three ports (default: 5588)")
    join = commands.add_parser("join", parents=[folder], help="robot PC: take the line that the learner's side printed")
    join.add_argument("line", metavar="LINE", help="the line's last word; valid once, for ten minutes")
    join.add_argument("--ip", help="where the learner is, if not at the line's address")
    commands.add_parser("list", parents=[folder], help="who may connect here, and which learners were joined from here")
    revoke = commands.add_parser("revoke", parents=[folder], help="learner's machine: let a robot PC in no more")
    revoke.add_argument("name", metavar="NAME", help="one that `serl-chunk keys list` names")
    flags = vars(p.parse_args(arguments))
    from serl_chunk.cli import keys

    run: Callable[..., int] = getattr(keys, f"run_{flags.pop('command')}")
    return run(flags.pop("keys"), **flags)


def _doctor(arguments: list[str]) -> int:
    p = _parser(
        "doctor",
        "On the robot PC, with the actor's flags: checks ports, keys, version, experiment, round trip, throughput, "
        "clock, disks, devices, and whether the link carries what the experiment records, with a remedy for each "
        "fault. Takes seconds, records nothing, and may run while actors work. Exit status 1 where something failed.",
    )
    p.add_argument("--exp_name", help="the experiment; without it, what depends on one is left out")
    p.add_argument("--ip", default="127.0.0.1", help="the learner's host name or address (default: 127.0.0.1)")
    p.add_argument("--port", type=int, help="first of the learner's three ports (default: 5588)")
    p.add_argument("--keys", metavar="DIR", help="folder of the keys (default: ~/.config/serl-chunk/keys)")
    p.add_argument("--insecure", action="store_true", help="use no keys")
    p.add_argument("--actor_id", help="name that the robot will have; it is not taken meanwhile (default: as --actor)")
    p.add_argument("--spool_path", metavar="DIR", help="where the actor will keep its records; runs/spool unless given")
    p.add_argument("--json", metavar="FILE", help="also write the checks and their figures there")
    from serl_chunk.cli.process import add_experiment_flags, load_flags

    add_experiment_flags(p)
    flags, rest = p.parse_known_args(arguments)
    from serl_chunk.cli.doctor.doctor import run_doctor
    from serl_chunk.cli.keys import LearnerAddress
    from serl_chunk.transport.sockets import DEFAULT_PORT

    if flags.keys is not None and flags.insecure:
        raise ConfigError("--insecure means no keys: leave it out, or --keys")
    if rest and flags.exp_name is None:
        raise ConfigError("--config changes an experiment: give its --exp_name too")
    quiet_libraries()
    config = load_flags(flags, rest) if flags.exp_name is not None else None
    port = DEFAULT_PORT if flags.port is None else flags.port
    where = LearnerAddress(flags.ip, port, flags.actor_id, flags.keys, flags.insecure)
    return run_doctor(config, where, flags.spool_path, flags.json)


def _robot(arguments: list[str]) -> int:
    if arguments[:1] in (["dry"], ["replay"]):  # these read episodes
        from serl_chunk.cli import robot

        command = robot.COMMANDS[arguments[0]]
        p = _parser(f"robot {arguments[0]}", command.description)
        command.add(p)
        return command.run(p.parse_args(arguments[1:]))
    from serl_chunk_robot.main import main

    return main(arguments, program="serl-chunk robot")


class Command(NamedTuple):
    """A command of its own: what it runs, and a line for the help."""

    run: Callable[[list[str]], int]
    summary: str


COMMANDS: dict[str, Command] = {
    "experiments": Command(_experiments, "list the experiments that --exp_name names"),
    "config": Command(_config, "show an experiment's settings, with units and meaning"),
    "new": Command(_new, "write an experiment for your own robot, which runs as it is"),
    "record": Command(_record, "record demonstrations"),
    "serve": Command(_serve, "serve a policy to programs that speak openpi's protocol"),
    "data": Command(_data, "convert, export, inspect and check demonstrations"),
    "pi0": Command(_pi0, "look into checkpoints of openpi, import and export them"),
    "view": Command(_view, "look at episodes in a browser, and label them"),
    "classifier": Command(_classifier, "record, train and test a success classifier"),
    "attention": Command(_attention, "fit and test an alarm on a fall of Q, for the operator"),
    "presets": Command(_presets, "list the algorithms that --preset names"),
    "report": Command(_report, "write the report of a run"),
    "rollback": Command(_rollback, "let a run go on from an earlier policy version"),
    "keys": Command(_keys, "admit robot PCs to a learner over a network"),
    "doctor": Command(_doctor, "check what lies between a robot PC and its learner"),
    "robot": Command(_robot, "the serl-chunk-robot command, for PCs that drive a robot"),
}
