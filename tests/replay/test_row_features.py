"""Features of whole observations: those of every row are what computing them again gives, whatever came and left."""

import functools

import numpy as np
import pytest
from coded_episodes import Coded, config, make, normaliser
from coded_features import MixingEmbedder
from coded_replay import RNG, build, coded, reading
from deferred_episodes import lazy
from errors import naming

from serl_chunk.data.prompts import ByteTokenizer, Prompts
from serl_chunk.types import Amend, ConfigError, End, Outcome

pytestmark = pytest.mark.compiles
KEYS, PROMPT_LENGTH = ("a", "b"), 8
PROMPTS, NORMALISER = Prompts(ByteTokenizer(), PROMPT_LENGTH), normaliser(6)
SHOWN = {"state", "mixed", "more"}


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
                Amend(episode, Outcome.UNKNOWN, "operator", False), Amend(episode, discard=True),
            )  # fmt: skip
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


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("max_age", [0, 3])
def test_every_kept_feature_is_what_computing_it_again_gives(state, max_age):
    cfg = reading(
        PROMPT_LENGTH,
        "own",
        capacity=300,
        human_capacity=130,
        image_capacity=125,
        demo_capacity=600,
        max_image_age=max_age,
    )
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


@pytest.mark.parametrize("state", [False, True])
def test_an_observation_is_computed_once_and_shared_where_nothing_changes(state):
    """Those that no batch shows are not: without an age, where both cameras gave a frame on the tick itself."""
    reads = [set(range(0, 31, 5)), set(range(0, 31, 3))]
    episode = Coded(1, 30, "limit", np.zeros(30, np.uint8), reads)
    for age, different in ((50, 31 if state else len(reads[0] | reads[1])), (0, len(reads[0] & reads[1]))):
        replay, embed = replay_of(reading(PROMPT_LENGTH, "own", max_image_age=age), state=state)
        for record in records(episode, RNG(0)):
            replay.insert("s", record)
        assert replay.features_missing == different
        while replay.compute_features(4):
            pass
        oracle = Oracle(embed)
        oracle.add(episode)
        if age:
            oracle.check_batch(replay, 0, 300)
        assert oracle.check_rows(replay, age) == (31 if age else different)
        assert (len(embed.looked), set(embed.looked.values())) == (different, {1})
        stats = replay.stats()
        assert stats["replay/features_held"] == stats["replay/features_computed"] == different
        assert stats["replay/feature_bytes"] == different * 6


def test_a_feature_of_what_observations_do_not_have_is_refused():
    with pytest.raises(ConfigError, match=naming("mixed", "more", "prompt", "state", "images/a", "agent.language")):
        build(config(), image_keys=KEYS, embed=MixingEmbedder(state=False))
