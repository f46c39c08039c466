"""An episode as an MCAP file for Foxglove. The only module that imports mcap, on use.

Topics: `/camera/<name>` (foxglove.CompressedImage), `/state` and `/action` (`values`), `/reward`, `/source`,
`/decision/q` where decisions recorded values. Every message is JSON with a schema. Time is that of the recorded stamps
from the first step on; without stamps, that of the ticks.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.validate import cameras_of
from serl_chunk.io import atomic_path, format_bytes, os_faults
from serl_chunk.types import STATE, ConfigError, DataError, Episode
from serl_chunk.types import Source as Actor
from serl_chunk.viewer.content import frame_file, media_type
from serl_chunk.viewer.export import check_absent

_TIME = {"type": "object", "properties": {"sec": {"type": "integer"}, "nsec": {"type": "integer"}}}
_NUMBERS = {"type": "array", "items": {"type": "number"}}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "foxglove.CompressedImage": {
        "timestamp": _TIME,
        "frame_id": {"type": "string"},
        "format": {"type": "string"},
        "data": {"type": "string", "contentEncoding": "base64"},
    },
    "serl_chunk.Values": {"tick": {"type": "integer"}, "values": _NUMBERS},
    "serl_chunk.Value": {"tick": {"type": "integer"}, "value": {"type": "number"}},
    "serl_chunk.Text": {"tick": {"type": "integer"}, "value": {"type": "string"}},
}


def write_mcap(path: Path, episode: Episode, hz: float | None) -> str:
    """Write `episode` to `path`, whole or not at all, and return a line about it.

    Raises:
        ConfigError: `path` exists, or the package mcap is missing.
        DataError: a frame cannot be read, the file cannot be written, or neither stamps nor `hz` are known.
    """
    check_absent(path, "mcap")
    try:
        from mcap.writer import Writer
    except ImportError as error:
        hint = "Install it with pip install 'serl-chunk[viz]'"
        raise ConfigError(f"needs the package mcap ({error}). {hint}", parameter="mcap") from error
    stamp = episode.steps.stamp
    if len(stamp) > 1 and (np.diff(stamp) <= 0).any():
        if not hz:
            raise DataError(f"episode {episode.begin.episode_id}: its stamps do not increase. Set hz", parameter="hz")
        stamp = np.arange(len(stamp)) / hz
    times = [round(1e9 * float(t - stamp[0])) for t in stamp]
    with os_faults(DataError, f"{path}: cannot be written", "Choose another file"):
        with atomic_path(path) as part, part.open("wb") as file:
            writer = _Writer(Writer(file))
            writer.write(episode, times)
        return f"wrote {path}: {format_bytes(path.stat().st_size)}, {episode.steps.n} ticks, {writer.messages} messages"


class _Writer:
    def __init__(self, writer: Any) -> None:
        self.messages = 0
        self._writer = writer
        self._channels: dict[str, int] = {}
        self._schemas: dict[str, int] = {}

    def write(self, episode: Episode, times: list[int]) -> None:
        """Write every message in the order of time. `times`: ns of every tick from the first one on."""
        begin, steps, end = episode
        rewards = episode.rewards
        self._writer.start(profile="", library="serl_chunk")
        about = {
            "episode": begin.episode_id, "task": begin.task, "robot": begin.robot, "outcome": end.outcome.value,
            "outcome_by": end.outcome_by, "terminated": str(end.terminated).lower(),
        }  # fmt: skip
        self._writer.add_metadata("episode", about)
        frames = {
            name: (rows, {int(t): i for i, t in enumerate(rows.index)}) for name, rows in cameras_of(episode).items()
        }
        q = steps.sparse.get("decision/q")
        values = {} if q is None else {int(t): float(np.max(v)) for t, v in zip(q.index, q.values, strict=True)}
        for tick, at in enumerate(times):
            self._put(
                "/state", "serl_chunk.Values", at, {"tick": tick, "values": steps.observation[STATE][tick].tolist()}
            )
            self._put("/action", "serl_chunk.Values", at, {"tick": tick, "values": steps.action[tick].tolist()})
            self._put("/reward", "serl_chunk.Value", at, {"tick": tick, "value": float(rewards[tick])})
            actor = Actor(int(steps.source[tick])).name.lower()
            self._put("/source", "serl_chunk.Text", at, {"tick": tick, "value": actor})
            if tick in values and np.isfinite(values[tick]):
                self._put("/decision/q", "serl_chunk.Value", at, {"tick": tick, "value": values[tick]})
            for name, (rows, found) in frames.items():
                if tick in found:
                    file = frame_file(rows, found[tick])
                    image = {
                        "timestamp": {"sec": at // 10**9, "nsec": at % 10**9},
                        "frame_id": name,
                        "format": media_type(file).removeprefix("image/"),
                        "data": base64.b64encode(file).decode(),
                    }
                    self._put(f"/camera/{name}", "foxglove.CompressedImage", at, image)
        self._writer.finish()

    def _put(self, topic: str, schema: str, at: int, message: dict[str, Any]) -> None:
        if schema not in self._schemas:
            text = json.dumps({"title": schema, "type": "object", "properties": _SCHEMAS[schema]})
            self._schemas[schema] = self._writer.register_schema(schema, "jsonschema", text.encode())
        if topic not in self._channels:
            self._channels[topic] = self._writer.register_channel(topic, "json", self._schemas[schema])
        data = json.dumps(message, allow_nan=False).encode()
        self._writer.add_message(self._channels[topic], log_time=at, publish_time=at, data=data)
        self.messages += 1
