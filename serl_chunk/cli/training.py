"""The command without a name: flags of training, acting and evaluation, and what each of them belongs to."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serl_chunk.cli.commands import LISTED, Parser, run_command
from serl_chunk.cli.process import OF_THE_ACTOR, OF_THE_LEARNER, add_aliases, add_experiment_flags, load_flags
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.config.operator import DEVICES
from serl_chunk.logs import add_log_flags, configure, quiet_libraries
from serl_chunk.types import BEST, ONE, ConfigError
from serl_chunk.version import version_info

if TYPE_CHECKING:
    from serl_chunk.cli.actor import LearnerAddress, Task
    from serl_chunk.learner.offline_data import DemoOptions

LOOPBACK = "127.0.0.1"
EVALUATION = "an evaluation (--actor --eval_checkpoint_step N --eval_n_trajs K)"
MODES = {"l": "--learner", "a": "--actor", "b": "--learner --actor", "o": "--local", "e": EVALUATION}
"""Letter of a mode -> the flags that start it. A flag has the letters of the modes in which it has an effect."""
DESCRIPTION = "Reinforcement learning for real robots in action chunks, with a human in the loop."
EXAMPLES = """\
examples:
  serl-chunk record --exp_name fake_aloha --n_demos 20 --out demos/fake_aloha
  serl-chunk --exp_name fake_aloha --learner --actor --demo_path demos/fake_aloha --checkpoint_path runs/first
  serl-chunk --exp_name fake_aloha --actor --eval_checkpoint_step latest --eval_n_trajs 100 --checkpoint_path runs/first
"""
MORE_EXAMPLES = """\
two machines:
  GPU box    serl-chunk --exp_name fake_aloha --learner --bind 0.0.0.0 --demo_path demos/fake_aloha
  robot PC   serl-chunk keys join '...' (once: the line that the learner prints), then
             serl-chunk --exp_name fake_aloha --actor --ip GPU_BOX

an algorithm by its name, on data alone, evaluated meanwhile (serl-chunk presets lists the names):
  serl-chunk --exp_name fake_aloha --learner --preset qc --demo_path demos/fake_aloha \\
      --offline_steps 20000 --online_steps 0 --eval_interval 5000
"""
SHORT = (
    "exp_name", "learner", "actor", "local", "demo_path", "checkpoint_path", "preset", "bind", "ip",
    "eval_checkpoint_step", "eval_n_trajs", "help_all", "version",
)  # fmt: skip
"""Flags of the short help."""


def _epilog() -> str:
    width = max(map(len, LISTED))
    lines = [f"  {name:{width}}  {command.help}" for name, command in LISTED.items()]
    settings = "Any setting of the experiment is a flag too: --config.agent.lr=1e-4 (serl-chunk config EXP lists them)."
    return "\n".join([settings, "", "commands (each with --help):", *lines, "", EXAMPLES])


def training_parser() -> Parser:
    """Return the parser of all flags; an action's `modes` are the letters of `MODES` in which it has an effect."""
    p = Parser(
        prog="serl-chunk",
        usage="serl-chunk --exp_name NAME (--learner | --actor | --learner --actor | --local) [flags]\n"
        "       serl-chunk COMMAND ...",
        description=DESCRIPTION,
        epilog=f"{_epilog()}\n{MORE_EXAMPLES}",
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=30),
        allow_abbrev=False,
        add_help=False,
    )
    group: argparse._ActionsContainer = p

    def add(name: str, help: str, metavar: str | None = None, modes: str = "labeo", **options: Any) -> None:
        if metavar is not None:
            options["metavar"] = metavar
        elif options.keys().isdisjoint(("default", "type", "choices")):
            options.setdefault("action", "store_true")
        group.add_argument(f"--{name}", help=help, **options).modes = modes  # type: ignore[attr-defined]

    p.add_argument("-h", "--help", action="store_true", help="show the most used flags")
    add("help_all", "show all flags")
    add("version", "show version and commit")
    add("exp_name", "a packaged experiment, one in ./experiments, or the path of a .py file", "NAME")
    add("learner", "run the training process (GPU box)")
    add("actor", "run the control loop (robot PC); with --learner: both, here")
    add("local", "both loops in this process, reproducible, without sockets")
    add("seed", "seed of everything random (default: the experiment's)", "N", type=int)
    add("debug", "no wandb")
    add_log_flags(p)
    add_experiment_flags(p)
    add("actors", "actor processes, each with its own simulator (default: 1)", "M", "b", type=int, default=1)
    add("pin_cores", "one core for each actor, the others to learn", modes="b")
    add("launched_with_learner", argparse.SUPPRESS)  # flags of both processes are given to each

    learner = group = p.add_argument_group("learner")
    add("demo_path", "demonstrations: file, folder, data set, run, pattern or LeRobot USER/NAME; repeatable",
        "PATH", "lbo",
        action="append", default=[])  # fmt: skip
    add("demo_format", "what --demo_path is (default: what it looks like)", "FORMAT", "lbo")
    add("demo_fields", "arrays of foreign names: state=A+B,action=C,camera.NAME=D, for one path PATH::TABLE, or a file "
        "of such lines; repeatable (docs/data.md)", "TABLE", "lbo", action="append", default=[])  # fmt: skip
    add("demo_color", "order of stored channels where files have none", modes="lbo", choices=("rgb", "bgr"))
    add("demo_hz", "steps a second where files do not record it", "HZ", "lbo", type=float)
    tolerance = "seconds by which a step may be off its frame in a video (default: half a frame)"
    add("demo_tolerance_s", tolerance, "S", "lbo", type=float)
    add("demo_skip_bad", "leave damaged demonstrations out, and log them", modes="lbo")
    add("demo_env", "OGBench task whose rewards are computed", "TASK", "lbo", default="")
    add("demo_keep_solved", "steps of OGBench's data that begin in a solved state are examples of success, or left out",
        modes="lbo", action=argparse.BooleanOptionalAction, default=True)  # fmt: skip
    learner.add_argument(
        "--demo_proportion", "--dataset_proportion", type=float, default=1.0, metavar="P",
        help="use the first P of them (of OGBench's and D4RL's data: of the steps), and of every shard",
    ).modes = "lbo"  # type: ignore[attr-defined]  # fmt: skip
    add("dataset_dir", "OGBench's .npz files, one after the other, for data larger than memory", "DIR", "lbo")
    group = learner.add_mutually_exclusive_group()
    add("demo_success", "demonstrations that record no outcome succeeded", modes="lbo")
    add("demo_failure", "they failed", modes="lbo")
    add("demo_scores", "rewards by folder, such as score_5=1,score_1=0", "DIR=R,...", "lbo")
    group = learner
    add_aliases(learner, OF_THE_LEARNER)
    add("checkpoint_path", "run folder: created, or resumed (default: runs/EXP_NAME/TIME)", "DIR", "lboe")
    add("dry_run", "show the memory that it needs, check data, statistics, tokenizer and weights, and end", modes="l")
    add("profile", "trace N updates after the first call with JAX's profiler, into the run's profile/", "N", "lbo",
        type=int, default=0)  # fmt: skip
    add("coordinator", "address of process 0, where the processes of one learner meet: one for each machine with GPUs",
        "HOST:PORT", "l")  # fmt: skip
    add("process", "this is number I (0 is the first) of the N processes of one learner", "I/N", "l")
    add("bind", "address to listen on (default: this machine only); 0.0.0.0 for all, with keys, made if absent",
        "ADDRESS", "lb", default=LOOPBACK)  # fmt: skip
    add("metrics_port", "serve its state and its actors' to Prometheus there: PORT of this machine, or ADDRESS:PORT",
        "PORT", "lb")  # fmt: skip
    add("run_page", "show the run's curves and episodes on a page at this port of this machine (0: a free one)", "PORT",
        "lb")  # fmt: skip

    group = p.add_argument_group("actor")
    add_aliases(group, OF_THE_ACTOR)
    add("ip", "the learner's host name or address (default: 127.0.0.1)", "HOST", "ae")
    add("address_file", "find the learner, also one that moved, by RUN/address on a disk that both see", "FILE", "a")
    add("port", "port of the learner; an actor's may be that of a tunnel to it (default: 5588)", "N", "labe", type=int)
    add("spool_path", "keeps what the learner does not have yet; runs/spool unless given", "DIR", "ab")
    add("actor_id", "name of this robot, another for each actor (default: its key's, else actor)", "NAME", "abe")
    add("n_envs", "simulators whose episodes run at once (default: 1; in evaluations 16 of most packaged ones)", "N",
        type=int)  # fmt: skip
    add("undone_by", "a task in turns with this one on the same robot, and its learner: the end of each is the other's "
        "start", "NAME@HOST:PORT", "a")  # fmt: skip
    add("viewer", "show the running robot on a page at this port of this machine (0: a free one)", "PORT", "abe")
    add(
        "eval_checkpoint_step", "evaluate checkpoint N, latest, best or last:N; several in turns, as 5000,best", "N[,N]"
    )
    add("eval_n_trajs", "episodes of the evaluation, for each checkpoint", "K", type=int, default=0)
    add("save_video", "film the evaluation's episodes, or of each checkpoint the first K", "K", "e",
        nargs="?", const=sys.maxsize, default=0, type=int)  # fmt: skip
    add("eval_stochastic", "evaluate the mean policy and the sampled one", modes="e")
    add("eval_arm", "one (the policy's first candidate), best (of agent.candidates) or both in turns", modes="e",
        choices=("one", "best", "both"))  # fmt: skip
    add("eval_until_decided", "end once one of two checkpoints is better; at most K episodes of each", modes="e")
    add("eval_validation", "use the start states that checkpoints are chosen on (for best)", modes="e")

    group = p.add_argument_group("keys (both sides; see serl-chunk keys --help)")
    add("keys", "folder of the keys (default: ~/.config/serl-chunk/keys, used beyond this machine)", "DIR", "labe")
    add("insecure", "no keys: any machine that reaches a learner can feed and read it; on both sides", modes="labe")
    return p


def short_help(parser: Parser) -> str:
    """Return the help of the most used flags."""
    short = Parser(
        prog="serl-chunk", usage=parser.usage, description=DESCRIPTION, epilog=_epilog(), add_help=False,
        formatter_class=parser.formatter_class,
    )  # fmt: skip
    for action in parser._actions:
        if action.dest in SHORT:
            short._add_action(action)
    return short.format_help()


def run_training(arguments: list[str]) -> int:
    """Train, act or evaluate according to the flags, or print help or the version; return the exit status."""
    parser = training_parser()
    flags, flags.rest = parser.parse_known_args(arguments)
    if not arguments or flags.help or flags.help_all:
        print(parser.format_help() if flags.help_all else short_help(parser), end="")
        return 0
    if flags.version:
        print(version_info().text)
        return 0
    configure(flags)
    quiet_libraries()
    if flags.preset == "help":
        return run_command(["presets"])
    config = load_flags(flags)
    mode = check_flags(parser, flags, config)
    if mode == "b":
        return _run_both(flags, arguments)
    if mode in "lo":
        return _run_learning(config, flags)
    from serl_chunk.cli.actor import LearnerAddress, run_training_actor

    address = LearnerAddress.of(flags)
    if mode == "a":
        other = {} if flags.undone_by is None else {"undone_by": _undone_by(flags, address)}
        return run_training_actor(
            config, address, flags.spool_path, viewer=flags.viewer, n_envs=_n_envs(flags), **other
        )
    from serl_chunk.cli.evaluation import EvaluationOptions, run_evaluation

    steps = () if config.actor.policy else _checkpoints(flags.eval_checkpoint_step)
    options = EvaluationOptions(
        steps, flags.eval_n_trajs, flags.save_video, flags.eval_stochastic,
        flags.eval_validation, (ONE, BEST) if flags.eval_arm == "both" else (flags.eval_arm or "",),
        flags.n_envs, flags.eval_until_decided,
    )  # fmt: skip
    source = None if config.actor.policy else Path(flags.checkpoint_path) if flags.checkpoint_path else address
    return run_evaluation(config, options, source, viewer=flags.viewer)


def _undone_by(flags: argparse.Namespace, address: LearnerAddress) -> Task:
    from serl_chunk.cli.actor import Task

    name, _, where = flags.undone_by.rpartition("@")
    host, _, port = where.rpartition(":")
    require(bool(name and host and port.isdigit()), "undone_by",
        f"must be NAME@HOST:PORT, an experiment and its learner, got {flags.undone_by!r}")  # fmt: skip
    config = load_flags(argparse.Namespace(**vars(flags) | {"exp_name": name}))
    return Task(config, dataclasses.replace(address, ip=host, port=int(port), file=None))


def _n_envs(flags: argparse.Namespace) -> int:
    return 1 if flags.n_envs is None else flags.n_envs


def _checkpoints(text: str) -> tuple[str, ...]:
    steps = tuple(step.strip() for step in text.split(","))
    require("" not in steps, "eval_checkpoint_step",
        f"must be checkpoints with commas between them, got {text!r}. Remove what is empty")  # fmt: skip
    return steps


def _run_both(flags: argparse.Namespace, arguments: Sequence[str]) -> int:
    from serl_chunk.cli.keys import DEFAULT_ACTOR, learner_keys
    from serl_chunk.fleet.local import run_both

    learner_keys(flags.bind, flags.keys, insecure=flags.insecure)  # before an actor looks for the one of its own
    name = flags.actor_id or DEFAULT_ACTOR
    actors = [f"{name}-{i + 1}" for i in range(flags.actors)] if flags.actors > 1 else []
    shared = [a for a in arguments if a not in ("--learner", "--actor", "--pin_cores")]
    shared.append("--launched_with_learner")  # flags of the other process are no mistake
    # An actor on this machine reaches what listens everywhere, but not what listens at one other address only.
    anywhere = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}
    return run_both(shared, pin=flags.pin_cores, ip=anywhere.get(flags.bind, flags.bind), actors=actors)


def _run_learning(config: ExperimentConfig, flags: argparse.Namespace) -> int:
    from serl_chunk.learner.building import RunOptions

    demos = demo_options(flags)
    options = RunOptions(
        flags.demo_path, flags.checkpoint_path, demos, wandb=not flags.debug, profile=flags.profile, n_envs=flags.n_envs
    )
    if flags.dry_run:
        from serl_chunk.cli.learner import dry_run

        return dry_run(config, options)
    processes = None
    if flags.coordinator or flags.process:
        from serl_chunk.cli.learner import follow
        from serl_chunk.learner.processes import Processes

        processes = Processes.parse(flags.coordinator, flags.process)
        if processes.index:
            return follow(config, processes)
    if config.learner.online_steps == 0:
        from serl_chunk.cli.learner import run_offline

        return run_offline(config, options, threaded=not flags.local, processes=processes)
    if flags.local:
        from serl_chunk.cli.local import run_local

        return run_local(config, options, n_envs=_n_envs(flags))
    from serl_chunk.cli.learner import run_learner
    from serl_chunk.transport.wire.handshake import DEFAULT_PORT

    port = DEFAULT_PORT if flags.port is None else flags.port
    return run_learner(
        config,
        options,
        bind=flags.bind,
        port=port,
        insecure=flags.insecure,
        keys=flags.keys,
        processes=processes,
        metrics_port=flags.metrics_port,
        run_page=None if flags.run_page is None else int(flags.run_page),
    )


def demo_options(flags: argparse.Namespace) -> DemoOptions:
    """Return how data are read, of `--demo_color` and so on. Raises ConfigError."""
    from serl_chunk.cli.data.options import recorded_facts
    from serl_chunk.learner.offline_data import DemoOptions

    options = recorded_facts(flags, prefix="demo_")
    options = dataclasses.replace(options, solved="keep" if flags.demo_keep_solved else "drop")
    return DemoOptions(options, flags.demo_format, flags.dataset_dir)


def _mode(flags: argparse.Namespace, *, served: bool) -> str:
    """Return the letter of what the flags start; raise ConfigError for contradictions.

    `served`: a policy server decides (`actor.policy`), whose evaluation names no checkpoint.
    """
    evaluating = flags.eval_n_trajs > 0  # without it, 0 means none, as in HIL-SERL
    if not (flags.learner or flags.actor or flags.local):
        raise ConfigError("no mode selected. Give --learner, --actor, both, or --local.")
    require(not flags.local or not (flags.learner or flags.actor), "local",
        "it runs both loops in this process. Remove --learner and --actor.")  # fmt: skip
    require(flags.eval_n_trajs >= 0, "eval_n_trajs", f"must be at least 1, got {flags.eval_n_trajs}")
    require(
        flags.save_video >= 0, "save_video", f"must be a number of episodes, or none for all, got {flags.save_video}"
    )
    if served and evaluating:
        require(flags.eval_checkpoint_step in (None, ""), "eval_checkpoint_step",
            "actor.policy names a policy server, which is evaluated. Remove one of them.")  # fmt: skip
    elif evaluating != (flags.eval_checkpoint_step not in ((None, "") if evaluating else (None, "", "0"))):
        raise ConfigError("an evaluation needs both --eval_checkpoint_step N (or latest, best) and --eval_n_trajs K")
    if evaluating and (flags.learner or not flags.actor):
        raise ConfigError("an evaluation is run by --actor alone. Remove --learner and --local.")
    return "e" if evaluating else "o" if flags.local else "ab"[flags.learner] if flags.actor else "l"


def check_flags(parser: argparse.ArgumentParser, flags: argparse.Namespace, config: ExperimentConfig) -> str:
    """Return the letter of the mode; raise ConfigError for flags without an effect in it or in this experiment."""
    served = bool(config.actor.policy)
    mode = _mode(flags, served=served)
    evaluating = mode == "e"
    for action in () if flags.launched_with_learner else parser._actions:
        modes = getattr(action, "modes", mode)
        require(mode in modes or getattr(flags, action.dest) == action.default, action.dest,
            f"has no effect with {MODES[mode]}. It belongs to {', '.join(MODES[m] for m in modes)}.")  # fmt: skip
    given = {name for name, value in vars(flags).items() if value not in (None, False)}
    offline = config.learner.online_steps == 0 and not evaluating
    own = "it is about a learner's own evaluations. Add --eval_interval N; that of a checkpoint has --eval_n_trajs and "
    server = "has no effect: a policy server is evaluated (actor.policy). Remove it."
    several, device = flags.actors > 1, config.actor.intervention.lower()
    one = f"got {flags.actors}, expected 1"
    of_checkpoints = (
        "checkpoint_path", "ip", "port", "keys", "insecure", "actor_id", "eval_stochastic", "eval_arm",
        "eval_until_decided",
    )  # fmt: skip
    for wrong, name, text in (
        *((served and evaluating and name in given, name, server) for name in of_checkpoints),
        (evaluating and {"checkpoint_path", "ip"} <= given, "ip",
         "--checkpoint_path names the checkpoint too. Remove one of them."),
        ("address_file" in given and bool({"ip", "port"} & given) and not flags.launched_with_learner, "address_file",
         "it names host and port. Remove --ip and --port."),
        (evaluating and {"checkpoint_path", "keys"} <= given, "keys",
         "it is for a learner at --ip; --checkpoint_path needs none. Remove one of them."),
        ({"keys", "insecure"} <= given, "insecure", "it means no keys, and --keys is given. Remove one of them."),
        ("eval_arm" in given and config.agent.candidates == 1, "eval_arm",
         f"{flags.eval_arm} has no effect: agent.candidates is 1, so one candidate acts. Remove it."),
        (flags.eval_until_decided and (flags.n_envs or 1) > 1, "n_envs",
         f"--eval_until_decided plays one episode after the other (got {flags.n_envs}, expected 1). Remove it."),
        ("eval_episodes" in given and not config.eval_interval, "eval_episodes", f"{own}--save_video."),
        ("video_episodes" in given and not config.eval_interval, "video_episodes", f"{own}--save_video."),
        ("dataset_replace_interval" in given and "dataset_dir" not in given, "dataset_replace_interval",
         "it is about the shards of a data set. Add --dataset_dir DIR."),
        ("n_envs" in given and mode == "l" and not (config.eval_interval or flags.launched_with_learner),
         "n_envs", "a learner alone has no simulators but those of its own evaluations. Add --eval_interval N."),
        (flags.n_envs is not None and flags.n_envs < 1, "n_envs", f"must be at least 1, got {flags.n_envs}"),
        (flags.dry_run and bool({"coordinator", "process"} & given), "dry_run",
         "it counts the devices of one process. Remove --coordinator and --process."),
        (flags.profile < 0, "profile", f"must be a number of updates, or 0 for none, got {flags.profile}"),
        (flags.profile > 0 and config.agent.iterates, "profile",
         f"it counts updates, and agent {config.agent.kind} trains in iterations. Remove it."),
        (flags.actors < 1, "actors", f"must be at least 1 process, got {flags.actors}"),
        (several and config.robot.real, "actors",
         f"each would drive the same robot ({one}). Start one --actor for each robot, with its own --actor_id."),
        (several and config.actor.clock == "realtime", "actors",
         f"in real time they make each other late ({one}). Give --config.actor.clock=lockstep."),
        (several and device in DEVICES, "actors",
         f"one {device} moves one robot ({one}). Give --config.actor.intervention=none or scripted."),
        (several and flags.viewer not in (None, "0"), "viewer",
         f"{flags.viewer} is one port, and --actors has {flags.actors} pages. Give 0: each takes a free one."),
        (not (flags.run_page or "0").isdecimal(), "run_page",
         f"must be a port, got {flags.run_page!r}: the page is served to this machine alone (127.0.0.1). Give a port, "
         "and forward it with ssh -L."),
        (offline and flags.actor, "online_steps", "0 trains without actors. Remove --actor."),
        (offline and (flags.bind != LOOPBACK or {"port", "keys", "insecure", "metrics_port", "run_page"} & given),
         "online_steps",
         "0 has no network. Remove --bind, --port, --keys, --insecure, --metrics_port and --run_page."),
    ):  # fmt: skip
        require(not wrong, name, text)
    return mode
