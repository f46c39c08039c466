"""Snapshots arrive whole, newest only, and leaves that did not change are not sent again."""

from __future__ import annotations

import contextlib
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

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.client.snapshots import FetchError, Pull, SnapshotClient
from serl_chunk.transport.server import control_channel
from serl_chunk.transport.server.control_channel import Published, answer_pull
from serl_chunk.transport.wire import snapshots
from serl_chunk.transport.wire.snapshots import Manifest
from serl_chunk.types import ConfigError, DataError, PolicyOrigin, Snapshot
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Message, WireError


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
    assert (got.version, list(got.params)) == (version, list(params))
    for path, value in params.items():
        a = got.params[path]
        assert (a.dtype, a.shape, a.tobytes()) == (np.asarray(value).dtype, np.shape(value), value.tobytes())
        assert not a.flags.writeable


def test_a_restarted_learner_sends_only_what_its_predecessor_did_not(monkeypatch):
    """Killed in the middle of a pull; the successor publishes a newer version that shares two leaves of three."""
    port, n, sent, rng = free_port(), 1 << 20, 0, np.random.default_rng(0)
    old = {name: rng.integers(0, 255, n, np.uint8) for name in "abc"}
    new = {**old, "c": rng.integers(0, 255, n, np.uint8)}

    def until_half(request, published, max_bytes):
        nonlocal sent
        sent += sum(r[2] for r in request.header["ranges"])
        return lost() if sent > n * 1.5 else answer_pull(request, published, max_bytes)

    with linked(port, connect=False) as link:
        with monkeypatch.context() as patched, serving(port) as server:
            patched.setattr(control_channel, "answer_pull", until_half)
            link.connect(10)
            server.publish(Snapshot(1, old), {})
            assert link.wait_until(lambda: sent > n * 1.5, 10)
        before = link.stats()["snapshot_bytes"]
        assert before > n
        with serving(port) as server:
            assert link.wait_until(lambda: link.stats()["connections"] == 2, 10)
            server.publish(Snapshot(2, new), {})
            assert_same(arrived(link, 2), 2, new)
            assert link.stats()["snapshot_bytes"] == 3 * n
            assert server.stats()["snapshot_bytes"] < 1.01 * (3 * n - before)


def test_the_learner_keeps_the_newest_version_and_those_that_are_pulled():
    port, kept, actors = free_port(), {}, []

    def publish(server, version):
        array = np.full(1 << 16, version, np.uint8)
        kept[version] = weakref.ref(array)
        server.publish(Snapshot(version, {"a": array}), {})

    def alive():
        gc.collect()
        return [version for version, array in kept.items() if array() is not None]

    def say(actor, kind, **fields):
        actor.snapshots.send_multipart(codec.encode(kind, {"token": actor.token, **fields}))

    patient = dataclasses.replace(CONFIG, timeout_s=30.0)  # these actors send no heartbeats
    with serving(port, config=patient) as server, contextlib.ExitStack() as stack:
        for version in range(1, 8):
            publish(server, version)
            actors.append(
                stack.enter_context(contextlib.closing(RawActor(port, session=f"s{version}", actor_id=f"a{version}")))
            )
            say(actors[-1], snapshots.SUBSCRIBE, version=-1)
            pull = Pull(Manifest.decode(actors[-1].receive(actors[-1].snapshots)), {})
        for version in range(8, 12):
            publish(server, version)
        eventually(lambda: alive() == [1, 2, 3, 4, 11])  # the oldest are nearest to their end
        say(actors[-1], snapshots.PULL, ranges=pull.request(1 << 16))
        assert actors[-1].receive(actors[-1].snapshots).kind == snapshots.GONE
        for actor in actors[:3]:
            say(actor, snapshots.SUBSCRIBE, version=10**6)
        eventually(lambda: alive() == [4, 11])
        say(actors[3], snapshots.SUBSCRIBE, version=1)
        assert Manifest.decode(actors[3].receive(actors[3].snapshots)).version == 11  # the newest, and once


def test_a_version_never_goes_back_within_a_run_and_may_in_another(port):
    with linked(port, connect=False) as link:
        with serving(port, run_id="one") as server:
            link.connect(10)
            server.publish(Snapshot(7, {"a": np.full(3, 7.0)}), {})
            arrived(link, 7)
        with serving(port, run_id="one") as server:
            server.publish(Snapshot(3, {"a": np.full(3, 3.0)}), {})
            assert link.wait_until(lambda: link.stats()["connections"] == 2, 10)
            server.publish(Snapshot(8, {"a": np.full(3, 8.0)}), {})
            arrived(link, 8)
            assert link.stats()["snapshots"] == 2  # 3 was never taken
        with serving(port, run_id="two") as server:
            assert link.wait_until(lambda: link.welcome is not None and link.welcome.run == "two", 10)
            assert link.latest() is None  # nothing of the run before acts in this one
            server.publish(Snapshot(1, {"a": np.full(3, 1.0)}), {})
            assert arrived(link, 1).origin.run == "two"


def test_a_manifest_of_another_run_or_normaliser_than_the_welcomes_is_refused():
    client = SnapshotClient(TransportConfig(timeout_s=1.0, max_message_bytes=1 << 18))
    client.connected(PolicyOrigin("run", "digest"))
    for origin in (PolicyOrigin("other", "digest"), PolicyOrigin("run", "other"), PolicyOrigin()):
        published = Published(Snapshot(1, {"a": np.zeros(3)}, origin=origin), {})
        with pytest.raises(WireError, match=naming("snapshot", "digest", 1)):
            client.receive(codec.decode(published.announcement, LIMITS))


def test_a_checkpoint_that_another_runs_learner_cannot_complete_is_an_error(monkeypatch):
    """What came of it is of the run before."""
    port, asked = free_port(), threading.Event()
    monkeypatch.setattr(control_channel, "answer_pull", lambda *args: asked.set() or lost())
    with linked(port, connect=False) as link, ThreadPoolExecutor(1) as pool:
        with serving(port, run_id="one", fetch=lambda step: (Snapshot(4, {"a": np.zeros(3)}), {})):
            link.connect(10)
            fetched = pool.submit(link.fetch_checkpoint, "latest", 20)
            assert asked.wait(10)
        with serving(port, run_id="two"), pytest.raises(FetchError, match="the learner was replaced"):
            fetched.result(20)


def test_checkpoints_are_fetched_by_name(caplog):
    def fetch(step):
        if step == "best":
            return Snapshot(40, params), {"success": 0.9}
        raise DataError(f"no checkpoint {step}; there are: best") if step == "12" else ValueError("invalid literal")

    port, params = free_port(), parameters(4, 1 << 20)
    with serving(port, fetch=fetch) as server, linked(port) as link:
        server.publish(Snapshot(50, {**params, "head/b": np.float32(0)}), {})
        arrived(link, 50)
        before = link.stats()["snapshot_bytes"]
        got, info = link.fetch_checkpoint("best", 10)
        assert_same(got, 40, params)
        assert info == {"success": 0.9}
        assert link.stats()["snapshot_bytes"] - before == 4  # what the snapshot shares is not sent again
        for step, named in (("12", (12, "best")), ("²", ("²", "ValueError"))):  # the second was not foreseen
            with pytest.raises(FetchError, match=naming(*named)):
                link.fetch_checkpoint(step, 10)
        assert link.latest().version == 50
        server.check()
    assert "invalid literal" in caplog.text
    with serving(port), linked(port) as link, pytest.raises(FetchError, match=naming("checkpoints")):
        link.fetch_checkpoint("latest", 10)


def answered(published: list[Published], ranges: object) -> Message:
    """What a server that has `published` answers."""
    frames = answer_pull(Message("pull", {"ranges": [list(r) for r in ranges]}, {}, 0), published, 1 << 20)
    return codec.decode(frames, LIMITS)


@pytest.mark.parametrize("seed", range(10))
def test_answers_in_any_order_and_more_than_once_complete_a_snapshot_of_one_manifest(seed):
    """The learner is replaced, connections break and newer versions are published in the middle of a pull."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 3, (5, 8))  # leaf i of version v: versions share some leaves, and leaves are equal
    versions = [
        Published(Snapshot(v, {f"l{i}": np.full(40 * i + 1, x, np.uint8) for i, x in enumerate(row)}), {})
        for v, row in enumerate(values)
    ]
    server, newest = [versions[0]], 0
    manifest = Manifest.decode(codec.decode(versions[0].announcement, LIMITS))
    pull, under_way, answers = Pull(manifest, {}), [], []
    while not pull.complete:
        most = int(rng.integers(1, 100))
        match rng.integers(7):
            case 0 | 1 if (ranges := pull.request(most)) is not None:
                assert sum(size for _, _, size in ranges) <= most
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


def test_parameters_may_travel_as_bfloat16():
    port, rng = free_port(), np.random.default_rng(0)
    params = {"w": rng.normal(size=(300, 70)).astype(np.float32), "n": np.int32(3), "s": np.float32(0.1)}
    config = dataclasses.replace(CONFIG, snapshot_dtype="bfloat16")
    with serving(port, config=config, fetch=lambda step: (Snapshot(4, params), {})) as server, linked(port) as link:
        server.publish(Snapshot(1, params), {})
        got = arrived(link, 1).params
        before = link.stats()["snapshot_bytes"]
        assert before < 300 * 70 * 2 + 100
        assert {k: v.dtype for k, v in got.items()} == {k: np.asarray(v).dtype for k, v in params.items()}
        np.testing.assert_allclose(got["w"], params["w"], rtol=2**-8)
        assert not np.array_equal(got["w"], params["w"])
        server.publish(Snapshot(2, {**params, "n": np.int32(4)}), {})
        np.testing.assert_array_equal(arrived(link, 2).params["w"], got["w"])
        assert link.stats()["snapshot_bytes"] - before == 4  # what did not change is not sent again
        assert_same(link.fetch_checkpoint("latest", 10)[0], 4, params)  # an evaluation is of the checkpoint itself


def arrived(link, version: int) -> Snapshot:
    """The version, once it has come."""
    assert link.wait_until(lambda: link.latest() is not None and link.latest().version == version, 10)
    return link.latest()


def lost(*args):
    """A piece that nobody asked for."""
    return codec.encode(snapshots.PIECE, {"ranges": [[b"lost on the way", 0, 1]]})


def test_a_snapshot_arrives_whole_and_unchanged_leaves_are_not_sent_again():
    """Also where it was damaged below TCP's checksums, or in a learner's broken memory, and is asked for again."""
    port, params, damaged = free_port(), parameters(1), []

    def sometimes(request, published, max_bytes):
        frames = answer_pull(request, published, max_bytes)
        if not damaged:
            damaged.append(len(frames[1]))
            frames[1] = bytes([frames[1][0] ^ 1]) + bytes(frames[1][1:])
        return frames

    with serving(port) as server, linked(port) as link, pytest.MonkeyPatch.context() as patched:
        patched.setattr(control_channel, "answer_pull", sometimes)
        assert link.latest() is None
        server.publish(Snapshot(3, params), {"loss": 0.5})
        assert_same(arrived(link, 3), 3, params)
        assert damaged
        before = link.stats()["snapshot_bytes"], server.stats()["snapshot_bytes"]
        assert before[0] >= 10 << 20
        changed = {**params, "head/b": np.float32(2)}
        server.publish(Snapshot(4, changed), {})
        assert_same(arrived(link, 4), 4, changed)
        assert link.stats()["snapshot_bytes"] - before[0] == 4
        assert server.stats()["snapshot_bytes"] - before[1] < 200
        with pytest.raises(ConfigError, match=naming("version", 4)):
            server.publish(Snapshot(4, {"a": np.zeros(3)}), {})
        with pytest.raises(WireError, match=naming("dtype", "<U1")):
            server.publish(Snapshot(5, {"a": np.array(["x"])}), {})
