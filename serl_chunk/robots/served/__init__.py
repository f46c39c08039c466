"""A robot behind a robot server as an environment: arms, cameras, the operator's requests, a simulated task."""

from __future__ import annotations

from pathlib import Path

from serl_chunk.config.robots import RobotConfig
from serl_chunk_robot.client.client import ANSWER, Keys, RobotClient


def connect(config: RobotConfig, name: str, role: str = "any", answer: float = ANSWER) -> RobotClient:
    """Return a client of the server of `config`, see RobotClient. Raises ConfigError for an address or file of keys."""
    keys = Keys.of_file(Path(config.server_keys).expanduser()) if config.server_keys else None
    return RobotClient(config.server, name=name, role=role, keys=keys, answer=answer)
