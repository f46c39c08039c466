"""Snapshots arrive whole, newest only, and leaves that did not change are not sent again."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from errors import naming
from transport_tools import CONFIG, LIMITS, RawActor, eventually, linked, serving

from serl_chunk.transport.client.snapshots import FetchError, SnapshotClient
from serl_chunk.transport.sockets import free_port
from serl_chunk.transport.wire import codec, snapshots
from serl_chunk.transport.wire.codec import Message, WireError
from serl_chunk.transport.wire.snapshots import Manifest, Published, Pull
from serl_chunk.types import ConfigError, DataError, PolicyOrigin, Snapshot

ORIGIN = PolicyOrigin()._asdict()


def parameters(seed: int, big: int = 10 << 20) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "trunk/w": rng.integers(0, 255, big, np.uint8).view(np.float32).reshape(-1, 64),
        "head/w": np.ones((3, 5), ml_dtypes.bfloat16) * seed,
        "head/b": np.float32(seed),
        "empty": np.zeros((0, 4), np.float32),
        **{f"small/{i}": np.full(3, seed, np.float32) for i in range(150)},
    }


def assert_same(got: Snapshot, version: int, params: dict[str, np.ndarray]) -> None:
    assert got.version == version
    assert list(got.params) == list(params)
    for path, value in params.items():
        a = got.params[path]
        assert (a.dtype, a.shape, a.tobytes()) == (np.asarray(value).dtype, np.shape(value), value.tobytes())
        assert not a.flags.writeable


def test_a_snapshot_arrives_whole_and_unchanged_leaves_are_not_sent_again():
    port = free_port()
    params = parameters(1)
    with serving(port) as server, linked(port) as link:
        assert link.latest() is None
        server.publish(Snapshot(1, params), {"loss": 0.5})
        assert link.wait_until(lambda: link.latest() is not None, 10)
        assert_same(link.latest(), 1, params)
        assert link.latest_info() == {"loss": 0.5}
        before = link.stats()["snapshot_bytes"], server.stats()["snapshot_bytes"]
        assert before[0] >= 10 << 20
        changed = {**params, "head/b": np.float32(2)}
        server.publish(Snapshot(2, changed), {})
        assert link.wait_until(lambda: link.latest().version == 2, 10)
        assert_same(link.latest(), 2, changed)
        assert link.stats()["snapshot_bytes"] - before[0] == 4
        assert server.stats()["snapshot_bytes"] - before[1] < 200


def test_versions_only_go_up_and_odd_dtypes_are_refused_at_once():
    with serving(free_port()) as server:
        server.publish(Snapshot(3, {"a": np.zeros(3)}), {})
        with pytest.raises(ConfigError, match=naming("version", 3)):
            server.publish(Snapshot(3, {"a": np.zeros(3)}), {})
        with pytest.raises(WireError, match=naming("dtype", "<U1")):
            server.publish(Snapshot(4, {"a": np.array(["x"])}), {})


def test_a_slow_client_sees_only_the_newest_and_finishes_what_it_began():
    """By hand: an announcement comes once; a pull of an old version completes while newer ones are published."""
    port = free_port()
    old, new = parameters(1, 1 << 20), parameters(9, 1 << 20)
    with serving(port) as server:
        actor = RawActor(port)
        try:
            server.publish(Snapshot(1, old), {})
            eventually(lambda: server.stats()["snapshot_version"] == 1)
            subscribe = {"token": actor.token, "version": -1}
            actor.snapshots.send_multipart(codec.encode(snapshots.SUBSCRIBE, subscribe))
            pull = Pull(Manifest.decode(actor.receive(actor.snapshots)), {}, 1 << 18)
            for version in range(2, 10):
                server.publish(Snapshot(version, parameters(version, 1 << 20)), {})
                eventually(lambda v=version: server.stats()["snapshot_version"] == v)
            while (ranges := pull.request()) is not None:
                fields = {"token": actor.token, "key": pull.manifest.key, "ranges": [list(r) for r in ranges]}
                actor.snapshots.send_multipart(codec.encode(snapshots.PULL, fields))
                pull.receive(actor.receive(actor.snapshots))  # and no announcement in between
            assert_same(pull.result()[0], 1, old)
            actor.snapshots.send_multipart(codec.encode(snapshots.SUBSCRIBE, {**subscribe, "version": 1}))
            assert Manifest.decode(actor.receive(actor.snapshots)).version == 9
        finally:
            actor.close()
        with linked(port) as link:
            assert link.wait_until(lambda: link.latest() is not None, 10)
            assert_same(link.latest(), 9, new)
            assert link.stats()["snapshots"] == 1


def test_a_version_never_goes_back_within_a_run_and_may_in_another():
    port = free_port()
    with linked(port, connect=False) as link:
        with serving(port, run_id="one") as server:
            link.connect(10)
            server.publish(Snapshot(7, {"a": np.full(3, 7.0)}), {})
            assert link.wait_until(lambda: link.latest() is not None, 10)
        with serving(port, run_id="one") as server:
            server.publish(Snapshot(3, {"a": np.full(3, 3.0)}), {})
            assert link.wait_until(lambda: link.stats()["connections"] == 2, 10)
            server.publish(Snapshot(8, {"a": np.full(3, 8.0)}), {})
            assert link.wait_until(lambda: link.latest().version == 8, 10)
            assert link.stats()["snapshots"] == 2  # 3 was never taken
        with serving(port, run_id="two") as server:
            assert link.wait_until(lambda: link.welcome is not None and link.welcome.run == "two", 10)
            assert link.latest() is None  # nothing of the run before acts in this one
            server.publish(Snapshot(1, {"a": np.full(3, 1.0)}), {})
            assert link.wait_until(lambda: link.latest() is not None, 10)
            assert (link.latest().version, link.latest().origin.run) == (1, "two")


def test_a_restarted_learner_with_another_normaliser_has_its_snapshots_pulled_anew():
    """The same run, resumed before its first checkpoint with other demonstrations."""
    port = free_port()
    with linked(port, connect=False) as link:
        for digest, value in (("before", 1.0), ("after", 2.0)):
            welcome = {"normaliser_digest": digest}
            with serving(port, welcome=lambda w=welcome: (w, {})) as server:
                link.connect(10)
                assert link.wait_until(lambda d=digest: link.welcome.origin == PolicyOrigin("run", d), 10)
                assert link.latest() is None
                server.publish(Snapshot(1, {"a": np.full(3, value)}, origin=PolicyOrigin(normaliser=digest)), {})
                assert link.wait_until(lambda: link.latest() is not None, 10)
                assert link.latest().origin == PolicyOrigin("run", digest)
                assert link.latest().params["a"][0] == value


def test_a_manifest_of_another_run_or_normaliser_than_the_welcomes_is_refused():
    client = SnapshotClient(1 << 18, 1.0)
    client.connected(PolicyOrigin("run", "digest"))
    for origin in (PolicyOrigin("other", "digest"), PolicyOrigin("run", "other"), PolicyOrigin()):
        published = Published("k", Snapshot(1, {"a": np.zeros(3)}, origin=origin), {})
        with pytest.raises(WireError, match=naming("snapshot", "digest", 1)):
            client.receive(codec.decode(published.announcement, LIMITS))


def test_a_checkpoint_that_another_runs_learner_cannot_complete_is_an_error(monkeypatch):
    """What came of it is of the run before."""
    port, asked = free_port(), threading.Event()

    def piece(self, request, max_bytes):
        asked.set()
        return codec.encode(snapshots.PIECE, {"key": "lost on the way"})

    monkeypatch.setattr(Published, "piece", piece)
    with linked(port, connect=False) as link, ThreadPoolExecutor(1) as pool:
        with serving(port, run_id="one", fetch=lambda step: (Snapshot(4, {"a": np.zeros(3)}), {})):
            link.connect(10)
            fetched = pool.submit(link.fetch_checkpoint, "latest", 20)
            assert asked.wait(10)
        with serving(port, run_id="two"), pytest.raises(FetchError, match="the learner was replaced"):
            fetched.result(20)


def test_checkpoints_are_fetched_by_name():
    def fetch(step):
        if step != "best":
            raise DataError(f"no checkpoint {step}; there are: best")
        return Snapshot(40, params), {"success": 0.9}

    port = free_port()
    params = parameters(4, 1 << 20)
    with serving(port, fetch=fetch) as server, linked(port) as link:
        server.publish(Snapshot(50, {**params, "head/b": np.float32(0)}), {})
        assert link.wait_until(lambda: link.latest() is not None, 10)
        before = link.stats()["snapshot_bytes"]
        got, info = link.fetch_checkpoint("best", 10)
        assert_same(got, 40, params)
        assert info == {"success": 0.9}
        assert link.stats()["snapshot_bytes"] - before == 4  # what the snapshot shares is not sent again
        with pytest.raises(FetchError, match=naming(12, "best")):
            link.fetch_checkpoint("12", 10)
        assert link.latest().version == 50


def test_a_learner_without_checkpoints_says_so():
    port = free_port()
    with serving(port), linked(port) as link, pytest.raises(FetchError, match=naming("checkpoints")):
        link.fetch_checkpoint("latest", 10)


@pytest.mark.parametrize(
    "ranges", [[], [[0, 0, 13]], [[1, 0, 1]], [[0, -1, 2]], [[0, 13, 0]], [[0, 0]], [0], [[0, 0, 12]] * 65, None]
)
def test_pulls_outside_a_snapshot_are_refused(ranges):
    published = Published("k", Snapshot(0, {"a": np.zeros(3, np.float32)}), {})
    with pytest.raises(WireError):
        published.piece(Message("pull", {"ranges": ranges}, {}, 0), 1000)


def test_pieces_cover_every_byte_within_their_size():
    params = parameters(2, 1 << 16)
    published = Published("k", Snapshot(5, params), {})
    manifest = Manifest.decode(codec.decode(published.announcement, LIMITS))
    pull = Pull(manifest, {}, 1000)
    sizes = []
    while (ranges := pull.request()) is not None:
        request = Message("pull", {"ranges": [list(r) for r in ranges]}, {}, 0)
        piece = codec.decode(published.piece(request, CONFIG.max_message_bytes), LIMITS)
        pull.receive(piece)
        pull.receive(piece)  # a repeated answer changes nothing
        sizes.append(sum(a.nbytes for a in piece.arrays.values()))
    assert pull.complete
    assert max(sizes) <= 1000
    assert_same(pull.result()[0], 5, params)


def test_a_false_piece_is_refused():
    published = Published("k", Snapshot(5, {"a": np.zeros(3, np.float32)}), {})
    pull = Pull(published.manifest, {}, 1000)
    ranges = pull.request()
    assert ranges is not None
    header = {"ranges": [list(r) for r in ranges]}
    for arrays in ({}, {"0": np.zeros(11, np.uint8)}, {"0": np.zeros(3, np.float32)}):
        with pytest.raises(WireError):
            pull.receive(Message("piece", header, arrays, 0))


def test_a_snapshot_that_arrives_damaged_is_asked_for_again(monkeypatch):
    """Below TCP's checksums, or in a learner's broken memory."""
    piece, damaged, port = Published.piece, [], free_port()

    def sometimes(self, request, max_bytes):
        frames = piece(self, request, max_bytes)
        if not damaged:
            damaged.append(True)
            frames[1] = bytes([frames[1][0] ^ 1]) + bytes(frames[1][1:])
        return frames

    monkeypatch.setattr(Published, "piece", sometimes)
    params = parameters(1, big=1 << 16)
    with serving(port) as server, linked(port) as link:
        server.publish(Snapshot(1, params), {})
        assert link.wait_until(lambda: link.latest() is not None, 10)
        assert_same(link.latest(), 1, params)
    assert damaged


def test_a_manifest_that_claims_too_much_is_refused():
    rows = [["w", "float32", [1 << 35], b"0" * 16]]
    with pytest.raises(WireError, match=naming(4 << 35, snapshots.MAX_BYTES)):
        Manifest.decode(
            Message("manifest", {"key": "k", "version": 1, "info": {}, "leaves": rows, "narrowed": [], **ORIGIN}, {}, 0)
        )


def test_parameters_may_travel_as_bfloat16():
    port = free_port()
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(300, 70)).astype(np.float32), "n": np.int32(3), "s": np.float32(0.1)}
    config = dataclasses.replace(CONFIG, snapshot_dtype="bfloat16")
    with serving(port, config=config, fetch=lambda step: (Snapshot(4, params), {})) as server, linked(port) as link:
        server.publish(Snapshot(1, params), {})
        assert link.wait_until(lambda: link.latest() is not None, 10)
        got = link.latest().params
        assert link.stats()["snapshot_bytes"] < 300 * 70 * 2 + 100
        assert {k: v.dtype for k, v in got.items()} == {k: np.asarray(v).dtype for k, v in params.items()}
        np.testing.assert_allclose(got["w"], params["w"], rtol=2**-8)
        assert not np.array_equal(got["w"], params["w"])
        server.publish(Snapshot(2, {**params, "n": np.int32(4)}), {})
        before = link.stats()["snapshot_bytes"]
        assert link.wait_until(lambda: link.latest().version == 2, 10)
        assert link.stats()["snapshot_bytes"] - before == 4  # what did not change is not sent again
        np.testing.assert_array_equal(link.latest().params["w"], got["w"])
        assert_same(link.fetch_checkpoint("latest", 10)[0], 4, params)  # an evaluation is of the checkpoint itself


def test_a_manifest_that_narrows_other_leaves_is_refused():
    rows = [["w", "float32", [3], b"0" * 16]]
    for narrowed in ([0], [1], [-1], ["x"]):
        header = {"key": "k", "version": 1, "info": {}, "leaves": rows, "narrowed": narrowed, **ORIGIN}
        with pytest.raises(WireError, match=naming("leaves", "bfloat16")):
            Manifest.decode(Message("manifest", header, {}, 0))


def test_a_fetch_that_fails_in_an_unforeseen_way_ends_nothing(caplog):
    def fetch(step):
        raise ValueError("invalid literal")

    port = free_port()
    with serving(port, fetch=fetch) as server, linked(port) as link:
        with pytest.raises(FetchError, match=naming("²", "ValueError")):
            link.fetch_checkpoint("²", 10)
        server.check()
    assert "invalid literal" in caplog.text
