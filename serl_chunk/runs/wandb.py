"""Weights & Biases as a mirror of what `metrics.jsonl` records."""

from __future__ import annotations

import logging
import netrc
import os
import secrets
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WANDB_ID_FILE = "wandb_id.txt"

logger = logging.getLogger(__name__)


class WandbMirror:
    """The wandb run of one run folder; it never raises.

    wandb fails in many unrelated ways (its own errors, sockets, a dead service process, no disk, not installed): a
    failure is one warning, and the mirror stays off.

    Args:
        run_dir: holds wandb's files and the id under which a restart continues the same wandb run.
        settings: arguments of `wandb.init`: project, name and config.
        offline: keep wandb's files for a later `wandb sync`; WANDB_MODE overrides it.
        on_failure: called with the warning that is logged when the mirror goes off.
    """

    def __init__(
        self, run_dir: Path, settings: Mapping[str, Any], *, offline: bool, on_failure: Callable[[str], None]
    ) -> None:
        self._on_failure = on_failure
        self._run: Any = None
        self._run = self._try("start", lambda: _start_wandb(run_dir, settings, offline))

    def log(self, numbers: Mapping[str, float]) -> None:
        """Show one row of numbers; does nothing where the mirror is off."""
        if self._run is not None:
            self._try("log", lambda: self._run.log(dict(numbers)))

    def finish(self) -> None:
        """End the wandb run; may be called twice."""
        if self._run is not None:
            self._try("finish", lambda: self._run.finish())
        self._run = None

    def _try(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # see above: there is no list of what wandb raises
            self._run, reason = None, f"{type(error).__name__}: {error}"
            text = f"wandb: {what} failed ({reason}). It is off from here on, metrics.jsonl goes on"
            logger.warning(text)
            self._on_failure(text)


def _start_wandb(run_dir: Path, settings: Mapping[str, Any], offline: bool) -> Any:
    try:
        import wandb  # takes a second to import, and is not needed where the mirror is off
    except ImportError as error:
        raise ImportError("wandb is not installed: pip install wandb, or pass --debug to train without it") from error

    id_file = run_dir / WANDB_ID_FILE
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(4))
    mode: Any = os.environ.get("WANDB_MODE") or ("offline" if offline or not _wandb_usable() else "online")
    quiet = wandb.Settings(console="off", silent=True, init_timeout=30)  # the terminal belongs to the status line
    name = id_file.read_text().strip()
    run = wandb.init(**settings, id=name, resume="allow", dir=str(run_dir), mode=mode, settings=quiet)
    # After a resume `step` may go back, which wandb's own step counter would refuse.
    run.define_metric("*", step_metric="step")
    if mode == "offline":
        reason = "without a key or a network, or by choice"
        logger.info(f"wandb is offline ({reason}). Upload the run later with wandb sync {Path(run.dir).parent}")
    return run


def _wandb_usable() -> bool:
    """Return whether wandb's server answers and there is a key; else wandb would wait, or prompt on the terminal."""
    url = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    host = url.hostname or ""
    if not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")):
        try:
            if netrc.netrc(os.environ.get("NETRC")).authenticators(host) is None:
                return False
        except (OSError, netrc.NetrcParseError):
            return False
    if url.scheme in urllib.request.getproxies():
        return True  # only the proxy knows
    try:
        socket.create_connection((host, url.port or (443 if url.scheme == "https" else 80)), timeout=3).close()
    except OSError:
        return False
    return True
