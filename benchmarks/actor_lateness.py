"""How late a 50 Hz actor's ticks are while 10 MB of policy parameters arrive every second, or more often.

    python benchmarks/actor_lateness.py [--seconds 30] [--mb_per_s 50] [--in-process] [--json FILE]

The actor runs the fake bimanual robot under the realtime clock with an untrained policy, and records every step.
A learner process publishes parameters over loopback; `--in-process` hands them over in memory instead, which shows
what the transport adds. Lateness is that of every tick's beginning against its absolute deadline; a starved tick is
one on which the policy had no action, the first ones of every episode included.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import jax
import numpy as np
from support.cli_args import make_parser, write_figures
from support.ports import free_port

from serl_chunk.actor.service import ActorService
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.agents.registry import make_agent
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.experiment import ActorConfig, ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.config.transport import TransportConfig
from serl_chunk.data.preprocess import fit_preprocess
from serl_chunk.robots.registry import make_env
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.server.server import LearnerServer
from serl_chunk.transport.server.sessions import ServerHandler
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire.handshake import MAX_ARRAYS
from serl_chunk.types import Begin, End, SerlChunkError, Snapshot, Step
from serl_chunk_robot.wire.codec import Limits

HOST, CONTRACT = "127.0.0.1", {"benchmark": "loopback"}
START_SECONDS = 60.0  # for a process to import what it needs, on a busy machine
CRITIC = CriticConfig(hidden=(704, 704))
AGENT = AcfqlConfig(critic=CRITIC, flow=FlowConfig(hidden=(512, 512)))  # 10 MB in all


def next_version(params: dict[str, np.ndarray], version: int) -> Snapshot:
    """Parameters of which every float differs from the last ones, so that all of them travel."""
    factor = np.float32(1 + 1e-4 * (version % 100))
    return Snapshot(version, {k: v * factor if v.dtype == np.float32 else v for k, v in params.items()})


def learner(port: int, pipe: Connection, params: dict[str, np.ndarray], period: float) -> None:
    """The other process: keeps no record, and publishes as often as it is told, until told to stop."""
    server = LearnerServer(TransportConfig(), ServerHandler(), bind=HOST, port=port, contract=CONTRACT)
    server.start()
    with contextlib.closing(server):
        version = 0
        while not pipe.poll(period if version else 0):
            version += 1
            server.publish(next_version(params, version), {})


def connected(port: int) -> LearnerLink:
    """The actor's end, connected to the server at `port`, which takes seconds to start."""
    folder, config = Path(tempfile.mkdtemp()), TransportConfig()  # removed with the spool
    limits = Limits(config.max_message_bytes, MAX_ARRAYS)
    link = LearnerLink(
        config, host=HOST, port=port, actor_id="bench", contract=CONTRACT, spools=lambda run: Spool(folder, limits)
    )
    link.connect(timeout=START_SECONDS)
    return link


class InMemory:
    """An ActorLink whose learner is a thread of this process that makes a new snapshot every `period` seconds."""

    allowance: int | None = None
    finished: str | None = None
    error: SerlChunkError | None = None

    def __init__(self, params: dict[str, np.ndarray], period: float) -> None:
        self.steps_recorded = 0
        self._period = period
        self._params = params
        self._snapshot = next_version(params, 1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish, daemon=True)
        self._thread.start()

    def begin(self, record: Begin) -> None: ...

    def step(self, record: Step) -> None:
        self.steps_recorded += 1

    def end(self, record: End) -> None: ...

    def latest(self) -> Snapshot:
        return self._snapshot

    def can_begin(self) -> tuple[bool, str]:
        return True, ""

    def backlog(self, *, begun: bool) -> str:
        return ""

    def flush(self, timeout: float) -> bool:
        return True

    def stats(self) -> dict[str, float]:
        return {"snapshots": self._snapshot.version}

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _publish(self) -> None:
        while not self._stop.wait(self._period):
            self._snapshot = next_version(self._params, self._snapshot.version + 1)


def measure(seconds: float, mb_per_s: float | None, in_process: bool) -> dict[str, float]:
    """Run the actor for about `seconds` of control time; the figures under plain names.

    `mb_per_s`: how much of parameters arrives, one snapshot a second by default.
    """
    config = ExperimentConfig(
        name="actor_lateness", robot=FakeAlohaConfig(), agent=AGENT, actor=ActorConfig(clock="realtime")
    )
    env = make_env(config.robot)
    spec = env.robot_spec
    agent = make_agent(config, spec)
    preprocess = fit_preprocess(config, spec, [])
    key = jax.random.key(0)
    params = agent.flatten_params(agent.published(agent.init(key), agent.new_base(key)))
    snapshot_mb = sum(v.nbytes for v in params.values()) / 1e6
    period = 1.0 if mb_per_s is None else snapshot_mb / mb_per_s
    link: InMemory | LearnerLink
    if in_process:
        link = InMemory(params, period)
    else:
        port = free_port()
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=learner, args=(port, theirs, params, period), daemon=True)
        process.start()
        link = connected(port)
    stop = threading.Event()
    episodes: list[EpisodeSummary] = []
    started = time.monotonic()

    def on_episode(summary: EpisodeSummary) -> None:
        episodes.append(summary)
        if sum(e.length for e in episodes) * spec.dt >= seconds:
            stop.set()

    try:
        actor = ActorService(config, env=env, agent=agent, link=link, stop=stop, on_episode=on_episode)
        summary = actor.run(preprocess)
        snapshots = link.stats()["snapshots"]
    finally:
        link.close()
        if not in_process:
            pipe.send("stop")
            process.join(10)
    late = summary.lateness
    return {
        "lateness_p50_ms": late.p50_ms,
        "lateness_p99_ms": late.p99_ms,
        "lateness_max_ms": late.max_ms,
        "missed_periods": late.missed_periods,
        "ticks": summary.steps,
        "episodes": summary.episodes,
        "starved_ticks": summary.starved_ticks,
        "snapshot_mb": snapshot_mb,
        "snapshots": snapshots,
        "wall_seconds": time.monotonic() - started,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of control time")
    parser.add_argument("--mb_per_s", type=float, help="of parameters; by default one snapshot a second")
    parser.add_argument("--in-process", action="store_true", help="hand snapshots over in memory")
    args = parser.parse_args()
    figures = measure(args.seconds, args.mb_per_s, args.in_process)
    print(
        f"lateness p50 {figures['lateness_p50_ms']:.2f} ms, p99 {figures['lateness_p99_ms']:.2f} ms, "
        f"max {figures['lateness_max_ms']:.2f} ms over {figures['ticks']} ticks of 20 ms; "
        f"{figures['starved_ticks']} starved ticks in {figures['episodes']} episodes; {figures['snapshots']:.0f} "
        f"snapshots of {figures['snapshot_mb']:.1f} MB in {figures['wall_seconds']:.0f} s"
    )
    write_figures(args, figures)


if __name__ == "__main__":
    main()
