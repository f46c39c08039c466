"""The spool keeps what is not acknowledged, and the open episode beyond that while there is room."""

from __future__ import annotations

from serl_chunk.transport.storage.spool import MemorySpool


def spool_with(*kinds_and_spans, capacity=1000):
    spool = MemorySpool(capacity)
    for kind, span in kinds_and_spans:
        spool.append(kind, span, [b""], 10)
    return spool


EPISODE = (("begin", 1), ("steps", 3), ("steps", 2), ("end", 1))


def test_acknowledged_records_of_closed_episodes_go():
    spool = spool_with(*EPISODE)
    assert (spool.first, spool.acked, spool.next, spool.steps) == (0, 0, 7, 5)
    assert spool.acknowledge(7) == 7
    assert (spool.first, spool.nbytes, spool.unacked_bytes, spool.steps_before_first) == (7, 0, 0, 5)


def test_the_open_episode_stays_until_its_end_is_acknowledged():
    spool = spool_with(*EPISODE, *EPISODE)
    spool.acknowledge(11)  # inside the second episode, after its first steps
    assert (spool.first, spool.acked, spool.unacked_bytes, spool.nbytes) == (7, 11, 20, 40)
    spool.rewind()
    assert (spool.acked, spool.unacked_bytes) == (7, 40)
    assert spool.acknowledge(14) == 7
    assert spool.nbytes == 0


def test_an_acknowledgement_inside_a_block_leaves_it_whole():
    spool = spool_with(*EPISODE)
    assert spool.acknowledge(3) == 1
    assert spool.acked == 1
    assert spool.at(2) == spool.at(1)
    assert spool.at(7) is None


def test_acknowledged_steps_give_way_when_it_is_full_and_others_do_not():
    spool = spool_with(("begin", 1), ("steps", 3), ("steps", 2), capacity=30)
    spool.acknowledge(4)
    spool.append("steps", 1, [b""], 10)
    assert spool.first == 1
    spool.append("steps", 1, [b""], 10)
    spool.append("steps", 1, [b""], 10)
    assert (spool.first, spool.acked, spool.nbytes) == (4, 4, 40)
