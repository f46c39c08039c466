"""The state of a learner and its actors as Prometheus text, for those who watch a fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from serl_chunk.transport.wire.handshake import ActorState
from serl_chunk.types import ConfigError

LOOPBACK = "127.0.0.1"


class MetricsPage:
    """Serves gauges at http://ADDRESS:PORT/metrics from a thread of its own, which reads them when it is asked.

    Args:
        where: PORT of this machine alone, or ADDRESS:PORT.
        learner: returns the learner's figures by name; `actors` those of each actor.

    Raises ConfigError for an address that cannot be served.
    """

    def __init__(
        self, where: str, learner: Callable[[], Mapping[str, float]], actors: Callable[[], Iterable[ActorState]]
    ) -> None:
        address, _, port = where.rpartition(":")
        if not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(f"must be PORT or ADDRESS:PORT, got {where!r}", parameter="metrics_port")

        class Gauges:
            def collect(self) -> Iterable[GaugeMetricFamily]:
                for name, value in learner().items():
                    yield GaugeMetricFamily(f"serl_chunk_{name}", name.replace("_", " "), value)
                known = list(actors())
                for name, text, read in (
                    ("connected", "1 while the learner hears from it", lambda a: float(a.connected)),
                    ("steps", "delivered", lambda a: a.steps),
                    ("silent_seconds", "since the learner heard from it", lambda a: a.silent_s),
                    ("restarts", "of its process", lambda a: a.restarts),
                    ("snapshot_age_seconds", "since its snapshot was published; -1: none", lambda a: a.snapshot_age_s),
                    ("unacknowledged_records", "at its last heartbeat", lambda a: a.unacknowledged),
                ):
                    family = GaugeMetricFamily(f"serl_chunk_actor_{name}", text, labels=["actor"])
                    for actor in known:
                        family.add_metric([actor.actor_id], read(actor))
                    yield family

        registry = CollectorRegistry(auto_describe=False)
        registry.register(Gauges())  # type: ignore[arg-type]
        try:
            self._server, self._thread = start_http_server(int(port), address or LOOPBACK, registry)
        except OSError as error:
            raise ConfigError(f"{where} cannot be served: {error.strerror}", parameter="metrics_port") from error

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
