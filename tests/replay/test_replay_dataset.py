"""Episodes of a data set that take turns in the demonstration store: shard, episode and tick are in every array."""

import itertools
import threading

import pytest
from coded_episodes import config, make
from coded_replay import RNG, build, coded
from deferred_episodes import lazy
from errors import naming

from serl_chunk.learner.offline_data import InitialData, OfflineData
from serl_chunk.replay.replay import BatchLoader, Request
from serl_chunk.types import ConfigError, DataError, Episode, Outcome

EPISODES, SHARDS = 8, 6


def shard(number: int) -> list:
    """Its episodes are numbered from `16 * number` on."""
    rng = RNG(number)
    return [make(rng, 16 * number + k, demonstration=True) for k in range(EPISODES)]


def test_a_failure_in_a_later_shard_counts_from_then_on():
    def part(number: int, outcome: Outcome) -> list[Episode]:
        episodes = episodes_of(shard(number))
        return [e._replace(end=e.end._replace(outcome=outcome)) for e in episodes]

    parts = iter([part(0, Outcome.SUCCESS), part(1, Outcome.FAILURE), part(2, Outcome.SUCCESS)])

    class Shards:
        take = staticmethod(lambda: next(parts))
        advance = staticmethod(lambda: True)
        close = staticmethod(lambda: None)

    replay = build(config(demo_fraction=1.0), image_keys=("a", "b"))
    data = OfflineData(replay, InitialData([], Shards()), seek=None, seen=lambda episodes: None)
    found = [data.has_failures]
    for _ in range(2):
        data.advance(1)
        found.append(data.has_failures)
    assert found == [False, True, True]


def test_no_batch_mixes_two_shards_and_the_pool_does_not_grow():
    most = max(sum(e.length + 1 for e in shard(k)) for k in range(SHARDS))
    replay = build(config(demo_fraction=1.0, demo_capacity=most))
    shards = [episodes_of(shard(k)) for k in range(SHARDS)]
    replay.replace_demos(shards[0])
    loader = BatchLoader(replay, RNG(0), prefetch=2)
    done, seen = threading.Event(), []

    def turn():
        for k in itertools.takewhile(lambda _: not done.is_set(), itertools.count()):
            replay.replace_demos(shards[k % SHARDS])

    writer = threading.Thread(target=turn)
    writer.start()
    while len(seen) < 40 or (len(set(seen)) == 1 and len(seen) < 2_000):
        number = loader.next(Request("critic", 4, 64))["critic"].observations["state"][..., 0].astype(int) * 2 + 8
        (one,) = set((number // 16).ravel().tolist())
        seen.append(one)
        assert replay.stats()["replay/demo_rows"] <= most
    done.set()
    writer.join()
    loader.close()
    assert len(set(seen)) > 1
    assert replay._partitions.storage.row_slots.used == replay.stats()["replay/demo_rows"]


def test_what_does_not_fit_leaves_the_old_ones_in_place():
    replay = build(config(demo_capacity=60))
    replay.replace_demos([coded(0, 30, demonstration=True).episode()])
    replay.replace_demos([coded(1, 40, demonstration=True).episode()])  # not both: the old one leaves first
    before = replay.episodes()
    with pytest.raises(ConfigError, match=naming(82, "replay.demo_capacity", 60)):
        replay.replace_demos([coded(k, 40, demonstration=True).episode() for k in (2, 3)])
    twice = coded(4, 5, demonstration=True).episode()
    with pytest.raises(DataError, match=naming("e4")):
        replay.replace_demos([twice, twice])
    assert replay.episodes() == before
    assert replay.ready.demo == 37


def test_balance_is_checked_at_the_first_shard_and_a_later_one_may_lack_a_kind():
    good, bad = (coded(k, 12, end, demonstration=True).episode() for k, end in ((1, "success"), (2, "failure")))
    cfg = config(demo_fraction=1.0, positive_fraction=0.5)
    for demos, named in (([bad], "1 failure"), ([], "none")):
        with pytest.raises(DataError, match=naming("replay.positive_fraction", 0.5, named)):
            build(cfg).replace_demos(demos)
    replay = build(cfg)
    replay.replace_demos([good, bad])
    for alone in (good, bad):
        replay.replace_demos([alone])
        assert set(replay.sample(RNG(0), 50).observations["state"][:, 0] * 2 + 8) == {1.0 if alone is good else 2.0}
    replay.replace_demos([good, bad])
    share = (replay.sample(RNG(0), 2_000).observations["state"][:, 0] * 2 + 8 == 1).mean()
    assert share == pytest.approx(0.5, abs=0.05)


def test_images_that_are_still_in_files_are_refused_where_they_are_used():
    files = lazy(coded(0, 10, demonstration=True).episode())
    seeing, blind = build(config(), image_keys=("a",)), build(config())
    with pytest.raises(DataError, match=naming("e0", "agent.image_keys", "demo_path")):
        seeing.replace_demos([files])
    assert seeing.episodes() == []
    blind.replace_demos([files])
    assert len(blind.episodes()) == 1


def episodes_of(coded_ones) -> list[Episode]:
    return [e.episode() for e in coded_ones]
