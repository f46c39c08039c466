"""The `serl-chunk` command: parses flags, calls one command, and turns expected errors into one sentence."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from serl_chunk.cli.commands import LISTED, Parser, run_command
from serl_chunk.io import folder_fault, os_reason
from serl_chunk.logs import logging_to_stdout
from serl_chunk.signals import INTERRUPTED, TELLING, answer_signals, before_exit, exit_status
from serl_chunk.types import ConfigError, SerlChunkError
from serl_chunk_robot.output import background_output

logger = logging.getLogger(__name__)

FAILED, WRONG_USAGE = 1, 2
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
    """Run the command line; return the exit status (0 done, 1 failed, 2 wrong usage, 129 and 130 interrupted).

    Without `argv` this process is the command's own: `record` and everything that trains or acts answers signals.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that has no such letters
    # These may move a robot, so that no terminal may stop or fail them; what others print is for `less` and `head`.
    moves = arguments[:1] == ["record"] or arguments[:2] == ["classifier", "record"]
    if arguments and not arguments[0].startswith("-") and not moves:
        with logging_to_stdout():
            return _command(arguments)
    with background_output() as output, logging_to_stdout():
        if argv is not None:
            return _command(arguments)
        answer_signals()
        before_exit(lambda: output.close(TELLING))
        return exit_status(_command(arguments))


def _command(arguments: list[str]) -> int:
    Parser.flags.clear()
    try:
        if arguments and arguments[0] in LISTED:
            return run_command(arguments)
        if arguments and not arguments[0].startswith("-"):
            raise ConfigError(f"unknown command {arguments[0]!r}. Valid: {', '.join(LISTED)}, or flags (--help).")
        from serl_chunk.cli.training import run_training

        return run_training(arguments)
    except SerlChunkError as error:
        return _failed(error, _with_flag(error, arguments), WRONG_USAGE if isinstance(error, ConfigError) else FAILED)
    except KeyboardInterrupt:
        print("serl-chunk: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _failed(error, _os_error(error), FAILED)


def _failed(error: Exception, text: str, status: int) -> int:
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


if __name__ == "__main__":
    raise SystemExit(main())
