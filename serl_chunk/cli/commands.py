"""The table of commands, and the parser of their flags."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

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
    """A command of its own.

    Its module has `DESCRIPTION`, `add_flags(parser)` and `run(flags, rest) -> exit status`, and is imported when the
    command is given: `serl-chunk keys` waits for no JAX.
    """

    help: str  # a line in the list of commands
    module: str
    takes: Literal["flags", "settings", "words"] = "flags"
    """What `rest` is: nothing; unknown arguments, as settings of an experiment are; or all, in place of flags."""


COMMANDS = {
    "experiments": Command("list the experiments that --exp_name names", "serl_chunk.cli.experiments"),
    "config": Command("show an experiment's settings, with units and meaning", "serl_chunk.cli.config", "settings"),
    "new": Command("write an experiment for your own robot, which runs as it is", "serl_chunk.cli.new"),
    "record": Command("record demonstrations", "serl_chunk.cli.record", "settings"),
    "serve": Command("serve a policy to programs that speak openpi's protocol", "serl_chunk.cli.serve", "settings"),
    "data": Command("convert, export, inspect and check demonstrations", "serl_chunk.cli.data.data"),
    "pi0": Command("look into checkpoints of openpi, import and export them", "serl_chunk.cli.pi0", "settings"),
    "view": Command("look at episodes in a browser, and label them", "serl_chunk.cli.view"),
    "classifier": Command("record, train and test a success classifier", "serl_chunk.cli.classifier"),
    "attention": Command("fit and test an alarm on a fall of Q, for the operator", "serl_chunk.cli.attention"),
    "presets": Command("list the algorithms that --preset names", "serl_chunk.cli.presets"),
    "report": Command("write the report of a run", "serl_chunk.cli.report"),
    "rollback": Command("let a run go on from an earlier policy version", "serl_chunk.cli.rollback"),
    "keys": Command("admit robot PCs to a learner over a network", "serl_chunk.cli.keys"),
    "doctor": Command("check what lies between a robot PC and its learner", "serl_chunk.cli.doctor.doctor", "settings"),
    "robot": Command("the serl-chunk-robot command, for PCs that drive a robot", "serl_chunk.cli.robot.robot", "words"),
}
OF_TWO_WORDS: dict[tuple[str, ...], Command] = {  # listed by the command of their first word
    ("classifier", "record"): Command("", "serl_chunk.cli.classifier_record", "settings"),
    ("robot", "dry"): Command("", "serl_chunk.cli.robot.dry"),
    ("robot", "replay"): Command("", "serl_chunk.cli.robot.replay"),
}


def run_command(arguments: Sequence[str]) -> int:
    """Run the command that the first words name; return its exit status. Raises SerlChunkError."""
    command, words = OF_TWO_WORDS.get(tuple(arguments[:2])), 2
    if command is None:
        command, words = COMMANDS[arguments[0]], 1
    module, rest = importlib.import_module(command.module), list(arguments[words:])
    flags = argparse.Namespace()
    if command.takes != "words":
        name = " ".join(["serl-chunk", *arguments[:words]])
        parser = Parser(prog=name, description=module.DESCRIPTION, allow_abbrev=False)
        module.add_flags(parser)
        flags, rest = parser.parse_known_args(rest) if command.takes == "settings" else (parser.parse_args(rest), [])
    return int(module.run(flags, rest))
