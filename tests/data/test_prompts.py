"""Texts of tasks as tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from errors import naming
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.cli.process import load
from serl_chunk.config.language import VOCABULARY, LanguageConfig
from serl_chunk.data.prompts import TOKENIZERS, ByteTokenizer, Prompts, make_prompts, tokens_digest
from serl_chunk.types import ConfigError

PROMPTS = Prompts(ByteTokenizer(), 12)


def test_a_prompt_is_a_begin_token_and_the_bytes_and_then_padding():
    tokens, given_ones = PROMPTS("gr\u00fcn")
    assert (tokens.dtype, given_ones.dtype) == (np.int32, np.bool_)
    assert tokens.tolist() == [1, *(b + 2 for b in "gr\u00fcn".encode()), *6 * [0]]
    assert given_ones.tolist() == 6 * [True] + 6 * [False]
    assert PROMPTS("")[0].tolist() == [1, *11 * [0]]


@given(st.text(max_size=2), st.text(max_size=2))
def test_different_texts_have_different_prompts_within_the_vocabulary(a, b):
    (of_a, _), (of_b, _) = PROMPTS(a), PROMPTS(b)
    assert 0 <= of_a.min() <= of_a.max() < VOCABULARY["bytes"]
    assert (a == b) == np.array_equal(of_a, of_b)


def test_a_text_is_remembered_and_cannot_be_changed():
    tokens, mask = PROMPTS("left")
    assert PROMPTS("left")[0] is tokens
    for array in (tokens, mask):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_text_that_is_too_long_is_refused_with_its_length_and_the_limit():
    assert PROMPTS("eleven byte")[1].all()
    with pytest.raises(ConfigError, match=naming("twelve bytes", 13, 12, "agent.language.length=13")) as caught:
        PROMPTS("twelve bytes")
    assert caught.value.parameter == "agent.language.length"
    with pytest.raises(ConfigError, match="no valid text"):
        PROMPTS("\udc80")


def test_an_experiment_has_the_prompts_of_its_setting():
    config = load("fake_aloha", [])
    assert make_prompts(config) is None
    assert tokens_digest(config) == ""
    short = [("agent.language.tokenizer", "bytes"), ("robot.task", "place the cube")]
    reading = load("fake_aloha", short)
    prompts = make_prompts(reading)
    assert prompts is not None
    assert prompts("place the cube")[1].sum() == 15
    assert len(prompts("")[0]) == 48
    assert tokens_digest(reading) == prompts.digest() == ByteTokenizer().digest() != ""
    with pytest.raises(ConfigError, match=naming("pick the cube", 82, 48)):
        make_prompts(load("fake_aloha", short[:1]))


def test_every_tokenizer_of_the_setting_is_implemented():
    assert {"none", *TOKENIZERS} == set(VOCABULARY)
    assert LanguageConfig("bytes").vocabulary == ByteTokenizer.FIRST + 256
    assert not LanguageConfig().reads


def test_an_agent_that_reads_language_needs_a_text():
    config = load("fake_aloha", [("agent.language.tokenizer", "bytes")])
    with pytest.raises(ConfigError, match=naming("robot.task", "agent.language.tokenizer=bytes")):
        dataclasses.replace(config, robot=dataclasses.replace(config.robot, task=""))
