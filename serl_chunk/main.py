"""The `serl-chunk` command: parses flags, calls one command, and turns expected errors into one sentence."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from serl_chunk.cli.logs import add_log_flags, configure, logging_to_stdout
from serl_chunk.cli.output import background_output
from serl_chunk.cli.signals import INTERRUPTED, TELLING, answer_signals, before_exit, exit_status
from serl_chunk.cli.subcommands import COMMANDS, Parser, quiet_libraries
from serl_chunk.types import ConfigError, SerlChunkError

logger = logging.getLogger(__name__)

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
  serl-chunk --exp_name fake_aloha --learner --preset qc --demo_path demos/fake_aloha \\
      --offline_steps 20000 --online_steps 0 --eval_interval 5000

other commands (each with --help): serl-chunk record, serl-chunk data, serl-chunk report, serl-chunk keys,
serl-chunk doctor, serl-chunk presets
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0 done, 1 failed, 2 wrong usage, 129 and 130 interrupted).

    Without `argv` this process is the command's own: `record` and everything that trains or acts answers signals.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that has no such letters
    # These may move a robot, so that no terminal may stop or fail them; what others print is for `less` and `head`.
    if arguments and not arguments[0].startswith("-") and arguments[0] != "record":
        with logging_to_stdout():
            return _command(arguments)
    with background_output() as output, logging_to_stdout():
        if argv is not None:
            return _command(arguments)
        answer_signals()
        before_exit(lambda: output.close(TELLING))
        return exit_status(_command(arguments))


def _command(arguments: list[str]) -> int:
    """Run one command; expected errors become one line and an exit status."""
    try:
        if arguments and arguments[0] in COMMANDS:
            return COMMANDS[arguments[0]](arguments[1:])
        if arguments and not arguments[0].startswith("-"):
            raise ConfigError(f"unknown command {arguments[0]!r}; valid: {', '.join(COMMANDS)}, or flags (--help)")
        return _run(arguments)
    except SerlChunkError as error:
        logger.debug(f"failed: {error}")  # for the log file
        print(f"serl-chunk: {_with_flag(error, arguments)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("serl-chunk: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _with_flag(error: SerlChunkError, arguments: Sequence[str]) -> str:
    """Return the error's text with the flag that sets the parameter at fault in place of its name."""
    if not error.parameter or not str(error).startswith(f"{error.parameter}: "):
        return str(error)
    from serl_chunk.cli.flags import flag_of

    return flag_of(error.parameter, arguments, Parser.flags) + str(error)[len(error.parameter) :]


def _parser() -> argparse.ArgumentParser:
    from serl_chunk.cli.flags import add_experiment_flags, add_learner_flags

    p = Parser(
        prog="serl-chunk",
        description="Reinforcement learning for real robots in action chunks, with a human in the loop.",
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
    add_log_flags(p)
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
        "--demo_keep_solved", action=argparse.BooleanOptionalAction, default=True,
        help="steps of OGBench's data that begin in a solved state are examples of success, or left out",
    )  # fmt: skip
    learner.add_argument("--demo_solved", choices=("drop", "keep"), help=argparse.SUPPRESS)  # a former name
    learner.add_argument(
        "--demo_proportion", "--dataset_proportion", type=float, default=1.0, metavar="P",
        help="use the first P of them (of OGBench's and D4RL's data: of the steps), and of every shard",
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
    actor.add_argument(
        "--actor_id",
        help="name of this robot; differs between simultaneous actors (default: the name of its key, else actor)",
    )
    actor.add_argument("--eval_checkpoint_step", metavar="N", help="evaluate checkpoint N, latest or best")
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
        help="no keys: any machine that reaches a learner can feed and read it (you are warned); on both sides",
    )
    p.add_argument(
        "--launched_with_learner", action="store_true", help=argparse.SUPPRESS
    )  # both were given: all flags are
    p.add_argument(
        "--pin_cores", action="store_true", help="with both flags: one core for the actor, the others to learn"
    )
    return p


def _run(arguments: list[str]) -> int:
    parser = _parser()
    flags, rest = parser.parse_known_args(arguments)
    from serl_chunk.cli.flags import check_flag_combinations, load_flags
    from serl_chunk.transport.sockets import DEFAULT_PORT

    configure(flags)
    quiet_libraries()
    if flags.preset == "help":
        return COMMANDS["presets"]([])
    config = load_flags(flags, rest)
    evaluating = flags.eval_n_trajs > 0  # without it, 0 asks for none, as in HIL-SERL
    port = DEFAULT_PORT if flags.port is None else flags.port
    if not (flags.learner or flags.actor or flags.local):
        raise ConfigError("say what to run: --learner, --actor, both, or --local")
    if flags.eval_n_trajs < 0:
        raise ConfigError(f"--eval_n_trajs must be at least 1, got {flags.eval_n_trajs}")
    if evaluating != (flags.eval_checkpoint_step not in ((None, "") if evaluating else (None, "", "0"))):
        raise ConfigError("an evaluation needs both --eval_checkpoint_step N (or latest, best) and --eval_n_trajs K")
    _refuse_what_would_be_ignored(parser, flags, evaluating)
    check_flag_combinations(flags, config, networked=_networked(flags), evaluating=evaluating)
    if config.learner.online_steps == 0 and not evaluating:
        from serl_chunk.cli.demos import DemoOptions
        from serl_chunk.cli.learner import run_offline

        return run_offline(
            config,
            flags.demo_path,
            flags.checkpoint_path,
            wandb=not flags.debug,
            threaded=not flags.local,
            demo_options=DemoOptions.of(flags),
        )
    if flags.local:
        from serl_chunk.cli.demos import DemoOptions
        from serl_chunk.cli.local import run_local

        demo_options = DemoOptions.of(flags)
        return run_local(
            config, flags.demo_path, flags.checkpoint_path, wandb=not flags.debug, demo_options=demo_options
        )
    if flags.learner and flags.actor:
        from serl_chunk.cli.keys import learner_keys
        from serl_chunk.cli.launch import run_both

        learner_keys(flags.bind, flags.keys, insecure=flags.insecure)  # before an actor looks for the one of its own
        shared = [a for a in arguments if a not in ("--learner", "--actor", "--pin_cores")]
        shared.append("--launched_with_learner")  # flags of the other one are no mistake
        # An actor on this machine reaches what listens everywhere, but not what listens at one other address only.
        anywhere = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}
        return run_both(shared, pin=flags.pin_cores, ip=anywhere.get(flags.bind, flags.bind))
    if flags.learner:
        from serl_chunk.cli.demos import DemoOptions
        from serl_chunk.cli.learner import run_learner

        return run_learner(
            config,
            flags.demo_path,
            flags.checkpoint_path,
            bind=flags.bind,
            port=port,
            insecure=flags.insecure,
            wandb=not flags.debug,
            keys=flags.keys,
            demo_options=DemoOptions.of(flags),
        )
    from serl_chunk.cli.actor import LearnerAddress, run_training_actor
    from serl_chunk.cli.evaluate import EvaluationOptions, run_evaluation

    address = LearnerAddress(flags.ip or LOOPBACK, port, flags.actor_id, flags.keys, flags.insecure)
    if not evaluating:
        return run_training_actor(config, address, flags.spool_path)
    options = EvaluationOptions(
        flags.eval_checkpoint_step,
        flags.eval_n_trajs,
        save_video=flags.save_video,
        stochastic=flags.eval_stochastic,
        validation=flags.eval_validation,
    )
    return run_evaluation(config, options, Path(flags.checkpoint_path) if flags.checkpoint_path else address)


def _networked(flags: argparse.Namespace) -> bool:
    """Whether a flag says how learner and actor find each other."""
    return flags.bind != LOOPBACK or flags.port is not None or flags.keys is not None or flags.insecure


_DATA = (
    "demo_path", "demo_format", "demo_color", "demo_hz", "demo_env", "demo_keep_solved", "demo_solved",
    "demo_proportion", "dataset_dir", "demo_success", "demo_failure", "demo_scores",
)  # fmt: skip
_NOT_OF = {
    "an evaluation": (*_DATA, "bind", "spool_path"),
    "--actor": (*_DATA, "bind", "checkpoint_path"),
    "--learner": ("spool_path", "actor_id"),
    "--local": ("bind", "port", "spool_path", "actor_id", "ip"),
}


def _refuse_what_would_be_ignored(parser: argparse.ArgumentParser, flags: argparse.Namespace, evaluating: bool) -> None:
    """A flag that means nothing beside the others is a mistake, and silence would hide it."""
    if flags.local and (flags.learner or flags.actor):
        raise ConfigError("--local runs both loops in this process: leave --learner and --actor out")
    if evaluating and (flags.learner or flags.local or not flags.actor):
        raise ConfigError("an evaluation is run by --actor alone: leave --learner and --local out")
    for name in ("save_video", "eval_stochastic", "eval_validation"):
        if getattr(flags, name) and not evaluating:
            raise ConfigError(f"--{name} belongs to an evaluation: add --eval_checkpoint_step N and --eval_n_trajs K")
    role = "an evaluation" if evaluating else "--local" if flags.local else "" if flags.learner else "--actor"
    unused = _NOT_OF.get(role or ("" if flags.actor else "--learner"), ())
    for name in () if flags.launched_with_learner else unused:
        if getattr(flags, name) != parser.get_default(name):
            raise ConfigError(f"--{name} means nothing to {role or '--learner'}: leave it out")
    if evaluating and flags.checkpoint_path is not None and flags.ip is not None:
        raise ConfigError("--checkpoint_path and --ip both say where the checkpoint is: leave one of them out")
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


if __name__ == "__main__":
    raise SystemExit(main())
