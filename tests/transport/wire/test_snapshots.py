"""Snapshots arrive whole, newest only, and leaves that did not change are not sent again."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from errors import naming
from ports import free_port
from transport_tools import CONFIG, LIMITS, RawActor, eventually, linked, serving

from serl_chunk.transport.client.snapshots import FetchError, SnapshotClient
from serl_chunk.transport.wire import snapshots
from serl_chunk.transport.wire.snapshots import Manifest, Published, Pull, answer_pull
from serl_chunk.types import ConfigError, DataError, PolicyOrigin, Snapshot
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Message, WireError

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
            pull = Pull(Manifest.decode(actor.receive(actor.snapshots)), {})
            for version in range(2, 10):
                server.publish(Snapshot(version, parameters(version, 1 << 20)), {})
                eventually(lambda v=version: server.stats()["snapshot_version"] == v)
            while (ranges := pull.request(1 << 18)) is not None:
                fields = {"token": actor.token, "ranges": ranges}
                actor.snapshots.send_multipart(codec.encode(snapshots.PULL, fields))
                pull.receive(actor.receive(actor.snapshots))  # and no announcement in between
            assert_same(pull.result(), 1, old)
            actor.snapshots.send_multipart(codec.encode(snapshots.SUBSCRIBE, {**subscribe, "version": 1}))
            assert Manifest.decode(actor.receive(actor.snapshots)).version == 9
        finally:
            actor.close()
        with linked(port) as link:
            assert link.wait_until(lambda: link.latest() is not None, 10)
            assert_same(link.latest(), 9, new)
            assert link.stats()["snapshots"] == 1


def test_a_restarted_learner_sends_only_what_its_predecessor_did_not(monkeypatch):
    """Killed in the middle of a pull; the successor publishes a newer version that shares two leaves of three."""
    port, n = free_port(), 1 << 20
    rng = np.random.default_rng(0)
    old = {name: rng.integers(0, 255, n, np.uint8) for name in "abc"}
    new = {**old, "c": rng.integers(0, 255, n, np.uint8)}
    sent = 0

    def until_half(request, published, max_bytes):
        nonlocal sent
        sent += sum(r[2] for r in request.header["ranges"])
        if sent > n * 1.5:
            return codec.encode(snapshots.PIECE, {"ranges": [[b"lost on the way", 0, 1]]})
        return answer_pull(request, published, max_bytes)

    with linked(port, connect=False) as link:
        with monkeypatch.context() as patched, serving(port) as server:
            patched.setattr(snapshots, "answer_pull", until_half)
            link.connect(10)
            server.publish(Snapshot(1, old), {})
            assert link.wait_until(lambda: sent > n * 1.5, 10)
        arrived = link.stats()["snapshot_bytes"]
        assert arrived > n
        with serving(port) as server:
            assert link.wait_until(lambda: link.stats()["connections"] == 2, 10)
            server.publish(Snapshot(2, new), {})
            assert link.wait_until(lambda: link.latest() is not None, 10)
            assert_same(link.latest(), 2, new)
            assert link.stats()["snapshot_bytes"] == 3 * n
            assert server.stats()["snapshot_bytes"] < 1.01 * (3 * n - arrived)


def test_the_learner_keeps_the_newest_version_and_those_that_are_pulled():
    port, kept = free_port(), {}

    def publish(server, version):
        array = np.full(1 << 16, version, np.uint8)
        kept[version] = weakref.ref(array)
        server.publish(Snapshot(version, {"a": array}), {})

    def alive():
        gc.collect()
        return [version for version, array in kept.items() if array() is not None]

    actors = []
    patient = dataclasses.replace(CONFIG, timeout_s=30.0)  # these actors send no heartbeats
    with serving(port, config=patient) as server:
        try:
            for version in range(1, 8):
                publish(server, version)
                actors.append(RawActor(port, session=f"s{version}", actor_id=f"a{version}"))
                actors[-1].snapshots.send_multipart(
                    codec.encode(snapshots.SUBSCRIBE, {"token": actors[-1].token, "version": -1})
                )
                pull = Pull(Manifest.decode(actors[-1].receive(actors[-1].snapshots)), {})
            for version in range(8, 12):
                publish(server, version)
            eventually(lambda: alive() == [1, 2, 3, 4, 11])  # the oldest are nearest to their end
            fields = {"token": actors[-1].token, "ranges": pull.request(1 << 16)}
            actors[-1].snapshots.send_multipart(codec.encode(snapshots.PULL, fields))
            assert actors[-1].receive(actors[-1].snapshots).kind == snapshots.GONE
            for actor in actors[:3]:
                actor.snapshots.send_multipart(
                    codec.encode(snapshots.SUBSCRIBE, {"token": actor.token, "version": 10**6})
                )
            eventually(lambda: alive() == [4, 11])
        finally:
            for actor in actors:
                actor.close()


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
        published = Published(Snapshot(1, {"a": np.zeros(3)}, origin=origin), {})
        with pytest.raises(WireError, match=naming("snapshot", "digest", 1)):
            client.receive(codec.decode(published.announcement, LIMITS))


def test_a_checkpoint_that_another_runs_learner_cannot_complete_is_an_error(monkeypatch):
    """What came of it is of the run before."""
    port, asked = free_port(), threading.Event()

    def piece(request, published, max_bytes):
        asked.set()
        return codec.encode(snapshots.PIECE, {"ranges": [[b"lost on the way", 0, 1]]})

    monkeypatch.setattr(snapshots, "answer_pull", piece)
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


LEAF = Published(Snapshot(0, {"a": np.zeros(3, np.float32)}), {})
DIGEST = LEAF.manifest.leaves[0].digest


@pytest.mark.parametrize(
    "ranges",
    [[], [[DIGEST, 0, 13]], [[0, 0, 1]], [[DIGEST, -1, 2]], [[DIGEST, 13, 0]], [[DIGEST, 0]], [DIGEST],
     [[DIGEST, 0, 12]] * 65, [[DIGEST, 0, 1000]] * 2, None],
)  # fmt: skip
def test_pulls_outside_a_snapshot_are_refused(ranges):
    with pytest.raises(WireError):
        answer_pull(Message("pull", {"ranges": ranges}, {}, 0), [LEAF], 1000)


def answered(published: list[Published], ranges: object) -> Message:
    """What a server that has `published` answers."""
    frames = answer_pull(Message("pull", {"ranges": [list(r) for r in ranges]}, {}, 0), published, 1 << 20)
    return codec.decode(frames, LIMITS)


def test_pieces_cover_every_byte_within_their_size():
    params = parameters(2, 1 << 16)
    published = Published(Snapshot(5, params), {})
    pull = Pull(Manifest.decode(codec.decode(published.announcement, LIMITS)), {})
    sizes = []
    while (ranges := pull.request(1000)) is not None:
        piece = answered([published], ranges)
        pull.receive(piece)
        pull.receive(piece)  # a repeated answer changes nothing
        sizes.append(sum(a.nbytes for a in piece.arrays.values()))
    assert pull.complete
    assert max(sizes) <= 1000
    assert_same(pull.result(), 5, params)


def test_a_false_piece_is_refused():
    pull = Pull(LEAF.manifest, {})
    ranges = pull.request(1000)
    assert ranges is not None
    header = {"ranges": [list(r) for r in ranges]}
    for arrays in ({}, {"0": np.zeros(11, np.uint8)}, {"0": np.zeros(3, np.float32)}):
        with pytest.raises(WireError):
            pull.receive(Message("piece", header, arrays, 0))
    assert pull.receive(answered([LEAF], ranges)) == ranges


@pytest.mark.parametrize("seed", range(20))
def test_answers_in_any_order_and_more_than_once_complete_a_snapshot_of_one_manifest(seed):
    """The learner is replaced, connections break and newer versions are published in the middle of a pull."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 3, (5, 8))  # leaf i of version v: versions share some leaves, and leaves are equal
    versions = [
        Published(Snapshot(v, {f"l{i}": np.full(40 * i + 1, x, np.uint8) for i, x in enumerate(row)}), {})
        for v, row in enumerate(values)
    ]
    server, newest = [versions[0]], 0
    pull, under_way, answers = Pull(versions[0].manifest, {}), [], []
    while not pull.complete:
        match rng.integers(7):
            case 0 | 1 if (ranges := pull.request(int(rng.integers(1, 100)))) is not None:
                under_way.append(ranges)
            case 2 | 3 if under_way:
                message = answered(server, under_way.pop(rng.integers(len(under_way))))
                answers += [message] * int(rng.integers(1, 3))
            case 4 | 5 if answers:
                message = answers.pop(rng.integers(len(answers)))
                if message.kind == snapshots.PIECE:
                    pull.receive(message)
                elif pull.put_back(snapshots.decode_ranges(message.header)):
                    pull = Pull(versions[newest].manifest, {}, pull)
            case 6 if rng.random() < 0.1:
                if newest < 4 and rng.random() < 0.5:
                    newest += 1
                    server = [versions[newest]]
                else:
                    under_way, answers = [], []
                    pull.restart()
    got = pull.result()
    assert {path: a.tobytes() for path, a in got.params.items()} == {
        f"l{i}": np.full(40 * i + 1, x, np.uint8).tobytes() for i, x in enumerate(values[got.version])
    }


def test_a_snapshot_that_arrives_damaged_is_asked_for_again(monkeypatch):
    """Below TCP's checksums, or in a learner's broken memory."""
    damaged, port = [], free_port()

    def sometimes(request, published, max_bytes):
        frames = answer_pull(request, published, max_bytes)
        if not damaged:
            damaged.append(True)
            frames[1] = bytes([frames[1][0] ^ 1]) + bytes(frames[1][1:])
        return frames

    monkeypatch.setattr(snapshots, "answer_pull", sometimes)
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
            Message("manifest", {"version": 1, "info": {}, "leaves": rows, "narrowed": [], **ORIGIN}, {}, 0)
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
        header = {"version": 1, "info": {}, "leaves": rows, "narrowed": narrowed, **ORIGIN}
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
