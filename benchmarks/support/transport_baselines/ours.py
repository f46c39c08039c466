"""serl_chunk's transport."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.actor.clock import responsive_interpreter
from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk.transport.security.server import ServerKeys
from serl_chunk.transport.server.server import LearnerServer
from serl_chunk.transport.server.sessions import ServerHandler
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire.handshake import MAX_ARRAYS
from serl_chunk.types import Begin, End, Outcome, Record, Snapshot, Source, Step, StepBlock
from serl_chunk_robot.wire.codec import Limits
from support.ports import free_port
from support.transport_baselines import workload
from support.transport_baselines.workload import EPISODE, Row

HOST = "127.0.0.1"
CONTRACT = {"benchmark": "transport"}
MEMORY = Path("/dev/shm")
CONFIG = TransportConfig()
LIMITS = Limits(CONFIG.max_message_bytes, MAX_ARRAYS)
KEPT_STEPS = 1 << 40  # in the journal: nothing is dropped
STEP_OVERHEAD = 64  # what the outbox counts for a step beside its arrays
WAIT = 300.0  # seconds until something that should have arrived counts as lost


class Learner(workload.Publisher, ServerHandler):
    """Takes every record and keeps none, beside the journal's copy."""

    _server: LearnerServer
    _store: RecordStore | None

    def open(self, journal: str = "", keys: str = "", port: int = 0, **_: Any) -> dict[str, Any]:
        """Serve at `port`, a free one by default; `journal` and `keys` are folders, empty for none of it."""
        self._steps = self._blocks = self._stored = 0
        self._version = 0
        self._store = RecordStore(Path(journal), LIMITS, min_steps=KEPT_STEPS) if journal else None
        if self._store is not None:
            self._stored = sum(s.record.n for s in self._store.replay() if isinstance(s.record, StepBlock))
        port = port or free_port()
        self._server = LearnerServer(
            CONFIG,
            self,
            bind=HOST,
            port=port,
            contract=CONTRACT,
            run_id="benchmark",
            store=self._store,
            keys=ServerKeys.ensure(Path(keys))[0] if keys else None,
        )
        self._server.resume()
        self._server.start()
        return {"port": port, "ready_at": time.monotonic()}

    def on_record(self, info: object, record: Record) -> None:
        if isinstance(record, StepBlock):
            self._steps += record.n
            self._blocks += 1

    def close(self) -> dict[str, float]:
        """Stop, sync the journal; what was received since `open`."""
        received = self._server.stats()["received_bytes"]
        written = self._store.journal.nbytes if self._store is not None else 0
        self._server.check()
        self._server.close()
        if self._store is not None:
            self._store.close()
        return {
            "steps": self._stored + self._steps,
            "delivered": self._steps,
            "bytes": received,
            "journal_bytes": written,
            "steps_per_message": self._steps / max(1, self._blocks),
            "closed_at": time.monotonic(),
            "peak_memory": workload.memory("VmHWM"),
        }

    def publish(self) -> float:
        self._version += 1
        parameters = self._parameters.next()
        start = time.monotonic()  # one clock for all processes of a machine
        self._server.publish(Snapshot(self._version, {**parameters, "at": np.array(start)}), {})
        return time.monotonic() - start


class Actor:
    """Hands steps over, holds the newest parameters."""

    _link: LearnerLink
    _steps: list[Step]

    def __init__(self) -> None:
        self._episodes = 0

    def connect(
        self, port: int, name: str, batch: int = 0, cameras: bool = False, spool: str = "", keys: str = "", **_: Any
    ) -> None:
        """`batch`: most steps in a message, the product's own limits by default; `spool`, `keys`: folders or empty.

        Without a folder the spool lies in memory, where the system has a disk for that.
        """
        config = CONFIG
        if batch:
            step = next(workload.rows(cameras)).nbytes + STEP_OVERHEAD
            config = TransportConfig(max_message_bytes=4 * batch * step)  # a block takes a quarter of that at most
        memory = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))  # removed with its spool
        self._link = LearnerLink(
            config,
            host=HOST,
            port=port,
            actor_id=name,
            contract=CONTRACT,
            spools=lambda run: Spool(Path(spool) / run if spool else memory, LIMITS),
            keys=ClientKeys.find(Path(keys), HOST) if keys else None,
        )
        self._link.connect(timeout=WAIT)

    def disconnect(self) -> None:
        self._link.close()

    def prepare(self, n: int, cameras: bool, **_: Any) -> None:
        self._steps = [_step(i % EPISODE, row) for i, row in zip(range(n), workload.rows(cameras), strict=False)]

    def send(self) -> dict[str, float]:
        """Hand over what was prepared, as fast as it is taken, in episodes; wait until the learner has it."""
        cpu, start = time.process_time(), time.monotonic()
        for first in range(0, len(self._steps), EPISODE):
            part = self._steps[first : first + EPISODE]
            with self._episode(len(part)) as link:
                for step in part:
                    link.step(step)
        self._flush()
        return {"start": start, "end": time.monotonic(), "cpu_s": time.process_time() - cpu}

    def round_trips(self, n: int, cameras: bool) -> list[float]:
        """Seconds from a step's hand-over until it is acknowledged, one at a time, as percentiles."""
        took = []
        with self._episode(n) as link:
            for tick, row in zip(range(n), workload.rows(cameras), strict=False):
                step = _step(tick, row)
                start = time.monotonic()
                link.step(step)
                self._flush()
                took.append(time.monotonic() - start)
        return workload.percentiles(took)

    def control_loop(self, seconds: float, cameras: bool) -> dict[str, list[float]]:
        """See workload.control_loop. The interpreter is set as the product's actor sets it."""
        with responsive_interpreter(), self._episode(round(seconds / workload.PERIOD)) as link:
            figures = workload.control_loop(seconds, cameras, _step, link.step)
        self._flush()
        return figures

    def newest_after(self, at: float) -> float:
        """Wait for parameters published later than `at` (see `published_at`); seconds from then until they are here."""
        if not self._link.wait_until(lambda: self.published_at() > at, WAIT):
            raise SystemExit("the parameters did not arrive")
        return time.monotonic() - self.published_at()

    def published_at(self) -> float:
        """When the newest parameters here were published, by the monotonic clock; 0 for none."""
        newest = self._link.latest()
        return 0.0 if newest is None else float(newest.params["at"])

    def collect(self, n: int, period: float) -> dict[str, float]:
        """Record `n` steps with cameras, one every `period` seconds, whether the learner is there or not."""
        before = workload.memory()
        source = workload.rows(True, fresh=True)
        for first in range(0, n, EPISODE):
            length = min(EPISODE, n - first)
            with self._episode(length) as link:
                for tick in range(length):
                    link.step(_step(tick, next(source)))
                    time.sleep(period)
        return {"before": before, "after": workload.memory()}

    def drain(self) -> dict[str, float]:
        self._flush()
        return {"end": time.monotonic(), "peak_memory": workload.memory("VmHWM")}

    @contextlib.contextmanager
    def _episode(self, length: int) -> Iterator[LearnerLink]:
        self._episodes += 1
        name = f"episode{self._episodes}"
        self._link.begin(Begin(name))
        yield self._link
        self._link.end(End(name, length, None, True, False, Outcome.SUCCESS))

    def _flush(self) -> None:
        if not self._link.flush(WAIT):
            raise SystemExit(f"the learner did not acknowledge everything within {WAIT:g} s")


def _step(tick: int, row: Row) -> Step:
    return Step(tick, row.observation, row.action, 0.0, Source.POLICY, tick, 1, workload.PERIOD * tick)
