"""The measurements: each runs every contestant once and adds to the figures."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.ports import free_port
from support.transport_baselines.figures import CPU_RATIOS, Figures
from support.transport_baselines.processes import ACTORS, Deployment
from support.worker import BENCHMARKS, environment

BATCHES = {"live": 1, "catchup": 100}
LOADS = {"cameras": True, "state": False}
WITH_KEYS = ("keys", "bare_curve", "bare_file_curve")  # with one actor alone
MB_PER_S = 50.0  # of parameters, while ticks are timed
BEFORE = 10  # rows that the killed learner had acknowledged
BLOCK = bytes(1 << 20)  # of the sequential write
NBYTES = 148_000  # of a row with cameras, in a journal


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    rows: dict[tuple[str, str], int] = dataclasses.field(  # of each actor
        default_factory=lambda: {
            ("cameras", "live"): 2000,
            ("cameras", "catchup"): 4000,
            ("state", "live"): 20_000,
            ("state", "catchup"): 100_000,
        }
    )
    journal_rows: int = 4000  # with cameras: 590 MB
    publishes: dict[int, int] = dataclasses.field(default_factory=lambda: {1: 10, 10: 5, 100: 2})  # MB -> times
    seconds: float = 20.0  # of control time
    round_trips: int = 300
    backlog: int = 3000  # rows with cameras
    collect_period: float = 0.002  # seconds between rows of the backlog

    @classmethod
    def quick(cls) -> Sizes:
        rows = dict.fromkeys(itertools.product(LOADS, BATCHES), 400)
        return cls(rows, 100, {1: 1, 10: 1}, seconds=1.0, round_trips=20, backlog=50)


def rates(figures: Figures, deployments: list[Deployment], sizes: Sizes) -> None:
    """Rows per second, bytes and processor time per row, of one actor and of four; and ratios of the latter.

    The processor time of both ends counts: on a busy machine a rate by the clock measures the others' work.
    """
    for load, cameras in LOADS.items():
        for label, batch in BATCHES.items():
            for actors in (1, ACTORS):
                cpu: dict[str, float] = {}
                for deployment in deployments:
                    if deployment.name in WITH_KEYS and actors > 1:
                        continue
                    found = _rate(deployment, sizes.rows[load, label], cameras, batch, actors)
                    figures.add_all(f"{load}_{label}_{actors}_{deployment.name}", found)
                    cpu[deployment.name] = found["actor_cpu_us_per_step"] + found["learner_cpu_us_per_step"]
                for ours, anchor in CPU_RATIOS:
                    if ours in cpu and anchor in cpu:
                        figures.add(f"{load}_{label}_{actors}_{ours}_cpu_of_{anchor}", cpu[ours] / cpu[anchor])


def _rate(deployment: Deployment, n: int, cameras: bool, batch: int, actors: int, **options: Any) -> dict[str, float]:
    with deployment.connected(actors, cameras=cameras, batch=batch, **options) as received:
        working = deployment.actors[:actors]
        for actor in working:
            actor("prepare", n=n, cameras=cameras, batch=batch)
        cpu = deployment.learner("cpu")
        for actor in working:
            actor.start("send")
        sent = [actor.result() for actor in working]
        cpu = deployment.learner("cpu") - cpu
    if received["steps"] != n * actors:
        raise SystemExit(f"{deployment.name}: {received['steps']} rows of {n * actors} arrived")
    start, rows = min(s["start"] for s in sent), n * actors
    found = {
        "steps_per_s": rows / (max(s["end"] for s in sent) - start),
        "bytes_per_step": received.get("bytes", sum(s.get("bytes", 0.0) for s in sent)) / rows,
        "actor_cpu_us_per_step": 1e6 * sum(s["cpu_s"] for s in sent) / rows,
        "learner_cpu_us_per_step": 1e6 * cpu / rows,
    }
    if "steps_per_message" in received:
        found["steps_per_message"] = received["steps_per_message"]
    if "closed_at" in received:
        found["written_bytes_per_s"] = received["journal_bytes"] / (received["closed_at"] - start)
    return found


def journal(figures: Figures, ours: Deployment, sizes: Sizes, places: dict[str, Path]) -> None:
    """Rows with cameras while the learner writes them down, and the actor too; beside plain writes to that folder.

    The learner's journal and the plain writes count until they are synced; a spool goes when all is acknowledged.
    """
    n = sizes.journal_rows
    for place in places.values():  # memory that a virtual machine has never touched is several times slower once
        with _folder(place) as folder:
            _sequential(folder / "written", 2 * n * NBYTES)
    for label, batch in BATCHES.items():
        figures.add_all(f"journal_none_{label}", _rate(ours, n, True, batch, 1))
        for where, place in places.items():
            with _folder(place) as folder:
                found = _rate(ours, n, True, batch, 1, journal=str(folder / "journal"))
            figures.add_all(f"journal_{where}_{label}", found)
            with _folder(place) as folder:
                options = {"journal": str(folder / "journal"), "spool": str(folder / "spool")}
                figures.add_all(f"journal_and_spool_{where}_{label}", _rate(ours, n, True, batch, 1, **options))
    for where, place in places.items():
        with _folder(place) as folder:
            figures.add(f"sequential_{where}_bytes_per_s", _sequential(folder / "written", n * NBYTES))


def _sequential(path: Path, nbytes: int) -> float:
    """Bytes per second of writing blocks of 1 MiB and one fsync."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    start, blocks = time.monotonic(), max(1, nbytes // len(BLOCK))
    for _ in range(blocks):
        os.write(fd, BLOCK)
    os.fsync(fd)
    rate = blocks * len(BLOCK) / (time.monotonic() - start)
    os.close(fd)
    return rate


@contextlib.contextmanager
def _folder(place: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=place))
    yield folder
    shutil.rmtree(folder)


def parameters(figures: Figures, deployments: list[Deployment], sizes: Sizes) -> None:
    """From the call that publishes until an actor has the whole of it, and how long the call takes."""
    for megabytes, times in sizes.publishes.items():
        for deployment in deployments:
            if deployment.name.startswith("bare_"):
                continue
            with deployment.connected(subscribe=True):
                deployment.learner("make_parameters", megabytes=megabytes)
                actor = deployment.actors[0]
                if deployment.name == "agentlace":
                    time.sleep(1)  # a subscription is not confirmed
                for _ in range(times):
                    at = actor("published_at")
                    actor.start("newest_after", at=at)
                    call = deployment.learner("publish")
                    figures.add(f"publish_{megabytes}mb_{deployment.name}_arrival_s", actor.result())
                    figures.add(f"publish_{megabytes}mb_{deployment.name}_call_s", call)


def timing(figures: Figures, deployments: list[Deployment], sizes: Sizes) -> None:
    """How late a 50 Hz loop with three cameras is, and its hand-overs, with 50 MB of parameters a second and without.

    Also with the whole actor, a policy and a simulated robot in it (`actor_lateness.py`).
    """
    for deployment in deployments:
        if deployment.name.startswith("bare"):
            continue
        for case in ("quiet", "parameters"):
            with deployment.connected(subscribe=True):
                deployment.learner("make_parameters", megabytes=MB_PER_S)
                deployment.actors[0].start("control_loop", seconds=sizes.seconds, cameras=True)
                if case == "parameters":
                    deployment.learner("publish_often", seconds=sizes.seconds, period=1.0)
                found = deployment.actors[0].result()
            for what, values in found.items():
                for name, value in zip(("p50", "p99", "max"), values, strict=True):
                    figures.add(f"loop_{case}_{deployment.name}_{what}_{name}_s", value)
        with deployment.connected():
            took = deployment.actors[0]("round_trips", n=sizes.round_trips, cameras=True)
        for name, value in zip(("p50", "p99", "max"), took, strict=True):
            figures.add(f"round_trip_{deployment.name}_{name}_s", value)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(BENCHMARKS / "actor_lateness.py"), "--seconds", f"{sizes.seconds}"]
        command += ["--mb_per_s", f"{MB_PER_S}", "--json", str(file)]
        subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
        found = json.loads(file.read_text())
    for name in ("p50", "p99", "max"):
        figures.add(f"whole_actor_late_{name}_s", found[f"lateness_{name}_ms"] / 1000)


def recovery(figures: Figures, deployments: list[Deployment], sizes: Sizes, folder: Path) -> None:
    """The learner is killed, rows with cameras pile up, another learner comes: when it has all, and what that takes."""
    for deployment in deployments:
        if deployment.name not in ("ours", "agentlace"):
            continue
        for spool in ("memory", "disk") if deployment.name == "ours" else ("memory",):
            with _folder(folder) as place:
                found = _recovery(deployment, sizes, place, spool == "disk")
            figures.add_all(f"recovery_{spool}_{deployment.name}", found)


def _recovery(deployment: Deployment, sizes: Sizes, place: Path, on_disk: bool) -> dict[str, float]:
    options: dict[str, Any] = dict(deployment.options)
    options.setdefault("ports", [free_port(), 0])
    learner_options = {**options, "port": options["ports"][0], "names": ["actor0"]}
    if deployment.name == "ours":
        learner_options["journal"] = str(place / "journal")
    else:
        learner_options["ports"] = options["ports"] = [free_port(), free_port()]
    learner, actor = deployment.worker("Learner"), deployment.worker("Actor")
    port = learner("open", **learner_options)["port"]
    spool = {"spool": str(place / "spool")} if on_disk else {}
    actor("connect", **{**options, "port": port, "name": "actor0", "queue": 2 * sizes.backlog, **spool})
    actor("prepare", n=BEFORE, cameras=True)
    actor("send")
    learner.kill()
    collected = actor("collect", n=sizes.backlog, period=sizes.collect_period)
    learner = deployment.worker("Learner")
    actor.start("drain")
    ready = learner("open", **learner_options)["ready_at"]
    drained = actor.result()
    received = learner("close")
    learner.kill()
    actor.kill()
    missing = BEFORE + sizes.backlog - received["steps"]
    return {
        "s": drained["end"] - ready,
        "missing": missing,
        "delivered_again": received["delivered"] - (sizes.backlog - missing),  # the first BEFORE had arrived
        "actor_bytes_while_away": collected["after"] - collected["before"],
        "actor_peak_bytes": drained["peak_memory"] - collected["before"],
        "learner_peak_bytes": received["peak_memory"],
    }
