"""The errors of both distributions: what is wrong, what is valid, and the remedy."""

from __future__ import annotations


class SerlChunkError(Exception):
    """Base of the package's errors: what is wrong, what is valid, and the remedy, printed without a traceback.

    `parameter` is the setting or argument at fault (`agent.lr`). It starts the text; the command line shows its flag.
    """

    def __init__(self, message: str = "", *, parameter: str = "") -> None:
        super().__init__(f"{parameter}: {message}" if parameter else message)
        self.message, self.parameter = message, parameter


class ConfigError(SerlChunkError, ValueError):
    """A configuration value, flag or combination of them that cannot work."""


class DataError(SerlChunkError, ValueError):
    """A file or record whose content is not what it must be."""


class UserCodeError(SerlChunkError):
    """An exception that the user's code raised while it ran; `__cause__` has its trace."""


def named_once(name: str, error: Exception) -> str:
    """Return an error's text that begins with a name, also where the error begins with it or with a key of it."""
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return text if text.startswith((f"{name}:", f"{name}.")) else f"{name}: {text}"
