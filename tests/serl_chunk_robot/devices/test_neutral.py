"""Neutral first, on a clock of the test's own."""

from __future__ import annotations

import numpy as np
import pytest

from serl_chunk_robot.devices.base import Sample
from serl_chunk_robot.devices.neutral import NeutralFirst

TICK = 0.02  # s


class Hand:
    """One device that is looked at every tick."""

    def __init__(self) -> None:
        self.first, self.now = NeutralFirst(), 100.0

    def look(self, seconds: float = TICK, follower=None, stamp=None, **fields) -> list[bool]:
        """Hold the device in one place for a time; returns whether it counted, tick by tick."""
        out = []
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            at = self.now if stamp is None else stamp
            sample = Sample(
                **{"twist": np.zeros(6), "joints": None, "buttons": (False,), "stamp": at, "alive": True, **fields}
            )
            out.append(self.first.admit(sample, self.now, follower))
        return out


def twist(value, axis=0):
    out = np.zeros(6)
    out[axis] = value
    return out


def admitted() -> Hand:
    hand = Hand()
    assert hand.look(0.3) == [False] * 15  # from the first look on, 0.28 s
    assert hand.look(0.04)[-1]
    return hand


def test_a_device_counts_after_a_moment_at_rest_and_never_while_it_is_held_deflected():
    hand = Hand()
    assert not any(hand.look(10.0, twist=twist(0.5)))
    assert not any(hand.look(0.2))
    assert not any(hand.look(twist=twist(-0.02, axis=5)))  # once more: the moment begins anew
    assert not any(hand.look(0.28))
    assert hand.look(0.06)[-1]


@pytest.mark.parametrize(
    ("fields", "rests"),
    [({"twist": twist(0.019)}, True), ({"twist": twist(0.02)}, False), ({"twist": twist(float("nan"))}, False),
     ({"buttons": (False, True)}, False), ({"twist": None, "buttons": (False,)}, True), ({"alive": False}, False)],
)  # fmt: skip
def test_what_neutral_is(fields, rests):
    assert any(Hand().look(1.0, **fields)) == rests


def test_once_it_counts_it_goes_on_counting_until_it_is_restarted_or_lost():
    hand = admitted()
    for ends in (hand.first.restart, lambda: hand.look(alive=False)):
        assert all(hand.look(1.0, twist=twist(1.0), buttons=(True,)))
        assert not any(ends() or ())
        assert not any(hand.look(1.0, twist=twist(1.0)))
        assert hand.look(0.4)[-1]


def test_a_reading_that_gets_old_and_looks_that_are_far_apart_are_silence():
    hand = admitted()
    counted = hand.look(0.4, stamp=hand.now, twist=twist(1.0))
    assert counted[:9] == [True] * 9
    assert not any(counted[11:])
    assert not any(hand.look(1.0, twist=twist(1.0)))
    hand = admitted()
    hand.now += 0.3
    assert not any(hand.look(twist=twist(1.0)))
    hand = Hand()
    hand.look()
    hand.now += 0.3  # a moment at rest is not what was not seen
    assert not any(hand.look(0.28))


def leads(*joints):
    return {"twist": None, "joints": np.array(joints), "buttons": ()}


def test_a_leader_counts_where_its_follower_is():
    hand, follower = Hand(), np.array([1.0, -1.0, 0.5])
    assert not any(hand.look(1.0, follower, **leads(1.0, -1.06, 0.5)))
    assert not any(hand.look(1.0, follower, **leads(1.0, float("nan"), 0.5)))
    assert hand.look(0.4, follower, **leads(1.04, -1.04, 0.5))[-1]
    assert hand.look(0.4, follower, **leads(2.0, -1.0, 0.5))[-1]
    assert Hand().look(0.4, np.array([1.0, np.nan]), **leads(1.0, 0.7))[-1], "what is not known is not compared"
    for other in (None, np.zeros(2), np.zeros((3, 1))):
        with pytest.raises(ValueError, match="follower: shape"):
            Hand().look(follower=other, **leads(0.0, 0.0, 0.0))
