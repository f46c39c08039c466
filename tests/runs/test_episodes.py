"""Episodes come back out of a run's journal as they went in, and as the replay has them, while it is being written."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import threading

import numpy as np
import pytest
from coded_episodes import SPEC, config, make, preprocess
from coded_replay import RNG, coded, read_held
from errors import naming
from journal_runs import Run, assert_equal

from serl_chunk.data.demos import end_at_first_success, load_demos
from serl_chunk.data.frames import Frames
from serl_chunk.data.source import ReadOptions
from serl_chunk.data.validate import check_episode
from serl_chunk.replay.replay import Replay
from serl_chunk.runs import folder
from serl_chunk.runs.episodes import FORMAT, JOURNAL, RunSource, is_run
from serl_chunk.transport.storage.segment import HEADER_BYTES
from serl_chunk.types import Amend, Begin, CameraSpec, ConfigError, DataError, End, Outcome, Source, StepBlock


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path / "run")


def test_episodes_of_several_sessions_come_back_exactly_in_the_order_of_their_ends(run):
    rng = RNG(7)
    episodes = [make(rng, k, session=s, every_frame=True, shared=True) for k, s in enumerate("abab" * 3)]
    assert sum(len(e.shared) for e in episodes) > 5
    with run.opened():
        run.feed(episodes)
    source = RunSource(run.path)
    assert sorted(source.keys()) == sorted(f"{e.session}/{e.episode_id}" for e in episodes)
    assert len(list((run.path / JOURNAL).iterdir())) > 3  # segments
    for e in episodes:
        assert_equal(source.read(f"{e.session}/{e.episode_id}"), e.episode())
    assert source.notes() == []
    assert source.hz == 50.0
    with run.opened():  # the run goes on: what is there keeps its place
        run.feed([make(rng, 20, session="a")])
    assert source.keys()[:-1] == RunSource(run.path).keys()[:12]
    assert source.keys()[-1] == "a/e20"


def test_streamed_demonstrations_are_marked_and_unfinished_ones_left_out(run):
    records = list(make(RNG(3), 0, session="d").records(RNG(0)))
    begin = records[0]._replace(demonstration=True)
    with run.opened():
        for record in (begin, *records[1:-1], begin, *records[1:]):  # its recording died, and sent it again
            run.put("d", record)
        run.feed([make(RNG(4), 1, session="a")])
    source = RunSource(run.path)
    assert {key: source.about(key).demonstration for key in source.keys()} == {"d/e0": True, "a/e1": False}
    assert source.read("d/e0").begin.demonstration
    assert any("1 demonstrations have no end" in note for note in source.notes())


def test_they_are_what_the_replay_has(run):
    rng = RNG(1)
    episodes = [make(rng, k, session="ab"[k % 2]) for k in range(10)]
    cfg = config(max_image_age=3)
    replay = Replay(SPEC, cfg, preprocess(cfg, ("a", "b")), bc_on="+successes")
    with run.opened():
        run.feed(episodes)
        for k, amend in (
            (1, Amend("e1", discard=True)),
            (2, Amend("e2", Outcome.SUCCESS, "operator", True, 1.0)),
            (4, Amend("e4", Outcome.FAILURE, "operator")),
        ):
            run.put(episodes[k].session, amend)
        run.put("c", Begin("open"))
        run.put("c", dataclasses.replace(coded(50, 6).episode().steps, episode_id="open"))
    with run.opened():
        for stored in run.store.replay():
            if stored.delivered:
                replay.insert(stored.session, stored.record)
    source = RunSource(run.path)
    held = [key for key in replay.episodes() if key[1] != "open"]
    assert sorted(source.keys()) == sorted("/".join(key) for key in held)
    for session, name in held:
        ours, theirs = source.read(f"{session}/{name}"), read_held(replay, session, name)
        assert ours.end.outcome == theirs.end.outcome
        assert (ours.end.terminated, ours.end.truncated) == (theirs.end.terminated, theirs.end.truncated)
        reward = ours.steps.reward.copy()
        reward[-1] = reward[-1] if ours.end.reward is None else ours.end.reward
        np.testing.assert_array_equal(reward, theirs.steps.reward)
        np.testing.assert_array_equal(ours.steps.observation["state"], theirs.steps.observation["state"])
        for key, rows in theirs.steps.sparse.items():
            np.testing.assert_array_equal(np.asarray(ours.steps.sparse[key].values), rows.values)
    assert source.about(f"{episodes[2].session}/e2").outcome is Outcome.SUCCESS


@pytest.mark.parametrize("amend_at", ["at once", "an episode later"])
@pytest.mark.parametrize("discard", [False, True])
def test_a_verdict_on_an_episode_that_was_given_up_means_the_same_live_restarted_and_exported(run, discard, amend_at):
    """Its last step is not what they judged: it keeps its truncation. To forget it is possible always."""
    cfg, episodes = config(), [coded(k, 12, "success").episode() for k in range(3)]
    live, restarted = (Replay(SPEC, cfg, preprocess(cfg, ("a", "b")), bc_on="+successes") for _ in range(2))

    def put(record) -> None:
        follows = "s" not in run.sessions or run.sessions["s"].delivers(record)
        run.put("s", record)
        if follows:
            live.insert("s", record)

    def put_all(episode) -> None:
        for record in episode:
            put(record)

    amend = Amend("e1", discard=True) if discard else Amend("e1", Outcome.SUCCESS, "operator", True, 1.0)
    with run.opened():
        put_all(episodes[0])
        put(episodes[1].begin)
        put(episodes[1].steps.slice(0, 7))
        run.sessions["s"].skip(run.store, 0, 0)  # as the intake does where records are lost for good
        live.close_session("s", gone=True)
        put(episodes[1].steps.slice(7, 12))  # late, and the end of it
        put(episodes[1].end)
        for part in [[amend], episodes[2]] if amend_at == "at once" else [episodes[2], [amend]]:
            put_all(part)
    with run.opened():
        for stored in run.store.replay():
            if stored.record is None:
                restarted.close_session(stored.session, gone=True)
            elif stored.delivered:
                restarted.insert(stored.session, stored.record)
    source = RunSource(run.path)
    expected = ["e0", "e2"] if discard else ["e0", "e1", "e2"]
    for keys in (live.episodes(), restarted.episodes(), [tuple(key.split("/")) for key in source.keys()]):
        assert keys == [("s", name) for name in expected]
    if not discard:
        for e in (read_held(live, "s", "e1"), read_held(restarted, "s", "e1"), source.read("s/e1")):
            assert (e.steps.n, e.end.terminated, e.end.truncated, e.end.outcome) == (7, False, True, Outcome.UNKNOWN)
            assert e.end.reward is None
            np.testing.assert_array_equal(e.steps.reward, episodes[1].steps.reward[:7])
    assert live.ready == restarted.ready


def test_a_dead_actor_s_episode_is_truncated_and_the_rest_of_it_is_not_delivered(run):
    first, second = coded(0, 12).episode(), coded(1, 9, "success").episode()
    second.steps.source[3:7] = Source.HUMAN
    restarted = [second.begin, first.steps.slice(5, 12), second.steps, second.end]  # with the late rest of the first
    empty = [Begin("empty"), End("empty", 0, None, False, True, Outcome.UNKNOWN)]
    with run.opened():
        for record in (first.begin, first.steps.slice(0, 5), *restarted, *empty):
            run.put("s", record)
    source = RunSource(run.path)
    assert source.keys() == ["s/e0", "s/e1"]
    dead = source.read("s/e0")
    assert (dead.steps.n, dead.end.terminated, dead.end.truncated, dead.end.final_observation) == (5, False, True, None)
    assert_equal(source.read("s/e1"), second)
    known = source.about("s/e1")
    assert (known.outcome, known.human_steps, known.length) == (Outcome.SUCCESS, 4, 9)


def test_a_hole_is_never_closed_up(run, tmp_path):
    episodes = [coded(k, 30, "success", session="ab"[k % 2]) for k in range(8)]
    with run.opened(segment_bytes=2000):
        run.feed(episodes)
    names = [p.name for p in sorted((run.path / JOURNAL).glob("*.journal"))]
    cut = 0
    for k, name in enumerate(names[:: max(1, len(names) // 8)]):
        damaged = Run(tmp_path / f"damaged{k}")
        shutil.copytree(run.path / JOURNAL, damaged.path / JOURNAL)
        file = damaged.path / JOURNAL / name
        data = bytearray(file.read_bytes())
        data[HEADER_BYTES + 300 : HEADER_BYTES + 700] = bytes(len(data[HEADER_BYTES + 300 : HEADER_BYTES + 700]))
        file.write_bytes(data)
        expected: dict[str, int] = {}
        with damaged.opened():
            for stored in damaged.store.replay():
                if stored.delivered and isinstance(stored.record, StepBlock):
                    expected[stored.record.episode_id] = expected.get(stored.record.episode_id, 0) + stored.record.n
        source = RunSource(damaged.path)
        keys = source.keys()
        found = {key.split("/")[1]: source.read(key) for key in keys}
        # What nothing follows is still open; what it lacks may come yet.
        still_open = {e.episode_id for e in episodes[-2:]}
        assert {k: e.steps.n for k, e in found.items()} == {k: n for k, n in expected.items() if k in found}
        assert set(expected) - set(found) <= still_open
        for e in episodes:
            if e.episode_id in found:
                _, steps, end = found[e.episode_id]
                cut += steps.n < 30
                assert steps.n == 30 or (end.terminated, end.truncated, end.final_observation) == (False, True, None)
                state = e.episode().steps.observation["state"]
                np.testing.assert_array_equal(steps.observation["state"], state[: steps.n])
    assert cut > 1


def test_steps_that_the_learner_refused_are_not_exported(run):
    """They were written down, and then did not fit: the episode ends before them."""
    episode = make(RNG(3), 1, session="a", every_frame=True)
    with run.opened():
        records = episode.records(RNG(0))
        for record in records[:-2]:
            run.put("a", record)
        session = run.sessions["a"]
        before = session.state
        run.put("a", records[-2])
        refused = records[-2].n
        session.state = session.state._replace(steps=before.steps, steps_offset=before.steps_offset + refused)
        session.skip(run.store, 0, 0)
        run.feed([make(RNG(3), 2, session="a")])
    source = RunSource(run.path)
    assert source.keys() == ["a/e1", "a/e2"]
    read = source.read("a/e1")
    assert read.steps.n == read.end.length == sum(r.n for r in records[1:-2])
    assert (read.end.truncated, read.end.final_observation) == (True, None)


def test_segments_that_are_dropped_while_it_reads_are_said(run):
    with run.opened(segment_bytes=1000):
        run.feed([coded(k, 30, "success") for k in range(4)])
    source = RunSource(run.path)
    keys = source.keys()
    whole = source.read(keys[0])
    images = whole.steps.sparse["images/a"].values
    for read in (
        lambda: source.read(keys[0]),
        lambda: np.asarray(images) if images._pieces[0].data is None else source.read(keys[0]),
    ):
        sorted((run.path / JOURNAL).iterdir())[0].unlink()
        with pytest.raises(DataError, match=naming("s/e0", "00000000000000000000.journal", "transport.journal_bytes")):
            read()
    again = source.keys()
    assert again == keys[1:]
    assert any("belong to no whole episode" in note for note in source.notes())
    with pytest.raises(DataError, match=naming(run.path, "s/e0")):
        source.read("s/e0")


def test_it_reads_beside_a_writer_and_its_torn_tail(run):
    episodes = [coded(k, 20, "success", session="ab"[k % 2]) for k in range(40)]
    by_key = {f"{e.session}/{e.episode_id}": e for e in episodes}
    done = threading.Event()

    def write() -> None:
        with run.opened(segment_bytes=3000):
            run.feed(episodes)
        done.set()

    (run.path / JOURNAL).mkdir(parents=True)
    source, seen = RunSource(run.path), []
    writer = threading.Thread(target=write)
    writer.start()
    while True:
        last = done.is_set()
        keys = source.keys()
        assert keys[: len(seen)] == seen
        for key in keys[len(seen) :]:
            assert_equal(source.read(key), by_key[key].episode())
        seen = keys
        if last:
            break
    writer.join()
    assert sorted(seen) == sorted(by_key)
    newest = sorted((run.path / JOURNAL).glob("*.journal"))[-1]
    newest.write_bytes(newest.read_bytes()[:-7])  # killed in the middle of an entry
    before = {p.name: p.read_bytes() for p in (run.path / JOURNAL).iterdir()}
    torn = RunSource(run.path)
    assert len(torn.keys()) == 39
    assert torn.notes() == ["1 episodes were not over yet: left out; export again for them"]
    list(map(torn.read, torn.keys()))
    assert {p.name: p.read_bytes() for p in (run.path / JOURNAL).iterdir()} == before  # nothing is written or cut


BIG = dataclasses.replace(SPEC, cameras=(CameraSpec("a", 40, 48), CameraSpec("b", 3, 2)))


def big_episode(number):
    """Frames of camera a too large for a message's header, those of b within it."""
    e = coded(number, 10, "success").episode()
    smooth = np.linspace(0, 200, 48, dtype=np.uint8)[None, None, :, None]
    smooth = smooth + RNG(number).integers(0, 50, (10, 1, 1, 3), np.uint8)
    images = np.broadcast_to(smooth, (10, 40, 48, 3)).copy()
    sparse = e.steps.sparse | {"images/a": e.steps.sparse["images/a"]._replace(values=images)}
    final = e.end.final_observation | {"images/a": images[0]}
    return e._replace(steps=dataclasses.replace(e.steps, sparse=sparse), end=e.end._replace(final_observation=final))


def big_run(path, **options) -> tuple[Run, list]:
    run, episodes = Run(path, BIG), [big_episode(k) for k in range(3)]
    with run.opened(segment_bytes=40_000):
        for e in episodes:
            run.put("s", e.begin)
            for t in range(0, 10, 3):
                run.put("s", e.steps.slice(t, min(t + 3, 10)), **options)
            run.put("s", e.end, **options)
    return run, episodes


def test_frames_stay_in_the_journal_until_they_are_looked_at_and_jpeg_files_as_they_are(tmp_path):
    run, episodes = big_run(tmp_path / "run")
    source = pickle.loads(pickle.dumps(RunSource(run.path)))
    for key, e in zip(source.keys(), episodes, strict=True):
        read = pickle.loads(pickle.dumps(source)).read(key)
        frames = read.steps.sparse["images/a"].values
        assert isinstance(frames, Frames)
        assert all(p.data is None for p in frames._pieces)
        np.testing.assert_array_equal(frames[7], e.steps.sparse["images/a"].values[7])
        assert_equal(read, e)
        check_episode("it", read, BIG)
    run, episodes = big_run(tmp_path / "jpeg", jpeg_quality=90)
    read = RunSource(run.path).read("s/e0")
    frames, original = read.steps.sparse["images/a"].values, episodes[0].steps.sparse["images/a"].values
    assert frames.encoded(2)[:3] == b"\xff\xd8\xff"  # a JPEG file
    assert np.abs(np.asarray(frames).astype(int) - original).mean() < 3
    np.testing.assert_array_equal(frames[4:6][1], frames[5])


def test_cameras_tasks_and_proportions(tmp_path):
    run, _ = big_run(tmp_path / "run")
    source = RunSource(run.path, ReadOptions(cameras=("b",), task="stack", proportion=0.67))
    assert len(source.keys()) == 2
    episode = source.read(source.keys()[0])
    assert [k for k in episode.steps.sparse if k.startswith("images/")] == ["images/b"]
    assert (sorted(episode.end.final_observation), episode.begin.task) == (["images/b", "state"], "stack")


def test_options_and_folders_that_do_not_fit_are_refused(tmp_path, run):
    big_run(tmp_path / "big")
    assert not is_run(tmp_path)
    (run.path / "run.lock").touch()
    assert FORMAT.matches(run.path)
    for path, options, named in (
        (tmp_path / "big", {"cameras": ("c",)}, ("coded", "c", "a, b")),
        (tmp_path / "big", {"hz": 20}, (50, 20, "--hz")),
        (tmp_path, {}, (tmp_path, "config.json")),
        (run.path, {}, (run.path, "journal/online", "transport.journal", "--local")),
    ):
        with pytest.raises(ConfigError, match=naming(*named)):
            RunSource(path, ReadOptions(**options))
    (run.path / JOURNAL).mkdir(parents=True)
    assert RunSource(run.path).keys() == []
    (run.path / "config.json").write_text(json.dumps({"format": folder.FORMAT}))
    with pytest.raises(ConfigError, match=naming("config.json", "KeyError('robot_spec')")):
        RunSource(run.path)


def test_a_frame_that_is_damaged_is_named_when_the_episode_is_read(tmp_path):
    run, _ = big_run(tmp_path / "run")
    source = RunSource(run.path)
    first = sorted((run.path / JOURNAL).iterdir())[0]
    source.keys()
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    with pytest.raises(DataError, match=naming("s/e0", "00000000000000000000.journal", "byte")):
        list(map(source.read, source.keys()))


def test_what_a_learner_loaded_stays_whole_when_its_run_drops_segments(tmp_path):
    """`--demo_path` of a run that goes on: images are read for the batches, long after the retention was there."""
    run, episodes = big_run(tmp_path / "run")
    cfg = config()
    loaded = load_demos([run.path], BIG, cameras=("a", "b"), more=(FORMAT,))
    replay, other = (Replay(BIG, cfg, preprocess(cfg, ("a", "b"), BIG), bc_on="+successes") for _ in range(2))
    replay.add_demo(*loaded.episodes)
    elsewhere = pickle.dumps(loaded.episodes[0].steps.sparse["images/a"].values)
    for path in (run.path / JOURNAL).iterdir():
        path.unlink()
    other.add_demo(*(end_at_first_success(e)[0] for e in episodes))
    one, two = (r.sample(RNG(4), 50) for r in (replay, other))
    for a, b in ((one.observations, two.observations), (one.next_observations, two.next_observations)):
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])
    np.testing.assert_array_equal(one.rewards, two.rewards)
    with pytest.raises(DataError, match=naming("s/e0", "00000000000000000000.journal", "transport.journal_bytes")):
        pickle.loads(elsewhere)[0]  # another process has the name alone
