"""agentlace, through its public classes. Runs in an interpreter that may have nothing of serl_chunk.

An observation travels once in a row, not again as the next row's predecessor, as HIL-SERL's transitions would have it:
that is what the others send. The learner's store counts rows and keeps none. Every `update` asks the learner
first for the last row it has: that belongs to the class.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from agentlace.data.data_store import DataStoreBase, QueuedDataStore
from agentlace.trainer import TrainerClient, TrainerConfig, TrainerServer

from support.transport_baselines import workload
from support.transport_baselines.workload import Row

TIMEOUT_MS = 3000  # of a request, as HIL-SERL sets it
WAIT = 120.0  # seconds until rows that have not arrived never will


class Counter(DataStoreBase):
    """Counts the rows it is given, and the distinct ones by their number."""

    def __init__(self) -> None:
        super().__init__(0)
        self.count = 0
        self.seen: set[int] = set()

    def latest_data_id(self) -> int:
        return self.count - 1

    def get_latest_data(self, from_id: Any) -> list[Any]:
        return []

    def __len__(self) -> int:
        return self.count

    def insert(self, data: Any) -> None:
        self.batch_insert([data])

    def batch_insert(self, batch_data: list[Any]) -> None:
        self.count += len(batch_data)
        self.seen.update(row["number"] for row in batch_data)


class Learner(workload.Publisher):
    """One server for the life of the process: stopping it from outside its thread is not safe."""

    _server: TrainerServer | None = None

    def open(self, ports: list[int], names: list[str], **_: Any) -> dict[str, Any]:
        """Serve at two ports; a store for each actor. Called again, forget what came before."""
        if self._server is None:
            self._server = TrainerServer(TrainerConfig(port_number=ports[0], broadcast_port=ports[1]))
            self._server.start(threaded=True)
        self._stores = {name: Counter() for name in names}
        for name, store in self._stores.items():
            self._server.register_data_store(name, store)
        return {"port": ports[0], "ready_at": time.monotonic()}

    def close(self) -> dict[str, float]:
        """What was received since `open`."""
        return {
            "steps": sum(len(s.seen) for s in self._stores.values()),
            "delivered": sum(s.count for s in self._stores.values()),
            "peak_memory": workload.memory("VmHWM"),
        }

    def publish(self) -> float:
        assert self._server is not None
        arrays = self._parameters.next()
        start = time.monotonic()
        self._server.publish_network({"at": start, "params": arrays})
        return time.monotonic() - start


class Actor:
    """A client with a queue that never overflows."""

    def connect(
        self, ports: list[int], name: str, batch: int = 1, queue: int = 0, subscribe: bool = False, **_: Any
    ) -> None:
        """`queue`: rows kept; by default twice a batch, because every update copies a list of them."""
        self._name, self._batch = name, batch
        self._store = QueuedDataStore(queue or max(200, 2 * batch))
        self._news = threading.Condition()
        self._at = 0.0
        config = TrainerConfig(port_number=ports[0], broadcast_port=ports[1])
        self._client = TrainerClient(
            name, "127.0.0.1", config, self._store, wait_for_server=True, timeout_ms=TIMEOUT_MS
        )
        if subscribe:
            self._client.recv_network_callback(self._on_network)
        self._sent_bytes, self._number = 0, 0
        compress = self._client.req_rep_client.compress

        def counting(data: Any) -> bytes:
            frame: bytes = compress(data)
            self._sent_bytes += len(frame)
            return frame

        self._client.req_rep_client.compress = counting

    def _on_network(self, payload: dict[str, Any]) -> None:
        with self._news:
            self._at = payload["at"]
            self._news.notify_all()

    def disconnect(self) -> None:
        self._client.stop()
        del self._client

    def prepare(self, n: int, cameras: bool, **_: Any) -> None:
        self._rows = [row for _, row in zip(range(n), workload.rows(cameras), strict=False)]

    def _transition(self, _tick: int, row: Row) -> dict[str, Any]:
        """A row as a learner of HIL-SERL's kind would take it, and its number."""
        self._number += 1
        fields = {"observations": row.observation, "actions": row.action, "rewards": 0.0, "masks": 1.0, "dones": False}
        return {**fields, "number": self._number}

    def send(self) -> dict[str, float]:
        """Insert a batch, update, and so on; wait until the learner has all."""
        cpu, start, before = time.process_time(), time.monotonic(), self._sent_bytes
        for first in range(0, len(self._rows), self._batch):
            for row in self._rows[first : first + self._batch]:
                self._store.insert(self._transition(0, row))
            self._client.update()
        self._settle()
        figures = {"start": start, "end": time.monotonic(), "cpu_s": time.process_time() - cpu}
        return {**figures, "bytes": self._sent_bytes - before}

    def _settle(self) -> bool:
        """Update until the learner says it has the last row; False where it never does."""
        deadline = time.monotonic() + WAIT
        while self._client.get_server_last_update_id(self._name) != self._store.latest_data_id():
            if time.monotonic() > deadline:
                return False
            self._client.update()
        return True

    def round_trips(self, n: int, cameras: bool) -> list[float]:
        """Seconds that inserting one row and updating take, as percentiles."""
        took = []
        for tick, row in zip(range(n), workload.rows(cameras), strict=False):
            start = time.monotonic()
            self._store.insert(self._transition(tick, row))
            self._client.update()
            took.append(time.monotonic() - start)
        return workload.percentiles(took)

    def control_loop(self, seconds: float, cameras: bool) -> dict[str, list[float]]:
        """See workload.control_loop; a hand-over inserts and updates."""

        def hand_over(row: dict[str, Any]) -> None:
            self._store.insert(row)
            self._client.update()

        return workload.control_loop(seconds, cameras, self._transition, hand_over)

    def newest_after(self, at: float) -> float:
        """Wait for parameters published later than `at`; seconds from then until the callback had them."""
        with self._news:
            if not self._news.wait_for(lambda: self._at > at, WAIT):
                raise SystemExit("the parameters did not arrive")
        return time.monotonic() - self._at

    def published_at(self) -> float:
        return self._at

    def collect(self, n: int, period: float) -> dict[str, float]:
        """Insert `n` rows with cameras, one every `period` seconds, without an update."""
        before = workload.memory()
        for _, row in zip(range(n), workload.rows(True, fresh=True), strict=False):
            self._store.insert(self._transition(0, row))
            time.sleep(period)
        return {"before": before, "after": workload.memory()}

    def drain(self) -> dict[str, float]:
        """Update until the learner has the last row."""
        settled = self._settle()
        return {"end": time.monotonic(), "peak_memory": workload.memory("VmHWM"), "settled": settled}
