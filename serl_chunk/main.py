"""The `serl-chunk` command: parses flags, calls one command, and turns expected errors into one sentence."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from serl_chunk.types import ConfigError, SerlChunkError

LOOPBACK = "127.0.0.1"
EPILOG = """\
Any field of the experiment can be set: --config.agent.lr=1e-4 --config.replay.demo_fraction=uniform

two machines:
  GPU box    serl-chunk --exp_name fake_aloha --learner --bind 0.0.0.0 --demo_path demos/fake_aloha
  robot PC   serl-chunk keys join '...' (once: the line that the learner prints), then
             serl-chunk --exp_name fake_aloha --actor --ip GPU_BOX
one machine:
  serl-chunk --exp_name fake_aloha --learner --actor --demo_path demos/fake_aloha --checkpoint_path runs/first
evaluate:
  serl-chunk --exp_name fake_aloha --actor --eval_checkpoint_step latest --eval_n_trajs 100 --checkpoint_path runs/first

an algorithm by its name, on data alone, evaluated meanwhile (serl-chunk presets lists the names):
  serl-chunk --exp_name fake_aloha --learner --preset qc --demo_path demos/fake_aloha --offline_steps 20000 \
      --online_steps 0 --eval_interval 5000

other commands (each with --help): serl-chunk record, serl-chunk data, serl-chunk report, serl-chunk keys,
serl-chunk doctor, serl-chunk presets
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0 done, 1 failed, 2 wrong usage, 130 interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that has no such letters
    commands = {
        "record": _record, "report": _report, "keys": _keys, "doctor": _doctor, "data": _data, "presets": _presets
    }  # fmt: skip
    try:
        if arguments and arguments[0] in commands:
            return commands[arguments[0]](arguments[1:])
        if arguments and not arguments[0].startswith("-"):
            raise ConfigError(f"unknown command {arguments[0]!r}; valid: {', '.join(commands)}, or flags (--help)")
        return _run(arguments)
    except ConfigError as error:
        print(f"serl-chunk: {error}", file=sys.stderr)
        return 2
    except SerlChunkError as error:
        print(f"serl-chunk: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("serl-chunk: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing its usage and exiting: one sentence, like every other mistake."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    from serl_chunk.commands.aliases import add_experiment_flags, add_learner_flags

    p = _Parser(
        prog="serl-chunk",
        description="Reinforcement learning for real robots in action chunks, with a person in the loop.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--exp_name", help="a packaged experiment, one in ./experiments, or the path of a .py file")
    p.add_argument("--learner", action="store_true", help="run the training process (GPU box)")
    p.add_argument("--actor", action="store_true", help="run the control loop (robot PC); with --learner: both, here")
    p.add_argument("--local", action="store_true", help="both loops in this process, reproducible, without sockets")
    p.add_argument("--seed", type=int, help="seed of everything random (default: the experiment's)")
    p.add_argument("--debug", action="store_true", help="no wandb")
    add_experiment_flags(p)
    learner = p.add_argument_group("learner")
    learner.add_argument(
        "--demo_path", action="append", default=[], metavar="PATH",
        help="demonstrations: a file, folder, data set, run or pattern; repeatable",
    )  # fmt: skip
    learner.add_argument("--demo_format", metavar="FORMAT", help="what --demo_path is (default: what it looks like)")
    learner.add_argument("--demo_color", choices=("rgb", "bgr"), help="order of stored channels where files have none")
    learner.add_argument("--demo_hz", type=float, metavar="HZ", help="steps a second where files do not record it")
    learner.add_argument("--demo_env", default="", metavar="TASK", help="OGBench task whose rewards are computed")
    learner.add_argument(
        "--demo_solved", choices=("drop", "keep"), default="keep",
        help="steps of OGBench's data that begin in a solved state: left out, or examples of success (default: keep)",
    )  # fmt: skip
    learner.add_argument(
        "--demo_proportion", "--dataset_proportion", type=float, default=1.0, metavar="P",
        help="use the first P of them, and of every shard",
    )  # fmt: skip
    learner.add_argument(
        "--dataset_dir", metavar="DIR", help="OGBench's .npz files, one after the other, for data larger than memory"
    )
    ended = learner.add_mutually_exclusive_group()
    ended.add_argument("--demo_success", action="store_true", help="demonstrations that record no outcome succeeded")
    ended.add_argument("--demo_failure", action="store_true", help="they failed")
    ended.add_argument("--demo_scores", metavar="DIR=R,...", help="rewards by folder, such as score_5=1,score_1=0")
    add_learner_flags(learner)
    learner.add_argument(
        "--checkpoint_path", metavar="DIR", help="run folder: created, or resumed (default: runs/EXP_NAME/TIME)"
    )
    learner.add_argument(
        "--bind",
        default=LOOPBACK,
        help="address to listen on; 0.0.0.0 for all. Beyond this machine keys are used, and made where there are none "
        "(default: this machine only)",
    )
    actor = p.add_argument_group("actor")
    actor.add_argument("--ip", help="the learner's host name or address (default: 127.0.0.1)")
    actor.add_argument("--port", type=int, help="first of the learner's three ports (default: 5588)")
    actor.add_argument(
        "--spool_path", metavar="DIR", help="keeps what the learner does not have yet; runs/spool unless given"
    )
    actor.add_argument("--actor_id", default="actor", help="name of this robot; differs between simultaneous actors")
    actor.add_argument("--eval_checkpoint_step", default="0", metavar="N", help="evaluate checkpoint N, latest or best")
    actor.add_argument("--eval_n_trajs", type=int, default=0, metavar="K", help="episodes of the evaluation")
    actor.add_argument("--save_video", action="store_true", help="film the evaluation's episodes")
    actor.add_argument("--eval_stochastic", action="store_true", help="evaluate the mean policy and the sampled one")
    actor.add_argument(
        "--eval_validation", action="store_true", help="use the start states that checkpoints are chosen on (for best)"
    )
    network = p.add_argument_group("keys (both sides; see serl-chunk keys --help)")
    network.add_argument(
        "--keys",
        metavar="DIR",
        help="folder of the keys (default: ~/.config/serl-chunk/keys, used beyond this machine)",
    )
    network.add_argument(
        "--insecure",
        action="store_true",
        help="no keys: everybody who reaches a learner can feed and read it (you are warned); on both sides",
    )
    p.add_argument(
        "--pin_cores", action="store_true", help="with both flags: one core for the actor, the others to learn"
    )
    return p


def _run(arguments: list[str]) -> int:
    parser = _parser()
    flags, rest = parser.parse_known_args(arguments)
    from serl_chunk.commands.aliases import load_flags, refuse_what_has_no_use
    from serl_chunk.transport.sockets import DEFAULT_PORT

    _quiet_libraries()
    if flags.preset == "help":
        return _presets([])
    config = load_flags(flags, rest)
    evaluating = flags.eval_checkpoint_step not in ("0", "")
    port = DEFAULT_PORT if flags.port is None else flags.port
    if not (flags.learner or flags.actor or flags.local):
        raise ConfigError("say what to run: --learner, --actor, both, or --local")
    if evaluating != (flags.eval_n_trajs > 0):
        raise ConfigError("an evaluation needs both --eval_checkpoint_step N (or latest, best) and --eval_n_trajs K")
    _refuse_what_would_be_ignored(flags, evaluating)
    refuse_what_has_no_use(flags, config, networked=_networked(flags), evaluating=evaluating)
    if config.learner.online_steps == 0 and not evaluating:
        from serl_chunk.commands.offline import run_offline
        from serl_chunk.commands.training_data import DemoReading

        return run_offline(
            config,
            flags.demo_path,
            flags.checkpoint_path,
            wandb=not flags.debug,
            threaded=not flags.local,
            reading=DemoReading.of(flags),
        )
    if flags.local:
        from serl_chunk.commands.local import run_local
        from serl_chunk.commands.training_data import DemoReading

        reading = DemoReading.of(flags)
        return run_local(config, flags.demo_path, flags.checkpoint_path, wandb=not flags.debug, reading=reading)
    if flags.learner and flags.actor:
        from serl_chunk.commands.both import run_both
        from serl_chunk.commands.keys import learner_keys

        learner_keys(flags.bind, flags.keys, insecure=flags.insecure)  # before an actor looks for the one of its own
        shared = [a for a in arguments if a not in ("--learner", "--actor", "--pin_cores")]
        # An actor on this machine reaches what listens everywhere, but not what listens at one other address only.
        anywhere = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}
        return run_both(shared, pin=flags.pin_cores, ip=anywhere.get(flags.bind, flags.bind))
    if flags.learner:
        from serl_chunk.commands.learner import run_learner
        from serl_chunk.commands.training_data import DemoReading

        return run_learner(
            config,
            flags.demo_path,
            flags.checkpoint_path,
            bind=flags.bind,
            port=port,
            insecure=flags.insecure,
            wandb=not flags.debug,
            keys=flags.keys,
            reading=DemoReading.of(flags),
        )
    from serl_chunk.commands.actor import run_evaluation, run_training_actor

    if evaluating:
        return run_evaluation(
            config,
            flags.eval_checkpoint_step,
            flags.eval_n_trajs,
            checkpoint_path=flags.checkpoint_path,
            ip=flags.ip,
            port=port,
            actor_id=flags.actor_id,
            save_video=flags.save_video,
            stochastic=flags.eval_stochastic,
            validation=flags.eval_validation,
            keys=flags.keys,
            insecure=flags.insecure,
        )
    return run_training_actor(
        config,
        ip=flags.ip or "127.0.0.1",
        port=port,
        actor_id=flags.actor_id,
        spool_path=flags.spool_path,
        keys=flags.keys,
        insecure=flags.insecure,
    )


def _networked(flags: argparse.Namespace) -> bool:
    """Whether a flag says how learner and actor find each other."""
    return flags.bind != LOOPBACK or flags.port is not None or flags.keys is not None or flags.insecure


def _refuse_what_would_be_ignored(flags: argparse.Namespace, evaluating: bool) -> None:
    """A flag that means nothing beside the others is a mistake, and silence would hide it."""
    if flags.local and (flags.learner or flags.actor):
        raise ConfigError("--local runs both loops in this process: leave --learner and --actor out")
    if evaluating and (flags.learner or flags.local or not flags.actor):
        raise ConfigError("an evaluation is run by --actor alone: leave --learner and --local out")
    for name in ("save_video", "eval_stochastic", "eval_validation"):
        if getattr(flags, name) and not evaluating:
            raise ConfigError(f"--{name} belongs to an evaluation: add --eval_checkpoint_step N and --eval_n_trajs K")
    if flags.pin_cores and not (flags.learner and flags.actor):
        raise ConfigError("--pin_cores shares this machine's cores between --learner and --actor: it needs both flags")
    if flags.ip is not None and flags.learner:
        raise ConfigError("--ip names the learner of another machine's actor: leave it out beside --learner")
    if flags.keys is not None and flags.insecure:
        raise ConfigError("--insecure means no keys: leave it out, or --keys")
    if flags.local and (flags.keys is not None or flags.insecure):
        raise ConfigError("--local has no network: leave --keys and --insecure out")
    if flags.keys is not None and evaluating and flags.checkpoint_path is not None:
        raise ConfigError("--keys is for a learner at --ip: leave it out beside --checkpoint_path")


def _record(arguments: list[str]) -> int:
    p = _Parser(prog="serl-chunk record", description="Record demonstrations as HDF5 episodes.", allow_abbrev=False)
    p.add_argument("--exp_name", help="the experiment whose robot and task are recorded")
    p.add_argument("--n_demos", type=int, default=10, help="successful episodes the folder shall hold (default: 10)")
    p.add_argument("--out", required=True, metavar="DIR", help="folder for episode_0.hdf5, episode_1.hdf5, ...")
    p.add_argument("--policy", default="scripted", help="who demonstrates (default: scripted)")
    p.add_argument("--noise", type=float, help="standard deviation of the expert's noise, radians")
    p.add_argument(
        "--cameras",
        metavar="NAMES",
        help="cameras to record, separated by commas, or all, or none (default: those the experiment's agent looks at)",
    )
    from serl_chunk.commands.aliases import add_experiment_flags, load_flags

    add_experiment_flags(p)
    flags, rest = p.parse_known_args(arguments)
    from serl_chunk.commands.record import run_record
    from serl_chunk.commands.setup import spec_of

    config = load_flags(flags, rest)
    cameras = config.agent.image_keys
    if flags.cameras is not None:
        cameras = tuple(c for c in flags.cameras.split(",") if c)
        if cameras == ("all",):
            cameras = tuple(c.name for c in spec_of(config).cameras)
        elif cameras == ("none",):
            cameras = ()
    return run_record(config, flags.n_demos, flags.out, policy=flags.policy, noise=flags.noise, cameras=cameras)


def _report(arguments: list[str]) -> int:
    p = _Parser(prog="serl-chunk report", description="Write report.html and report.png of a run.", allow_abbrev=False)
    p.add_argument("run", help="a run folder")
    flags = p.parse_args(arguments)
    from serl_chunk.learner.report import build_report

    print(build_report(flags.run))
    return 0


def _presets(arguments: list[str]) -> int:
    p = _Parser(prog="serl-chunk presets", description="List the algorithms that --preset names.", allow_abbrev=False)
    p.parse_args(arguments)
    from serl_chunk.commands.aliases import run_presets

    return run_presets()


def _data(arguments: list[str]) -> int:
    from serl_chunk.commands.data import run_data

    return run_data(arguments, _Parser)


def _keys(arguments: list[str]) -> int:
    p = _Parser(
        prog="serl-chunk keys",
        description="Keys let robot PCs talk to a learner over a network, and nobody else. The first learner with "
        "--bind makes them and prints the line for the first robot PC; these commands are for the others.",
        allow_abbrev=False,
    )
    folder = _Parser(add_help=False)
    folder.add_argument("--keys", metavar="DIR", help="the key folder (default: ~/.config/serl-chunk/keys)")
    commands = p.add_subparsers(dest="command", required=True, metavar="init|add|join|list|revoke")
    commands.add_parser("init", parents=[folder], help="learner's machine: make its keys")
    add = commands.add_parser(
        "add", parents=[folder], help="learner's machine: print the line with which one robot PC joins"
    )
    add.add_argument("name", metavar="NAME", help="what to call the robot PC")
    add.add_argument("--host", help="where the robot PC finds the learner (default: this machine's address)")
    add.add_argument("--port", type=int, help="first of the learner's three ports (default: 5588)")
    join = commands.add_parser("join", parents=[folder], help="robot PC: take the line that the learner's side printed")
    join.add_argument("line", metavar="LINE", help="the line's last word; valid once, for ten minutes")
    join.add_argument("--ip", help="where the learner is, if not where the line says")
    commands.add_parser("list", parents=[folder], help="who may connect here, and which learners were joined from here")
    revoke = commands.add_parser("revoke", parents=[folder], help="learner's machine: let a robot PC in no more")
    revoke.add_argument("name", metavar="NAME", help="one that `serl-chunk keys list` names")
    flags = p.parse_args(arguments)
    from serl_chunk.commands import keys
    from serl_chunk.transport.sockets import DEFAULT_PORT, check_port

    if flags.command == "add":
        port = DEFAULT_PORT if flags.port is None else flags.port
        check_port(port)
        return keys.run_add(flags.keys, flags.name, host=flags.host, port=port)
    if flags.command == "join":
        return keys.run_join(flags.keys, flags.line, ip=flags.ip)
    if flags.command == "revoke":
        return keys.run_revoke(flags.keys, flags.name)
    return keys.run_init(flags.keys) if flags.command == "init" else keys.run_list(flags.keys)


def _doctor(arguments: list[str]) -> int:
    p = _Parser(
        prog="serl-chunk doctor",
        description="On the robot PC, with the actor's flags: says what stands between it and the learner, with the "
        "remedy of everything that is not right. Ports, keys, version, experiment, round trip, throughput, clock, "
        "disks, devices, and whether the link carries what the experiment records. Takes seconds, records nothing, and "
        "may be run while actors work. Exit status 1 where something failed.",
        allow_abbrev=False,
    )
    p.add_argument("--exp_name", help="the experiment; without it, what depends on one is left out")
    p.add_argument("--ip", default="127.0.0.1", help="the learner's host name or address (default: 127.0.0.1)")
    p.add_argument("--port", type=int, help="first of the learner's three ports (default: 5588)")
    p.add_argument("--keys", metavar="DIR", help="folder of the keys (default: ~/.config/serl-chunk/keys)")
    p.add_argument("--insecure", action="store_true", help="use no keys")
    p.add_argument("--actor_id", default="actor", help="name that the robot will have; it is not taken meanwhile")
    p.add_argument("--spool_path", metavar="DIR", help="where the actor will keep its records; runs/spool unless given")
    p.add_argument("--json", metavar="FILE", help="also write the checks and their figures there")
    from serl_chunk.commands.aliases import add_experiment_flags, load_flags

    add_experiment_flags(p)
    flags, rest = p.parse_known_args(arguments)
    from serl_chunk.commands.doctor import Where, run_doctor
    from serl_chunk.transport.sockets import DEFAULT_PORT

    if flags.keys is not None and flags.insecure:
        raise ConfigError("--insecure means no keys: leave it out, or --keys")
    if rest and flags.exp_name is None:
        raise ConfigError("--config changes an experiment: give its --exp_name too")
    _quiet_libraries()
    config = load_flags(flags, rest) if flags.exp_name is not None else None
    port = DEFAULT_PORT if flags.port is None else flags.port
    where = Where(flags.ip, port, flags.keys, flags.insecure, flags.actor_id, flags.spool_path)
    return run_doctor(config, where, flags.json)


def _quiet_libraries() -> None:
    """Orbax narrates every save, and XLA every start, where a user looks for our own lines."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from absl import logging

    logging.set_verbosity(logging.WARNING)


if __name__ == "__main__":
    raise SystemExit(main())
