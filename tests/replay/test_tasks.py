"""The texts of tasks in batches: of the window's own episode, whatever left, was corrected, moved or came back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from coded_replay import RNG, build, coded, reading
from errors import naming

from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.agents.pi0 import PI0_PRESETS
from serl_chunk.data.prompts import ByteTokenizer, Prompts
from serl_chunk.learner.service import RecordRouter
from serl_chunk.types import PROMPT, PROMPT_MASK, Begin, DataError, Source

OWN, LENGTH = "own task", 16
PROMPTS = Prompts(ByteTokenizer(), LENGTH)


def text_of(number: int) -> str:
    """Every sixth episode has no text of its own."""
    return "" if number % 6 == 0 else f"task {number % 5}"


def records(episode, rng):
    begin, *rest = episode.records(rng)
    return [begin._replace(task=text_of(episode.number)), *rest]


def episode_of(number, **kw):
    whole = coded(number, demonstration=True, **kw).episode()
    return whole._replace(begin=whole.begin._replace(task=text_of(number)))


def check(replay, n=500):
    """Both observations of every window have the text of the episode that their state names; returns the episodes."""
    batch = replay.sample(RNG(0), n)
    mean, std = np.array([8, -4, 2]), np.array([2, 0.5, 4])
    for observation in (batch.observations, batch.next_observations):
        tokens, mask = observation[PROMPT], observation[PROMPT_MASK]
        assert (tokens.shape, tokens.dtype) == ((n, LENGTH), np.int32)
        assert (mask.shape, mask.dtype) == ((n, LENGTH), np.bool_)
        numbers = np.rint((observation["state"] * std + mean)[:, 0]).astype(int).tolist()
        for number, row, given in zip(numbers, tokens, mask, strict=True):
            expected = PROMPTS(text_of(number) or OWN)
            np.testing.assert_array_equal(row, expected[0])
            np.testing.assert_array_equal(given, expected[1])
    return set(numbers)


def test_texts_are_mixed_and_stay_with_their_episodes_while_others_leave():
    rng = RNG(1)
    replay = build(reading(LENGTH, OWN, capacity=150, human_capacity=60))
    replay.add_demo(*(episode_of(1000 + i) for i in range(4)))
    for i in range(60):  # several times round the ring, with interventions that are kept
        episode = coded(i, end=("success", "limit", "died")[i % 3])
        if i % 4 == 0:
            episode.source[3:6] = Source.HUMAN
        for record in records(episode, rng):
            replay.insert("s", record)
        check(replay, 60)
    seen = check(replay)
    assert {1000, 1001, 1002, 1003} < seen
    assert replay.stats()["replay/kept_for_interventions"] > 0
    assert replay.stats()["replay/evicted_episodes"] > 0
    assert replay.stats()["replay/tasks"] == 6


def test_a_journal_puts_texts_back_whatever_was_numbered_first():
    rng = RNG(3)
    journal = [("s", record) for i in range(8) for record in records(coded(i), rng)]
    router = RecordRouter(build(reading(LENGTH, OWN)))
    router._replay.add_demo(*(episode_of(1000 + i) for i in (4, 3, 2)))
    router.resume(0, 0)
    router.refill((n, session, record) for n, (session, record) in enumerate(journal))
    assert check(router._replay) == {*range(8), 1002, 1003, 1004}


def test_shards_bring_their_texts():
    replay = build(reading(LENGTH, OWN, windows="qc", terminal_windows="drop"))
    for start in (0, 10, 20):
        replay.replace_demos([episode_of(start + i) for i in range(5)])
        assert check(replay) == {*range(start, start + 5)}


def test_a_text_that_is_too_long_is_refused_and_nothing_is_kept():
    replay = build(reading(LENGTH, OWN))
    text = "a text of more than sixteen bytes"
    with pytest.raises(DataError, match=naming("e9", text, 34, LENGTH)):
        replay.insert("s", Begin("e9", task=text))
    whole = episode_of(3)
    with pytest.raises(DataError, match=naming("e3", text, 34, LENGTH)):
        replay.add_demo(whole._replace(begin=whole.begin._replace(task=text)))
    assert replay.episodes() == []
    replay.insert("s", Begin("e10", task="short"))


@pytest.mark.parametrize("pi05", [False, True])
def test_prompts_of_pi0_have_one_length_in_a_call_of_the_sampler(pi05):
    pi0 = dataclasses.replace(PI0_PRESETS["tiny"], pi05=pi05)
    agent = BcConfig(policy="pi0", pi0=pi0, language=LanguageConfig("bytes", 100))
    replay = build(dataclasses.replace(reading(LENGTH, OWN), agent=agent))
    replay.add_demo(*(episode_of(1000 + i) for i in range(4)))
    replay.insert("s", Begin("long", "a text that is longer than the others"))
    for updates in (None, 3):
        batch = replay.sample(RNG(0), 8, updates)
        lead = (8,) if updates is None else (3, 8)
        for observation in (batch.observations, batch.next_observations):
            tokens, mask = observation[PROMPT], observation[PROMPT_MASK]
            slots = 48 if pi05 else 16
            assert tokens.shape == mask.shape == (*lead, slots)
            assert slots - 16 < mask.sum(-1).max() <= slots
    assert replay.sample(RNG(0), 8, 3, next_observations=False).next_observations == {}
    with pytest.raises(DataError, match=naming("long", "agent.language.length")):
        replay.insert("s", Begin("long", "x" * 100))
