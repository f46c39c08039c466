"""The table of commands, and the parser of their flags."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

from serl_chunk.logs import configure
from serl_chunk.types import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing its usage and exiting."""

    flags: ClassVar[set[str]] = set()
    """Flags of the current command, with their dashes."""

    def parse_known_args(self, *args: Any, **keywords: Any) -> Any:
        Parser.flags.update(self._option_string_actions)
        return super().parse_known_args(*args, **keywords)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


class Command(NamedTuple):
    """A command. Its module is imported when it is given: `serl-chunk keys` waits for no JAX.

    WORD is the command's last one, with underscores. The module has `WORD_command(flags) -> exit status` and, unless
    there are no flags, `WORD_flags(parser)`, which may also set the parser's description.
    """

    help: str  # a line in the list of commands
    module: str = ""  # in serl_chunk.cli; empty: it only groups commands of two words
    settings: bool = False  # unknown arguments are settings of an experiment, as `flags.rest`
    words: bool = False  # what follows `--` is another command line, as `flags.words`


COMMANDS = {
    "experiments": Command("list the experiments that --exp_name names", "experiments"),
    "config": Command("show an experiment's settings, with units and meaning", "experiments", settings=True),
    "new": Command("write an experiment for your own robot, which runs as it is", "experiments"),
    "record": Command("record demonstrations", "record", settings=True),
    "teleoperate": Command("drive a robot by the device, and record nothing", "record", settings=True),
    "serve": Command("serve a policy to programs that speak openpi's protocol", "serve", settings=True),
    "data": Command("convert, export, inspect and check demonstrations"),
    "data convert": Command("into HDF5 files, or a LeRobot data set", "data.convert"),
    "data merge": Command("several paths into one folder of HDF5 files, copies once", "data.convert"),
    "data rename-task": Command("another text for a task, in the files of its episodes", "data.convert"),
    "data repair": Command("what is whole of a damaged data set, as a new one; lists what is left out", "data.convert"),
    "data export": Command("a run's episodes, also while it goes on", "data.convert"),
    "data inspect": Command("what these episodes hold, on one screen; exit status 1 for a fault", "data.inspect"),
    "data check": Command("the same for machines: a line for each fault, exit status 1 for one", "data.inspect"),
    "data stats": Command("mean, std, q01 and q99 of states and actions, as openpi's norm_stats.json", "data.inspect"),
    "data encoder": Command("HIL-SERL's pretrained ResNet-10 as a file for agent.encoder.weights", "data.convert"),
    "pi0": Command("look into checkpoints of openpi, import and export them"),
    "pi0 inspect": Command("list a checkpoint's parameters and statistics", "pi0"),
    "pi0 import": Command("write agent.pi0.weights of a checkpoint", "pi0", settings=True),
    "pi0 export": Command("write a run's parameters as openpi's checkpoint", "pi0", settings=True),
    "view": Command("look at episodes in a browser, and label them", "view"),
    "classifier": Command("record, train and test a success classifier"),
    "classifier record": Command("frames of both outcomes, labelled by a key", "classifier_record", settings=True),
    "classifier train": Command("on runs, data sets or HIL-SERL's classifier_data, into a folder", "classifier"),
    "classifier test": Command("figures on other episodes, and a table of those that it misjudges", "classifier"),
    "attention": Command("fit and test an alarm on a fall of Q, for the operator"),
    "attention fit": Command("learn the threshold from the episodes of runs, for operator.attention", "attention"),
    "attention test": Command("precision and recall by episode, on runs that it was not fitted on", "attention"),
    "check-policy": Command(
        "compare a run's policy with demonstrations before it moves anything; exit status 1 for a fault",
        "check_policy",
        settings=True,
    ),
    "memory": Command("the memory that a learner will need on its devices and in its host", "memory", settings=True),
    "example": Command("write a small trained run into a folder, to try without training", "example"),
    "presets": Command("list the algorithms that --preset names", "experiments"),
    "report": Command("write the report of a run", "runs"),
    "rollback": Command("let a run go on from an earlier policy version", "runs"),
    "fleet": Command("start a learner and many actors on this machine, Ray or Slurm", "fleet", words=True),
    "fleet status": Command("the state of each process, and of each actor at the learner", "fleet"),
    "fleet stop": Command("end the actors and the learner of a fleet", "fleet"),
    "fleet write": Command("manifests of a fleet for Kubernetes, to edit", "fleet", words=True),
    "sweep": Command(
        "run an experiment with several seeds and settings, on this machine, Ray or Slurm", "sweep", words=True
    ),
    "keys": Command("admit robot PCs to a learner over a network"),
    "keys init": Command("learner's machine: make its keys", "keys"),
    "keys add": Command("learner's machine: print the line of one robot PC", "keys"),
    "keys join": Command("robot PC: take the line that the learner's side printed", "keys"),
    "keys list": Command("who may connect here, and which learners were joined from here", "keys"),
    "keys revoke": Command("learner's machine: let a robot PC in no more", "keys"),
    "doctor": Command("check what lies between a robot PC and its learner", "doctor.doctor", settings=True),
    "robot": Command("the serl-chunk-robot command, for PCs that drive a robot"),
    "robot dry": Command("listed by `robot`, as replay", "robot.dry"),
    "robot replay": Command("listed by `robot`", "robot.replay"),
}
LISTED = {name: command for name, command in COMMANDS.items() if " " not in name}


def word_of(name: str) -> str:
    """Return what the names of a command's functions begin with: WORD of `Command`."""
    return name.split()[-1].replace("-", "_")


def run_command(arguments: Sequence[str]) -> int:
    """Run the command that the first words name; return its exit status. Raises SerlChunkError."""
    words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name = " ".join(arguments[:words])
    command, rest = COMMANDS[name], list(arguments[words:])
    if name == "robot":
        from serl_chunk_robot.main import main

        return main(rest, program="serl-chunk robot")
    parser = Parser(prog=f"serl-chunk {name}", description=command.help, allow_abbrev=False)
    if not command.module:
        own = [each.removeprefix(f"{name} ") for each in COMMANDS if each.startswith(f"{name} ")]
        listed = parser.add_subparsers(required=True, metavar="|".join(own))
        for word in own:
            listed.add_parser(word, help=COMMANDS[f"{name} {word}"].help)
        parser.parse_args(rest)  # prints the list, or raises
        parser.error("options come after the command's second word")
    module, word = importlib.import_module(f"serl_chunk.cli.{command.module}"), word_of(name)
    getattr(module, f"{word}_flags", lambda parser: None)(parser)
    end = rest.index("--") if command.words and "--" in rest else len(rest)
    rest, flags_of_other = rest[:end], rest[end + 1 :]
    flags, flags.rest = parser.parse_known_args(rest) if command.settings else (parser.parse_args(rest), [])
    flags.words = flags_of_other
    if "log_level" in flags:
        configure(flags)
    return int(getattr(module, f"{word}_command")(flags))
