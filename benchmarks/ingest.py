"""What a step costs the learner from its socket to its replay, of many actors that send at the robot's rate.

Actors send steps of `fake_aloha` over loopback as they come, one a message or in blocks; nothing trains. Counted is the
processor time of the threads that take records in, over the steps that were acknowledged, with the journal in memory:

    python benchmarks/ingest.py --json ingest.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import zmq
from support.cli_args import make_parser, write_figures
from support.ports import free_port
from support.traffic import Actor, Traffic

from serl_chunk.config.loader import load_experiment
from serl_chunk.data.preprocess import fit_preprocess
from serl_chunk.learner.intake import RecordRouter
from serl_chunk.learner.schedule import StepShares
from serl_chunk.learner.service import LearnerService
from serl_chunk.replay.replay import Replay
from serl_chunk.robots.registry import robot_spec
from serl_chunk.transport.storage.record_store import SessionState
from serl_chunk.transport.wire.records import Item, encode_record
from serl_chunk.types import Begin, End, Episode, Outcome, Source, Step, StepBlock

CAPACITY = 300_000
THREADS = ("serl-chunk-server", "serl-chunk-intake")
CASES = {"step by step": 1, "blocks of five": 5}


def demonstration(spec: Any, length: int) -> Episode:
    rng = np.random.default_rng(0)
    steps = [
        Step(t, {"state": rng.normal(size=spec.state_dim).astype(np.float32)},
             rng.normal(size=spec.action_dim).astype(np.float32), 0.0, Source.SCRIPTED, -1, 0, 0.02 * t)
        for t in range(length)
    ]  # fmt: skip
    return Episode(Begin("d", demonstration=True), StepBlock.from_steps("d", steps),
                   End("d", length, None, True, False, Outcome.SUCCESS))  # fmt: skip


def thread_seconds() -> dict[str, float]:
    return {
        thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and thread.name in THREADS
    }


@contextlib.contextmanager
def serving(folder: str) -> Iterator[tuple[LearnerService, int, Any]]:
    """A learner that takes records in and does not train, with its journal in `folder`; it is not attached."""
    config = load_experiment("fake_aloha")
    transport = dataclasses.replace(config.transport, max_sessions=1_000)
    config = dataclasses.replace(
        config, transport=transport, replay=dataclasses.replace(config.replay, capacity=CAPACITY)
    )
    spec = robot_spec(config.robot)
    preprocess = fit_preprocess(config, spec, [demonstration(spec, 60)])
    replay = Replay(spec, config, preprocess, bc_on="demo")
    router = RecordRouter(replay)
    learner: Any = SimpleNamespace(
        replay=replay, router=router, preprocess=preprocess, refill=router.refill, episodes=0, env_steps=0,
        human_ticks=0, idle=False, updates=0, stats=SimpleNamespace(busy=""),
        trainer=SimpleNamespace(steps_allowed=lambda: None),
    )  # fmt: skip
    port = free_port()
    run: Any = SimpleNamespace(path=Path(folder), run_id="run")
    with contextlib.closing(LearnerService(config, run, {}, bind="127.0.0.1", port=port)) as service:
        service.server.start()
        yield service, port, learner


def measure(traffic: Traffic) -> dict[str, Any]:
    """Return the generator's figures and the thread time of a step, us."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, serving(folder) as (service, port, learner):
        spec = learner.replay.spec
        sizes = {"state_dim": spec.state_dim, "action_dim": spec.action_dim, "hz": spec.control_hz}
        service.attach(learner)
        words = json.dumps(dataclasses.asdict(dataclasses.replace(traffic, **sizes)))
        command = [sys.executable, "-m", "support.traffic", str(port), words]
        sending = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
        before = thread_seconds()
        while sending.poll() is None:
            service.server.check()
            time.sleep(0.1)
        used = {name: seconds - before[name] for name, seconds in thread_seconds().items()}
        assert sending.stdout is not None
        figures: dict[str, Any] = json.loads(sending.stdout.read())
    figures["us_a_step"] = 1e6 * sum(used.values()) / figures["acknowledged"]
    figures |= {f"us_{name}": 1e6 * seconds / figures["acknowledged"] for name, seconds in used.items()}
    return figures


def comes_back(steps: int) -> dict[str, float]:
    """Return what a learner takes that comes back to a journal of so many live steps, one an entry."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with serving(folder) as (service, _, learner):
            spec, store = learner.replay.spec, service._store
            assert store is not None
            episode = demonstration(spec, 100)
            for number in range(steps // 100):
                begin, block, end = episode
                name = f"e{number}"
                parts = [block.slice(t, t + 1) for t in range(100)]
                state = SessionState(f"s{number % 8}", f"a{number % 8}", 1, 102 * (number // 8), 0, 0, None)
                for record in (begin, *parts, end):
                    renamed: Any = (
                        dataclasses.replace(record, episode_id=name)
                        if isinstance(record, StepBlock)
                        else record._replace(  # type: ignore[attr-defined]
                            episode_id=name, **({"demonstration": False} if record is begin else {})
                        )
                    )
                    item = Item.of(renamed, state.expected)
                    store.append(state, item, encode_record(renamed, item.first), delivered=True)
                    state = state.after(item, delivered=True)
        opened = time.monotonic()
        with serving(folder) as (service, port, learner):
            first: list[float] = []
            asking = threading.Thread(
                target=_first_acknowledgement, args=(port, learner.replay.spec, first), daemon=True
            )
            asking.start()
            service.attach(learner)
            admitted = time.monotonic() - opened
            while learner.router.refilling:
                service.server.check()
                time.sleep(0.01)
            full, used = time.monotonic() - opened, thread_seconds()["serl-chunk-intake"]
            asking.join(60)
            held = learner.replay.stats()["replay/online_rows"]
    return {"admitted_s": admitted, "first_acknowledgement_s": first[0] - opened, "full_s": full,
            "full_thread_s": used, "rows": held}  # fmt: skip


def _first_acknowledgement(port: int, spec: Any, found: list[float]) -> None:
    """Note when the first record of an actor that comes at once is acknowledged."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    traffic = Traffic(1, state_dim=spec.state_dim, action_dim=spec.action_dim)
    while not found:
        try:
            actor = Actor(traffic, 0, port, context)
        except SystemExit:  # it reads what it needs to let one in
            time.sleep(0.02)
            continue
        actor.act()
        while not actor.acked:
            actor.read([])
            time.sleep(0.001)
        found.append(time.monotonic())
    context.destroy(linger=0)


def shares(sessions: int) -> dict[str, float]:
    """Return what the allowances of so many lockstep sessions cost: us for one that recorded, ms for all of them."""
    held = StepShares(lambda: 10 * sessions, 5.0, steps_of=lambda session: 0)
    names, seconds = [str(i) for i in range(sessions)], []
    for _ in range(12):
        for name in names:
            held.delivered(name, 5)
        began = time.thread_time()
        for name in names:
            held.allowed(name)
        seconds.append(time.thread_time() - began)
    turn = float(np.median(seconds[2:]))
    return {"us_allowed": 1e6 * turn / sessions, "ms_turn": 1e3 * turn}


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("--sessions", type=int, default=64, help="actors")
    p.add_argument("--seconds", type=float, default=15.0, help="of each round")
    p.add_argument("--journal", type=int, default=100_000, help="live steps to which a learner comes back")
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for _ in range(args.rounds):
        for name, block in CASES.items():
            found[name].append(measure(Traffic(args.sessions, block, seconds=args.seconds)))
    medians = {name: {key: float(np.median([r[key] for r in rows])) for key in rows[0]} for name, rows in found.items()}
    for name, row in medians.items():
        parts = ", ".join(f"{key.rpartition('-')[2]} {row[key]:.0f}" for key in row if key.startswith("us_serl"))
        share = row["acknowledged"] / row["asked"]
        print(f"{name}: {row['us_a_step']:.0f} us a step ({parts}), {share:.1%} acknowledged, "
              f"p50 {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.0f} ms")  # fmt: skip
    medians |= {f"allowances, {n} sessions": shares(n) for n in (64, 1_000)}
    for name, row in list(medians.items())[-2:]:
        print(f"{name}: {row['us_allowed']:.1f} us each, {row['ms_turn']:.2f} ms a turn")
    row = medians["comes back"] = comes_back(args.journal)
    print(f"back with {args.journal:,} live steps in the journal: actors admitted {row['admitted_s']:.1f} s after the "
          f"sockets were opened, first acknowledgement {row['first_acknowledgement_s']:.1f} s, replay full "
          f"{row['full_s']:.1f} s ({row['full_thread_s']:.1f} s of a thread, {row['rows']:.0f} rows)")  # fmt: skip
    write_figures(args, medians)


if __name__ == "__main__":
    main()
