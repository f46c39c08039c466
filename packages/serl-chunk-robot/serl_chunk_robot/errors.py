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
