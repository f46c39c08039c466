"""The demonstrations a run was started with: recorded in its folder, and read again where they were."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from serl_chunk.data.demos import DemoSet, Origin, content_digest, file_digest, file_of
from serl_chunk.data.formats import choose
from serl_chunk.data.source import ReadOptions, Source, take_fraction
from serl_chunk.runs.episodes import FORMAT, spec_of_run
from serl_chunk.runs.folder import read_json
from serl_chunk.types import DataError, Episode, RobotSpec

DEMOS = "demos.json"  # in the run folder
_OPTIONS = (  # of ReadOptions
    "color", "hz", "success", "scores", "reward_every_step", "env", "env_if_judged", "env_reward", "solved", "task",
)  # fmt: skip


def note_of(demos: DemoSet, options: ReadOptions | None) -> dict[str, Any]:
    """Return the content of `demos.json`: the demonstrations that the current process reads, in their order."""
    options = options or ReadOptions()
    origins = [
        o._asdict() | {"path": str(o.path.expanduser().resolve()), "steps": len(e.steps.action)}
        for o, e in zip(demos.origins, demos.episodes, strict=True)
    ]
    return {"digest": demos.digest, "options": {name: getattr(options, name) for name in _OPTIONS}, "episodes": origins}


class RunDemos:
    """See data.source.Source: the demonstrations of a run's `demos.json`, not cut at their first success.

    A key is an episode's number. Of `options`, `cameras`, `task` and `proportion` are used. Raises ConfigError where
    the run noted none.
    """

    format = "run demonstrations"

    def __init__(self, path: Path | str, options: ReadOptions | None = None):
        self.path, self._given = Path(path), options or ReadOptions()
        self.spec: RobotSpec = spec_of_run(self.path)
        self.hz: float | None = self.spec.control_hz
        noted = read_json(self.path / DEMOS)
        try:
            read = dict(noted["options"])
            read["scores"] = tuple((name, reward) for name, reward in read["scores"])
            self._options = ReadOptions(**{name: read[name] for name in _OPTIONS})
            self._origins = [Origin(Path(e["path"]), e["format"], e["key"], e["digest"]) for e in noted["episodes"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{self.path / DEMOS} is damaged ({error!r})") from error
        self._open: tuple[tuple[Path, str], Source] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    def keys(self) -> list[str]:
        keys = [f"{i:06d}" for i in range(len(self._origins))]
        return take_fraction(keys, self._given.proportion) if keys else keys

    def read(self, key: str) -> Episode:
        """See Source. Raises DataError also where a file is not what it was when the run read it."""
        origin = self._origins[int(key)]
        if not origin.path.exists():
            raise DataError(f"{origin.path}: the demonstration that {self.path} was started with is gone")
        given, at = self._given, (origin.path, origin.format)
        options = dataclasses.replace(
            self._options, spec=given.spec or self.spec, cameras=given.cameras, task=given.task or self._options.task
        )
        if self._open is None or self._open[0] != at:
            chosen = choose(origin.path, origin.format, (FORMAT,), parameter="demo_format")
            self._open = (at, chosen.open(origin.path, options))
        source = self._open[1]
        file, episode = file_of(source, origin.key), source.read(origin.key)
        if (content_digest(episode) if file is None else file_digest(file)) != origin.digest:
            raise DataError(
                f"{origin.path}: episode {origin.key} is not what it was when {self.path} read it: its content changed"
            )
        return episode

    def notes(self) -> list[str]:
        return []
