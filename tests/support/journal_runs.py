"""A run folder whose journal is written as a learner writes it, and what an episode must be to be the same."""

import contextlib
import json
from pathlib import Path

import numpy as np
from coded_episodes import SPEC
from transport_tools import StoredSession

from serl_chunk.data.source import decode_images
from serl_chunk.runs.episodes import JOURNAL
from serl_chunk.runs.folder import FORMAT
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.types import STEP_COLUMNS
from serl_chunk_robot.wire.codec import Limits

RNG = np.random.default_rng
LIMITS = Limits(64 << 20, 64)


class Run:
    """A run folder whose journal is written as the learner's intake does it."""

    def __init__(self, path: Path, spec=SPEC) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        config = {"format": FORMAT, "name": "coded", "robot_spec": spec.to_json()}
        (path / "config.json").write_text(json.dumps(config))
        self.sessions: dict[str, StoredSession] = {}
        self.store: RecordStore | None = None

    @contextlib.contextmanager
    def opened(self, **options):
        self.store = RecordStore(
            self.path / JOURNAL, LIMITS, **{"segment_bytes": 4000, "sync_interval": 60.0} | options
        )
        list(self.store.replay())
        try:
            yield self
        finally:
            self.store.close()

    def put(self, session: str, record, *, jpeg_quality=0) -> None:
        s = self.sessions.setdefault(session, StoredSession(session))
        s.put(self.store, record, jpeg_quality=jpeg_quality)

    def feed(self, episodes, seed=0, **options) -> None:
        """The episodes, those of different sessions interleaved record by record."""
        rng = RNG(seed)
        queues: dict[str, list] = {}
        for e in episodes:
            queues.setdefault(e.session, []).extend(e.records(rng))
        while queues:
            session = str(rng.choice(sorted(queues)))
            self.put(session, queues[session].pop(0), **options)
            if not queues[session]:
                del queues[session]


def assert_equal(a, b) -> None:
    """Two episodes are equal in every field, dtype and byte; their images as they are decoded."""
    a, b = decode_images(a), decode_images(b)
    assert a.begin == b.begin
    assert (a.steps.episode_id, a.steps.first_tick) == (b.steps.episode_id, b.steps.first_tick)
    assert a.end._replace(final_observation=None) == b.end._replace(final_observation=None)
    assert (a.end.final_observation is None) == (b.end.final_observation is None)
    of_a, of_b = (
        {name: getattr(e.steps, name) for name in ("action", *STEP_COLUMNS)}
        | e.steps.observation
        | {f"index/{k}": r.index for k, r in e.steps.sparse.items()}
        | {k: r.values for k, r in e.steps.sparse.items()}
        | {f"final/{k}": v for k, v in (e.end.final_observation or {}).items()}
        for e in (a, b)
    )
    assert sorted(of_a) == sorted(of_b)
    for key, value in of_a.items():
        assert (value.dtype, value.shape) == (of_b[key].dtype, of_b[key].shape), key
        assert value.tobytes() == of_b[key].tobytes(), key
