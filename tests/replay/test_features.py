"""Features of whole observations: those of every row are what computing them again gives, whatever came and left."""

import functools
import itertools
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from coded_episodes import SPEC, Checker, Coded, config, feed, make, normaliser
from coded_replay import RNG, build, coded, reading
from deferred_episodes import lazy
from errors import naming

from serl_chunk.agents.spec import FeatureSpec
from serl_chunk.data.prompts import ByteTokenizer, Prompts
from serl_chunk.learner.offline_data import PIECE, precompute_features
from serl_chunk.replay import replay as replay_module
from serl_chunk.replay.features import FeatureTable, Group
from serl_chunk.replay.memory import estimate_bytes
from serl_chunk.replay.replay import BatchLoader, Request
from serl_chunk.types import Amend, ConfigError, End, Outcome

pytestmark = pytest.mark.compiles
KEYS, PROMPT_LENGTH = ("a", "b"), 8
PROMPTS, NORMALISER = Prompts(ByteTokenizer(), PROMPT_LENGTH), normaliser(6)
SHOWN = {"state", "mixed", "more"}


class CodedEmbedder:
    """Of each camera float16[N, 1, 2, 3]: the first and the last pixel, in which episode, tick and camera are coded.

    Counts how often each frame is looked at.
    """

    def __init__(self):
        self.features = {f"features/{c.name}": FeatureSpec((1, 2, 3), (f"images/{c.name}",)) for c in SPEC.cameras}
        self.looked: dict[bytes, int] = {}
        self.sizes: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, inputs):
        assert len(inputs) == 1  # a frame's features are computed without the other camera's
        return {f"features/{key.removeprefix('images/')}": self._of_frames(images) for key, images in inputs.items()}

    def _of_frames(self, images):
        assert images.dtype == np.uint8
        found = np.stack([images[:, 0, 0], images[:, -1, -1]], 1)[:, None]
        with self._lock:
            self.sizes.append(len(images))
            for one in found:
                self.looked[one.tobytes()] = self.looked.get(one.tobytes(), 0) + 1
        return found.astype(np.float16)


class MixingEmbedder:
    """float16[N, 2] and float16[N, 1]: hashes over all cameras, the prompt and, with `state`, the state."""

    def __init__(self, *, state):
        cameras = tuple(f"images/{c.name}" for c in SPEC.cameras)
        self.reads = ("state",) * state + (*cameras, "prompt", "prompt_mask")
        self.features = {"mixed": FeatureSpec((2,), self.reads), "more": FeatureSpec((1,), self.reads[::-1])}
        self.meanwhile = lambda: None  # called in the middle of a computation

    def __call__(self, inputs):
        assert set(inputs) == set(self.reads)
        (n,) = {len(v) for v in inputs.values()}
        self.meanwhile()
        return self.values_of([self.hash_of({key: v[i] for key, v in inputs.items()}) for i in range(n)])

    def hash_of(self, observation):
        """A number that every number of an observation changes."""
        return zlib.crc32(b"".join(np.ascontiguousarray(observation[key]).tobytes() for key in self.reads))

    @staticmethod
    def values_of(hashes):
        """Features of observations with these hashes; 33 bits of them, exactly."""
        digits = np.array([[h % 2048, h // 2048 % 2048, h // 2048**2] for h in hashes]).reshape(-1, 3)
        return {"mixed": digits[:, :2].astype(np.float16), "more": digits[:, 2:].astype(np.float16)}


def replay_of(cfg, *, state):
    embed = MixingEmbedder(state=state)
    return build(cfg, image_keys=KEYS, embed=embed), embed


def text_of(number: int) -> str:
    return f"task {number % 3}"


def records(episode: Coded, rng) -> list:
    begin, *rest = episode.records(rng)
    return [begin._replace(task=text_of(episode.number)), *rest]


def demonstration(number: int, **kw):
    whole = (coded(number, demonstration=True, **kw) if kw else make(RNG(number), number, demonstration=True)).episode()
    return whole._replace(begin=whole.begin._replace(task=text_of(number)))


class Oracle:
    """Computes features of coded episodes from what their numbers say, without a replay."""

    def __init__(self, embed: MixingEmbedder) -> None:
        self.embed, self.episodes = embed, dict[int, Coded]()
        self._features = functools.cache(self._computed)

    def add(self, *episodes: Coded) -> None:
        self.episodes |= {e.number: e for e in episodes}

    def features(self, number: int, tick: int) -> list[float]:
        return self._features(number, tick)

    def frames(self, number: int, tick: int) -> list[int]:
        """Tick of each camera's newest frame at `tick`, -1 before the first."""
        return [max((t for t in reads if t <= tick), default=-1) for reads in self.episodes[number].reads]

    def _computed(self, number: int, tick: int) -> list[float]:
        episode, (tokens, mask) = self.episodes[number], PROMPTS(text_of(number))
        shown = {"state": NORMALISER.observe(episode.observation(tick)["state"]), "prompt": tokens, "prompt_mask": mask}
        for key, at in zip(("images/a", "images/b"), self.frames(number, tick), strict=True):
            shown[key] = episode.observation(at)[key]
        values = self.embed.values_of([self.embed.hash_of(shown)])
        return [*values["mixed"][0].tolist(), *values["more"][0].tolist()]

    def check_batch(self, replay, seed: int, n: int = 60) -> None:
        batch = replay.sample(RNG(seed), n)
        plain = replay.sample(RNG(seed), n, frames=True).observations  # of the same windows
        assert set(plain) == {"state", "images/a", "images/b", "prompt", "prompt_mask"}
        again = self.embed.values_of([self.embed.hash_of({k: v[i] for k, v in plain.items()}) for i in range(n)])
        for name, values in again.items():
            np.testing.assert_array_equal(values, batch.observations[name])
        assert set(replay.sample(RNG(seed), 4, frames=False).observations) == SHOWN
        for observation in (batch.observations, batch.next_observations):
            assert set(observation) == SHOWN
            state = np.rint(observation["state"] * NORMALISER.state_std + NORMALISER.state_mean).astype(int)
            expected = [self.features(number, tick) for number, tick in state[:, :2].tolist()]
            np.testing.assert_array_equal(np.concatenate([observation["mixed"], observation["more"]], 1), expected)

    def check_rows(self, replay, max_age: int) -> int:
        """Compare all features that are kept; returns of how many rows. Also where each row's are, and the quotas."""
        held = replay._partitions
        (table,) = held.storage.features.row_tables
        compared, used = 0, []
        for partition in held.all:
            total = np.zeros_like(partition.frames)
            for (_, name), stored in partition.episodes.items():
                number, places = int(name[1:]), table.place[stored.rows]
                total += stored.frame_counts
                assert set(places[places >= 0].tolist()) == set(np.concatenate([[], *stored.places[0]]).tolist())
                used += [*stored.places[0]]
                for tick, place in enumerate(places.tolist()):
                    final = tick == stored.length
                    known = final and stored.end.final_observation is not None
                    at = tick - 1 if final and not known else tick
                    frames = self.frames(number, at)
                    recent = min(frames) >= 0 and (final or tick - min(frames) <= max_age)
                    assert (place >= 0) == recent
                    if place >= 0:
                        values, there = table.read(np.array([place]))
                        if there[0]:
                            found = [*values["mixed"][0].tolist(), *values["more"][0].tolist()]
                            assert found == self.features(number, at), (name, tick)
                            compared += 1
            np.testing.assert_array_equal(partition.frames, total)
            assert (partition.frames <= partition.max_frames).all()
        places = np.concatenate([[], *used])
        assert len(set(places.tolist())) == len(places) == table._slots.used
        assert table.known + table.missing == len(places)
        return compared


class Run:
    """Actors of two sessions, their operator, a data set and the learner's thread, in an order that a seed draws."""

    def __init__(self, cfg, *, state: bool, seed: int) -> None:
        self.rng, self.cfg = RNG(seed), cfg
        self.replay, self.embed = replay_of(cfg, state=state)
        self.oracle = Oracle(self.embed)
        self.journal: list = []
        self.queues: dict[str, list] = {"s0": [], "s1": []}
        self.closed: list[tuple[str, str]] = []
        self.number = self.compared = 0
        self.fixed = [demonstration(9_000 + k) for k in range(3)]
        self.oracle.add(*(make(RNG(9_000 + k), 9_000 + k, demonstration=True) for k in range(3)))
        self.replay.add_demo(self.fixed[0], *map(lazy, self.fixed[1:]))

    def record(self, times: int = 1) -> None:
        for _ in range(times):
            session = str(self.rng.choice(sorted(self.queues)))
            if not self.queues[session]:
                self.number += 1
                episode = make(self.rng, self.number)
                self.oracle.add(episode)
                self.queues[session] = records(episode, self.rng)
            record = self.queues[session].pop(0)
            self._insert(session, record)
            if isinstance(record, End):
                self.closed.append((session, record.episode_id))

    def _insert(self, session, record) -> None:
        self.journal.append((session, record))
        self.replay.insert(session, record)

    def silence(self) -> None:
        """An actor is silent: its episode is closed, until it comes back."""
        self.replay.close_session(str(self.rng.choice(sorted(self.queues))))

    def loss(self) -> None:
        """An actor does not come back; another one begins."""
        session = str(self.rng.choice(sorted(self.queues)))
        self.replay.close_session(session, gone=True)
        del self.queues[session]
        self.queues[f"s{self.number + 10}"] = []

    def amendment(self) -> None:
        if self.closed:
            session, episode = self.closed[-1 - int(self.rng.integers(min(6, len(self.closed))))]
            terminated = bool(self.rng.integers(2))
            amends = (
                Amend(episode, Outcome.SUCCESS, "operator", True, 16.0),
                Amend(episode, Outcome.FAILURE, "operator", terminated),
                Amend(episode, Outcome.UNKNOWN, "operator", False),
                Amend(episode, discard=True),
            )
            self._insert(session, amends[int(self.rng.integers(len(amends)))])

    def shard(self) -> None:
        numbers = 10_000 + int(self.rng.integers(1_000)) * 2 + np.arange(2)
        self.oracle.add(*(make(RNG(k), k, demonstration=True) for k in numbers.tolist()))
        self.replay.replace_demos([demonstration(k) for k in numbers.tolist()])

    def computation(self) -> None:
        if self.rng.random() < 0.3:  # records that come while features are computed

            def meanwhile():
                self.embed.meanwhile = lambda: None
                self.record(40)

            self.embed.meanwhile = meanwhile
        self.replay.compute_features(int(self.rng.integers(1, 60)))

    def sample(self) -> None:
        if self.replay.ready.windows:
            self.oracle.check_batch(self.replay, int(self.rng.integers(1 << 30)), 20)

    def check(self) -> None:
        self.compared += self.oracle.check_rows(self.replay, self.cfg.replay.max_image_age)

    def go(self, steps: int) -> None:
        actions = (
            (self.record, 70), (self.silence, 6), (self.loss, 1), (self.amendment, 4), (self.shard, 1),
            (self.computation, 12), (self.sample, 6),
        )  # fmt: skip
        shares = np.array([share for _, share in actions], float)
        for step in range(steps):
            action, _ = actions[int(self.rng.choice(len(actions), p=shares / shares.sum()))]
            action()
            if step % 40 == 0:
                self.check()


@pytest.mark.parametrize(("state", "max_age"), [(False, 0), (True, 3)])
def test_every_kept_feature_is_what_computing_it_again_gives(state, max_age):
    cfg = reading(
        PROMPT_LENGTH, "own", capacity=300, human_capacity=130, image_capacity=125, demo_capacity=600,
        max_image_age=max_age,
    )  # fmt: skip
    run = Run(cfg, state=state, seed=max_age + state)
    run.go(1_200)
    stats = run.replay.stats()
    assert run.compared > 1_000
    assert stats["replay/evicted_episodes"] > 10
    assert stats["replay/kept_for_interventions"] > 0
    assert stats["replay/discarded_episodes"] > 0
    assert stats["replay/features_computed"] > 2 * stats["replay/features_held"] > 100
    while run.replay.compute_features(50):
        pass
    assert run.oracle.check_rows(run.replay, max_age) >= run.replay.stats()["replay/features_held"] > 100
    run.oracle.check_batch(run.replay, 0, 400)

    resumed, embed = replay_of(cfg, state=state)  # with nothing but the demonstrations and the journal
    oracle = Oracle(embed)
    oracle.add(*run.oracle.episodes.values())
    resumed.add_demo(*run.fixed)
    for session, record in run.journal:
        resumed.insert(session, record)
    assert resumed.stats()["replay/features_held"] == 0
    while resumed.compute_features(50):
        pass
    oracle.check_batch(resumed, 1, 400)
    assert oracle.check_rows(resumed, max_age) >= resumed.stats()["replay/features_held"] > 50


def test_a_feature_of_what_observations_do_not_have_is_refused():
    with pytest.raises(ConfigError, match=naming("mixed", "more", "prompt", "state", "images/a", "agent.language")):
        build(config(), image_keys=KEYS, embed=MixingEmbedder(state=False))


def replay_of_frames(cfg, **kw):
    embed = CodedEmbedder()
    return build(cfg, image_keys=KEYS, embed=embed, **kw), embed


def with_pixels(batch):
    """A batch whose features are images again, as a Checker of coded episodes reads them."""

    def images(observation):
        out = {"state": observation["state"]}
        for camera in SPEC.cameras:
            coded = observation.get(f"features/{camera.name}")
            assert f"images/{camera.name}" not in observation
            if coded is not None:
                assert (coded.dtype, coded.shape[1:]) == (np.float16, (1, 2, 3))
                shown = np.zeros((len(coded), camera.height, camera.width, 3), np.uint8)
                shown[:, 0, 0], shown[:, -1, -1] = coded[:, 0, 0], coded[:, 0, 1]
                out[f"images/{camera.name}"] = shown
        return out

    return batch._replace(observations=images(batch.observations), next_observations=images(batch.next_observations))


def check(replay, checker, seed=0, n=1_500):
    return checker.check(with_pixels(replay.sample(RNG(seed), n)))


def test_batches_are_right_while_records_come_in_from_elsewhere():
    cfg = config(capacity=300, human_capacity=100, image_capacity=200, demo_fraction="uniform", max_image_age=2)
    episodes = [make(RNG(k), k) for k in range(150)]
    replay, embed = replay_of_frames(cfg)
    feed(replay, episodes[:5], RNG(0))
    loader, checker, count = BatchLoader(replay, RNG(0), prefetch=2), Checker(episodes, cfg), 0

    def write():
        for e in episodes[5:]:
            feed(replay, [e], RNG(1))
            replay.compute_features(3)

    def flat(value):
        if isinstance(value, dict):
            return {k: flat(v) for k, v in value.items()}
        return None if value is None else value.reshape(-1, *value.shape[2:])

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write)
        while not written.done() or count < 5:
            batch = loader.next(Request("critic", 2, 64))["critic"]
            checker.check(with_pixels(type(batch)(*map(flat, batch))), writing=True)
            count += 1
        written.result()
    loader.close()
    stats = replay.stats()
    assert stats["replay/evicted_episodes"] > 25
    assert stats["replay/kept_for_interventions"] > 10
    looked = list(embed.looked.values())  # both threads compute without the lock, now and then the same frame
    assert max(looked) <= 2
    assert looked.count(2) < 0.1 * len(looked)
    assert stats["replay/features_held"] <= stats["replay/online_frames"] + stats["replay/human_frames"]
    assert stats["replay/features_computed"] > 2 * stats["replay/features_held"]


def test_features_count_in_the_estimate_and_are_refused_where_they_do_not_fit(monkeypatch):
    cfg = config()
    need = estimate_bytes(SPEC, cfg.replay, SPEC.cameras, CodedEmbedder().features)
    replay, _ = replay_of_frames(cfg)
    assert replay.stats()["replay/reserved_bytes"] == pytest.approx(need, rel=0.01)
    assert replay.estimated_bytes == need
    monkeypatch.setattr(replay_module, "available_bytes", lambda: need - 1)
    features = (3 * cfg.replay.image_capacity + cfg.replay.demo_capacity) * 2 * (12 + 9)
    cached = ("agent.encoder.cache_features", "False", f"{features / 2**20:.0f} MiB")
    with pytest.raises(ConfigError, match=naming("replay.image_capacity", "replay.demo_capacity", *cached)):
        replay_of_frames(cfg)


def test_places_grow_where_more_frames_come_than_were_expected():
    features = FeatureTable(Group(("images/a",), {"five": (1, 2, 3)}), np.empty(0, np.int64), [0], 2)

    def compute(value):
        return features.computation(slots, lambda inputs: {"five": inputs["images/a"] + np.float16(value)}, frames, ())

    slots, frames = np.array([0, 1]), {"images/a": np.zeros((2, 1, 2, 3), np.float16)}
    features.placed(slots)
    early = compute(7)
    assert (compute(5)()["five"] == 5).all()
    features.placed(np.array([4, 2]))
    assert (features.known, features.missing, features.first_missing(9).tolist()) == (2, 2, [2, 4])
    values, known = features.read(np.array([1, 4]))
    assert known.tolist() == [True, False]
    assert (values["five"][0] == 5).all()
    features.released(np.array([0]))
    early()  # of 0 there is no frame any more
    assert (features.known, features.held_bytes) == (1, 12)


def test_what_is_there_at_first_is_computed_in_pieces():
    replay, embed = replay_of_frames(config())
    replay.add_demo(*(coded(k, 39, "limit", demonstration=True).episode() for k in range(4)))
    total = replay.features_missing
    assert total == 4 * 40 * 2
    for rounds, _ in enumerate(itertools.takewhile(bool, precompute_features(replay))):
        if rounds == 1:  # what comes in meanwhile is not waited for
            feed(replay, [coded(9, 39)], RNG(0))
    assert total <= sum(embed.sizes) < total + PIECE
    assert replay.features_missing == total + 80 - sum(embed.sizes)
    bare = build(config(), image_keys=KEYS)
    feed(bare, [coded(9, 39)], RNG(0))
    for nothing in (replay_of_frames(config())[0], bare):
        assert not list(precompute_features(nothing))
    assert (bare.features_missing, bare.compute_features(10)) == (0, 0)
