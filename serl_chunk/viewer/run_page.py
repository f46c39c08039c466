"""The page of a run, as its learner writes it: curves, last episodes, and the viewer of all of them."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.source import ReadOptions
from serl_chunk.io import format_duration
from serl_chunk.runs.episodes import RunSource
from serl_chunk.runs.folder import CONFIG, read_config
from serl_chunk.runs.metrics import Counters, Row, RunMetrics, read_metrics, succeeded_alone
from serl_chunk.runs.report import panels
from serl_chunk.types import ConfigError, DataError
from serl_chunk.viewer.catalogue import rounded
from serl_chunk.viewer.server import EpisodePages
from serl_chunk.viz.local_server import Answer, LocalHandler, LocalServer, file_answer, json_answer
from serl_chunk.viz.page import STYLE
from serl_chunk.viz.plots import downsample

ASSETS = Path(__file__).parent / "page"
LAST = 30  # episodes in the table
SHARE = 0.05  # of the time, at most, that is spent on reading the metrics again, and on the journal
PERIOD = 1.0  # seconds between a learner's figures
FIGURES = {  # of a learner that runs (`LearnerService.figures`), by their names on the page
    "steps_not_inserted": "steps on their way into the replay",
    "updates_due": "updates due",
    "steps_missing": "steps missing for the next update",
    "updates_per_s": "updates per s",
    "version": "snapshot",
}
OUTCOMES: Mapping[Any, str] = {1: "success", 0: "failure"}
NICE = 10
Figures = Mapping[str, float]


class Pace:
    """Reads something again where that takes `SHARE` of the time at most."""

    def __init__(self) -> None:
        self._next, self._lock = 0.0, threading.Lock()

    @contextlib.contextmanager
    def reading(self) -> Iterator[bool]:
        """Yield, to one thread at a time, whether reading is due; it is due again at once where it fails."""
        with self._lock:
            begun = time.monotonic()
            yield begun >= self._next
            if begun >= self._next:
                now = time.monotonic()
                self._next = now + (now - begun) / SHARE


class RunPage(LocalServer):
    """Serves a run's episodes and, at `run_url`, its curves on a loopback port, from what its folder has.

    Args:
        port: 0 takes a free one.
        options: with which its episodes are read.
        figures: returns those of its learner, empty where it does not run.

    Raises ConfigError where the port cannot be used.
    """

    def __init__(
        self, run: Path, port: int = 0, *, options: ReadOptions | None = None,
        figures: Callable[[], Figures] = dict, parameter: str = "port",
    ) -> None:  # fmt: skip
        self.run, self.figures = run, figures
        self.options = options or ReadOptions(labels=False)
        self._metrics, self._journal, self._content = Pace(), Pace(), b"{}"
        self._episodes: EpisodePages | None = None
        super().__init__(_Handler, port, parameter=parameter, printed_by="the program")

    @property
    def run_url(self) -> str:
        return f"{self.url}run/"

    def curves(self) -> bytes:
        """Return the content of the page as JSON, not read again at each request. Raises SerlChunkError."""
        with self._metrics.reading() as due:
            if due:
                self._content = json_answer(content(self.run))[1]
            return self._content

    def episodes(self, *, renew: bool = False) -> EpisodePages:
        """Return the viewer; `renew` takes episodes that ended meanwhile, where they are due. Raises SerlChunkError."""
        if self._episodes is None or renew:
            with self._journal.reading() as due:
                if due:
                    self._episodes = self._with_newer(self._episodes)
        assert self._episodes is not None
        return self._episodes

    def _with_newer(self, before: EpisodePages | None) -> EpisodePages:
        source = RunSource(self.run, self.options)
        known = [] if before is None else before.catalogue.keys
        if not known and not source.keys():
            raise DataError(f"{self.run}: has no episode yet")
        if before is not None:
            if not set(source.keys()) - set(known):
                return before
            before.close()
        pages = EpisodePages(source, known=known)
        pages.catalogue.start()
        return pages

    def close(self) -> None:
        self.server_close()
        if self._episodes is not None:
            self._episodes.close()


class _Handler(LocalHandler):
    server: RunPage

    def get(self, path: list[str]) -> Answer:
        server = self.server
        match path:
            case ["run", ""]:
                return file_answer(ASSETS / "run.html")
            case ["run", "run.js" | "run.css" as name]:
                return file_answer(ASSETS / name)
            case ["run", "page.css"]:
                return file_answer(STYLE)
            case ["run", "curves"]:
                return "application/json", server.curves(), False
            case ["run", "figures"]:
                given = server.figures()
                return json_answer([[shown, given[name]] for name, shown in FIGURES.items() if name in given])
        return server.episodes(renew=path == [""]).get(path)

    def post(self, path: list[str]) -> Answer:
        return self.server.episodes().post(path, self.body)


def content(run: Path) -> dict[str, Any]:
    """Return what the page shows of a run: its most important values, its curves and last episodes."""
    metrics, config = read_metrics(run), read_config(run) if (run / CONFIG).exists() else {}
    return {
        "title": f"{config.get('name') or run.resolve().parent.name}: {run.resolve().name}",
        "head": _head(metrics),
        "charts": [chart for chart in _charts(metrics) if chart["lines"]],
        "episodes": [_episode(row) for row in metrics["episode"][: -LAST - 1 : -1]],
    }


def _head(metrics: RunMetrics) -> list[tuple[str, str]]:
    last = metrics.last() or dict.fromkeys(("wall", *Counters._fields), 0)
    judged, evaluated = panels.judged_episodes(metrics)[-panels.WINDOW :], panels.evaluations(metrics)[-1:]
    return [
        ("success without a human", f"{sum(map(succeeded_alone, judged))} of the last {len(judged)} episodes"),
        *(("evaluation", f"{row['success_rate']:.1%} of {row['n']}, checkpoint {row['step']}") for row in evaluated),
        ("iterations" if panels.iterations(metrics) else "critic updates", f"{last['step']:,}"),
        ("environment steps", f"{last['env_steps']:,}"),
        ("human ticks", f"{last['human_ticks']:,}"),
        ("episodes", f"{len(metrics['episode']):,}"),
        ("duration", format_duration(last["wall"])),
    ]


def _episode(row: Row) -> dict[str, Any]:
    length, actor, key = row.get("episode/l"), row.get("actor_id"), row.get("episode")
    return {
        "number": row.get("number"), "key": key and key.removeprefix(f"{actor}/"), "actor": actor, "length": length,
        "outcome": OUTCOMES.get(row.get("succeed"), "unknown"),
        "return": row.get("episode/r"), "minutes": round(row["wall"] / 60, 1),
        "human": (row.get("intervention_steps") or 0) / length if length else None,
    }  # fmt: skip


def _charts(metrics: RunMetrics) -> list[dict[str, Any]]:
    judged, acted, iterated = panels.judged_episodes(metrics), panels.with_steps(metrics), panels.sampled(metrics)
    mean = panels.rolling_mean
    evaluated = sorted(panels.evaluations(metrics), key=lambda row: row["wall"])
    human = mean([row.get("intervention_steps") or 0 for row in acted]) / mean([row["episode/l"] for row in acted])
    success = [
        _line("without a human", judged, mean([succeeded_alone(row) for row in judged])),
        _line("all", judged, mean([row["succeed"] for row in judged])),
        _line("sampled episodes", iterated, [row["group/success"] for row in iterated]),
        _line("evaluation", evaluated, [row["success_rate"] for row in evaluated], dots=True),
    ]
    touched = mean([bool(row.get("intervention_count")) for row in acted])
    return [
        _chart(f"success, last {panels.WINDOW}", success[2:] if iterated else success, percent=True),
        _chart("human acting", [_line("of steps", acted, human), _line("of episodes", acted, touched)],
               percent=True),
        _of_training(metrics, "Q in batches", {"critic/predicted_qs": "predicted", "critic/target_qs": "target"}),
        *(_of_training(metrics, key, {key: key}) for key in panels.loss_keys(metrics)),
        _of_training(metrics, "per second",
                     {"rates/updates_per_s": "updates", "rates/env_steps_per_s": "environment steps"}),
        _of_training(panels.wait_shares(metrics), "waiting", panels.WAITS, percent=True),
        _of_training(metrics, "windows in replay", panels.REPLAY),
    ]  # fmt: skip


def _of_training(metrics: RunMetrics, title: str, keys: Mapping[str, str], *, percent: bool = False) -> dict[str, Any]:
    rows = {key: [row for row in metrics["train"] if row.get(key) is not None] for key in keys}
    return _chart(title, [_line(label, rows[key], [row[key] for row in rows[key]]) for key, label in keys.items()],
                  percent=percent)  # fmt: skip


def _chart(title: str, lines: Sequence[dict[str, Any]], *, percent: bool = False) -> dict[str, Any]:
    return {
        "title": title,
        "percent": percent,
        "lines": [line for line in lines if any(v is not None for v in line["y"])],
    }


def _line(
    name: str, rows: Sequence[Row], values: Sequence[float] | np.ndarray, *, dots: bool = False
) -> dict[str, Any]:
    x, y = downsample(panels.x_values(rows, "wall"), np.array(values, float))
    return {"name": name, "dots": dots, "x": [round(v, 3) for v in x.tolist()], "y": [rounded(v) for v in y.tolist()]}


class RunPageProcess:
    """A run's page in a process of its own, which takes nothing of its learner but figures, once a second.

    Args:
        figures: of the learner; called on a thread.

    Raises ConfigError, which names `run_page`, where the port cannot be used.
    """

    def __init__(self, run: Path, port: int, figures: Callable[[], Figures]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(run, port, theirs), name="run page", daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.url, fault = self._ours.recv()
        except EOFError:
            self.url, fault = "", "cannot be served: its process ended"
        if fault:
            raise ConfigError(fault, parameter="run_page")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send, args=(figures,), name="run page", daemon=True)
        self._thread.start()

    def _send(self, figures: Callable[[], Figures]) -> None:
        with contextlib.suppress(OSError):  # the page is gone: training goes on
            while not self._ended.wait(PERIOD):
                given = figures()
                self._ours.send({name: given[name] for name in FIGURES if name in given})

    def close(self) -> None:
        self._ended.set()
        self._process.kill()
        self._process.join()
        self._thread.join()
        self._ours.close()


def _serve(run: Path, port: int, learner: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the learner decides
    os.nice(NICE)
    newest: Figures = {}
    try:
        page = RunPage(run, port, figures=lambda: newest, parameter="run_page")
    except ConfigError as error:
        learner.send(("", error.message))
        return
    learner.send((page.run_url, ""))
    threading.Thread(target=functools.partial(page.serve_forever, poll_interval=0.2), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            newest = learner.recv()
    os._exit(0)  # the learner is gone
