"""The `serl-chunk` command: parses flags, calls one command, and turns expected errors into one sentence."""

from __future__ import annotations

import difflib
import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from serl_chunk.cli.commands import COMMANDS, LISTED, Parser, run_command
from serl_chunk.io import folder_fault, os_reason
from serl_chunk.logs import log_path, logging_to_stdout
from serl_chunk.signals import INTERRUPTED, TELLING, answer_signals, before_exit, exit_status
from serl_chunk.types import ConfigError, SerlChunkError, UserCodeError
from serl_chunk_robot.output import background_output

logger = logging.getLogger(__name__)

FAILED, WRONG_USAGE = 1, 2
BROKEN_PIPE = 128 + signal.SIGPIPE
REMEDIES = {
    errno.ENOSPC: "Free space on that disk.",
    errno.EDQUOT: "Free space within your quota.",
    errno.EACCES: "Check its permissions.",
    errno.EPERM: "Check its permissions.",
    errno.EROFS: "That disk is read-only: choose another path.",
    errno.ENOENT: "Check the path.",
    errno.ENOTDIR: "Check the path: a part of it is a file.",
    errno.EISDIR: "Check the path: it is a folder.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 done, 1 failed, 2 wrong usage, 129, 130 interrupted, 141 unread.

    Without `argv` this process is the command's own: `record` and everything that trains or acts answers signals.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (`>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that has no such letters
    # These may move a robot, so that no terminal may stop or fail them; what others print is for `less` and `head`.
    moves = arguments[:1] == ["record"] or arguments[:2] == ["classifier", "record"]
    if arguments and not arguments[0].startswith("-") and not moves:
        with logging_to_stdout():
            return _printed(arguments)
    with background_output() as output, logging_to_stdout():
        if argv is not None:
            return _command(arguments)
        answer_signals()
        before_exit(lambda: output.close(TELLING))
        return exit_status(_command(arguments))


def _printed(arguments: list[str]) -> int:
    """Run a command whose output may be read in part, as by `head`."""
    try:
        try:
            return _command(arguments)
        finally:
            sys.stdout.flush()  # here: where it fails at the interpreter's end, that prints about it
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _command(arguments: list[str]) -> int:
    Parser.flags.clear()
    try:
        if arguments and arguments[0] in LISTED:
            return run_command(arguments)
        if arguments and not arguments[0].startswith("-"):
            raise ConfigError(f"unknown command {arguments[0]!r}. {_meant(arguments[0])}")
        from serl_chunk.cli.training import run_training

        return run_training(arguments)
    except SerlChunkError as error:
        status = WRONG_USAGE if isinstance(error, ConfigError) else FAILED
        return _failed(error, _with_flag(error, arguments), status, trace=isinstance(error, UserCodeError))
    except KeyboardInterrupt:
        print("serl-chunk: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough
        raise
    except Exception as error:
        from serl_chunk.config.loader import in_users_code, user_error

        if in_users_code(error):
            return _failed(error, str(user_error(error, kind=UserCodeError)), FAILED, trace=True)
        text = _os_error(error) if isinstance(error, OSError) else _jax_error(error)
        if text is None:
            raise
        return _failed(error, text, FAILED)


OTHERS = {  # words for which this program has flags, or another command
    **dict.fromkeys(("train", "learn", "learner"), "--exp_name NAME --learner --actor"),
    **dict.fromkeys(("actor", "rollout", "run"), "--exp_name NAME --actor"),
    **dict.fromkeys(
        ("eval", "evaluate"), "--exp_name NAME --actor --eval_checkpoint_step latest --checkpoint_path RUN"
    ),
}


def _meant(word: str) -> str:
    """The command that a word may stand for, else all of them."""
    second = {name.split()[-1]: name for name in reversed(COMMANDS)}  # of two, the first
    words = {**second, **OTHERS, **{name: name for name in LISTED}}
    near = difflib.get_close_matches(word.lower(), words, 1, cutoff=0.7)
    if near:
        return f"Did you mean serl-chunk {words[near[0]]}?"
    return f"Valid: {', '.join(LISTED)}, or flags (--help)."


def _failed(error: Exception, text: str, status: int, *, trace: bool = False) -> int:
    text = ", ".join([text, *getattr(error, "__notes__", ())])  # in which episode
    text += f". The trace is in {log_path()}" if trace else ""
    logger.debug(f"failed: {text}", exc_info=error)  # for the log file
    print(f"serl-chunk: {text}", file=sys.stderr)
    return status


def _with_flag(error: SerlChunkError, arguments: Sequence[str]) -> str:
    """Return the error's text with the flag that sets the parameter at fault in place of its name."""
    if not error.parameter:
        return str(error)
    from serl_chunk.cli.process import flag_of

    return f"{flag_of(error.parameter, arguments, Parser.flags)}: {error.message}"


def _os_error(error: OSError) -> str:
    if isinstance(error, NotADirectoryError) and error.filename is not None:
        return folder_fault(Path(os.fsdecode(error.filename)), error)
    named = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    remedy = REMEDIES.get(error.errno or 0, "Check that it exists and can be read and written.")
    return f"{named or 'a file or connection'}: it could not be used ({os_reason(error)}). {remedy}"


def _jax_error(error: Exception) -> str | None:
    """Return the text for a platform that JAX cannot use here; None: it is not at fault."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(error, RuntimeError | AssertionError):
        return None
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as fault:  # the latter where a plugin is not installed
        reason = str(fault).partition(" (set ")[0] or "it is not installed"
        return (
            f"JAX_PLATFORMS={jax.config.jax_platforms}: JAX cannot use that here ({reason}). Unset it, or set it to "
            "cpu; for an NVIDIA GPU, pip install 'jax[cuda12]'"
        )
    return None


if __name__ == "__main__":
    raise SystemExit(main())
