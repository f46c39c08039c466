"""Texts of tasks as tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from errors import naming
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.cli.process import load
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.language import VOCABULARY, LanguageConfig
from serl_chunk.config.agents.pi0 import PI0_PRESETS
from serl_chunk.data.prompts import (
    TOKENIZERS,
    ByteTokenizer,
    Pi0Format,
    Pi05Format,
    Prompts,
    RowTexts,
    SentencePieceTokenizer,
    bins_of,
    make_prompts,
    tokens_digest,
)
from serl_chunk.types import ConfigError

FOLDER = Path(__file__).parent / "pi0_transforms"
MODEL = FOLDER / "tiny_spm.model"
TEXTS = json.loads((FOLDER / "tok_prompts.json").read_text())

PROMPTS = Prompts(ByteTokenizer(), 12)


def test_a_prompt_is_a_begin_token_and_the_bytes_and_then_padding_and_is_remembered():
    tokens, given_ones = PROMPTS("gr\u00fcn")
    assert (tokens.dtype, given_ones.dtype) == (np.int32, np.bool_)
    assert tokens.tolist() == [1, *(b + 2 for b in "gr\u00fcn".encode()), *6 * [0]]
    assert given_ones.tolist() == 6 * [True] + 6 * [False]
    assert PROMPTS("")[0].tolist() == [1, *11 * [0]]
    assert PROMPTS("gr\u00fcn")[0] is tokens
    for array in (tokens, given_ones):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert PROMPTS("eleven byte")[1].all()
    with pytest.raises(ConfigError, match=naming("twelve bytes", 13, 12, "agent.language.length=13")) as caught:
        PROMPTS("twelve bytes")
    assert caught.value.parameter == "agent.language.length"
    with pytest.raises(ConfigError, match="no valid text"):
        PROMPTS("\udc80")


@given(st.text(max_size=2), st.text(max_size=2))
def test_different_texts_have_different_prompts_within_the_vocabulary(a, b):
    (of_a, _), (of_b, _) = PROMPTS(a), PROMPTS(b)
    assert 0 <= of_a.min() <= of_a.max() < VOCABULARY["bytes"]
    assert (a == b) == np.array_equal(of_a, of_b)


def test_an_experiment_has_the_prompts_of_its_setting():
    config = load("fake_aloha", [])
    assert make_prompts(config) is None
    assert tokens_digest(config) == ""
    short = [("agent.language.tokenizer", "bytes"), ("robot.task", "place the cube")]
    reading = load("fake_aloha", short)
    prompts = make_prompts(reading)
    assert prompts is not None
    assert prompts("place the cube")[1].sum() == 15
    assert len(prompts("")[0]) == 48  # one length, unless the agent is pi0
    assert tokens_digest(reading) == prompts.digest() == ByteTokenizer().digest() != ""
    with pytest.raises(ConfigError, match=naming("pick the cube", 82, 48)):
        make_prompts(load("fake_aloha", short[:1]))
    with pytest.raises(ConfigError, match=naming("robot.task", "agent.language.tokenizer=bytes")):
        dataclasses.replace(reading, robot=dataclasses.replace(reading.robot, task=""))
    assert {"none", *TOKENIZERS} == set(VOCABULARY)
    assert reading.agent.language.vocabulary == ByteTokenizer.FIRST + 256
    assert not config.agent.language.reads


@pytest.fixture
def pieces():
    pytest.importorskip("sentencepiece")
    return SentencePieceTokenizer(str(MODEL), 31)


def pi0_config(tokenizer="bytes", length=48, **changes):
    language = LanguageConfig(tokenizer, length, str(MODEL) if tokenizer == "sentencepiece" else "")
    pi0 = dataclasses.replace(PI0_PRESETS["tiny"], **changes)
    return dataclasses.replace(load("fake_aloha", []), agent=BcConfig(policy="pi0", pi0=pi0, language=language))


def test_pi0s_and_pi05s_tokens_are_openpis(pieces):
    arrays = np.load(FOLDER / "tokens.npz")
    for number, text in enumerate(TEXTS[:3]):
        ids, mask = arrays[f"tok/{number}/ids"], arrays[f"tok/{number}/mask"]
        tokens, given_ones = Prompts(pieces, 64, Pi0Format())(text)
        assert tokens[: mask.sum()].tolist() == ids[mask].tolist()  # openpi cuts what is longer than 24
        assert given_ones.sum() == mask.sum() or mask.all()
        # The model knows no digits, so any seven numbers have these tokens.
        ids, mask = arrays[f"tok05/{number}/ids"], arrays[f"tok05/{number}/mask"]
        tokens, given_ones = Prompts(pieces, 200, Pi05Format(), 7)(text, np.linspace(-1, 1, 7))
        assert tokens[given_ones].tolist() == ids[mask].tolist()


def text_of(tokens):
    return bytes(t - ByteTokenizer.FIRST for t in tokens if t >= ByteTokenizer.FIRST).decode()


def test_pi0s_prompts_are_one_line_and_an_end_and_pi05s_hold_the_state_in_bins():
    prompts = Prompts(ByteTokenizer(), 64, Pi0Format())
    tokens, given_ones = prompts(" fold_the\ntowel ")
    assert (text_of(tokens), len(tokens), given_ones.sum()) == ("fold the towel\n", 16, 16)
    assert prompts("fold the towel")[0].tolist() == tokens.tolist()
    state = np.array([-1.5, -1.0, -0.9921875, 0.0, 0.999, 1.0, 7.0], np.float32)
    assert bins_of(state).tolist() == [-1, 0, 1, 128, 255, 255, 255]
    prompts = Prompts(ByteTokenizer(), 96, Pi05Format(), 7)
    tokens, given_ones = prompts("fold_it", state)
    assert text_of(tokens[given_ones]) == "Task: fold it, State: -1 0 1 128 255 255 255;\nAction: "
    assert prompts("fold_it", state + 1)[0].tolist() != tokens.tolist()
    with pytest.raises(ValueError, match="normalised state"):
        prompts("fold_it")
    # A new length is compiled anew, which a robot in motion cannot wait for: no state changes it.
    prompts = Prompts(ByteTokenizer(), 100, Pi05Format(), 3)
    assert {len(prompts("lift", np.full(3, number))[0]) for number in (-2.0, -1.0, -0.9, 0.0, 1.0)} == {48}


@pytest.mark.parametrize("form", [Pi0Format(), Pi05Format()])
def test_prompts_of_pi0_are_cut_behind_the_longest_of_a_call(form):
    prompts = Prompts(ByteTokenizer(), 100, form, 2)
    texts, numbers = ("short", "a text that is longer than the other ones"), np.array([0, 1, 0, 1, 0, 0])
    states = np.random.default_rng(0).uniform(-1, 1, (6, 2)).astype(np.float32)
    tokens, mask = prompts.of_rows(RowTexts(texts, numbers), states)
    assert tokens.shape == mask.shape == (6, len(prompts(texts[1], states[1])[0]))
    assert tokens.shape[1] % 16 == 0
    assert mask.sum(1).max() <= tokens.shape[1] < 100
    short, _ = prompts.of_rows(RowTexts(texts, np.zeros(6, np.int64)), states)
    assert short.shape[1] < tokens.shape[1]
    for k, number in enumerate(numbers):
        own, given_ones = prompts(texts[number], states[k])
        assert own[given_ones].tolist() == tokens[k][mask[k]].tolist()
    assert tokens.flags.writeable


def test_the_most_tokens_of_a_prompt_are_the_settings():
    texts = RowTexts(("x" * 20,), np.zeros(2, np.int64))
    assert Prompts(ByteTokenizer(), 24, Pi0Format()).of_rows(texts)[0].shape == (2, 24)
    with pytest.raises(ConfigError, match=naming("agent.language.length=22", 22, 20)):
        Prompts(ByteTokenizer(), 20, Pi0Format()).check("x" * 20)
    with pytest.raises(ConfigError, match=naming("state", "agent.language.length=41", 41, 40)):
        Prompts(ByteTokenizer(), 40, Pi05Format(), 3).check("lift")  # with three digits in each number


def test_the_agent_chooses_the_format(pieces):
    config, task = pi0_config("sentencepiece", 200), "a cube"

    def tokens(*state, **changes):
        return make_prompts(pi0_config("sentencepiece", 200, **changes), 14)(task, *state)[0]

    plain = tokens()
    assert plain.tolist() == Prompts(pieces, 200, Pi0Format())(task)[0].tolist()
    assert plain.tolist() == tokens(pi05=True, state_in_prompt=False).tolist()
    assert len(tokens(np.zeros(14), pi05=True)) > len(plain)
    np.testing.assert_array_equal(tokens(published=True), np.pad(plain, (0, 200 - 16)))
    assert tokens_digest(config) == hashlib.sha256(MODEL.read_bytes()).hexdigest()[:16]
    assert tokens_digest(pi0_config("bytes", 200)) == ByteTokenizer().digest()


def test_a_tokenizers_file_is_checked(tmp_path, monkeypatch):
    pytest.importorskip("sentencepiece")
    (tmp_path / "cut.model").write_bytes(MODEL.read_bytes()[:1000])
    file = ("paligemma_tokenizer.model", "gs://big_vision")

    def at(name):
        return lambda: SentencePieceTokenizer(str(tmp_path / name), 31)

    for make, named, parameter in (
        (lambda: make_prompts(pi0_config("sentencepiece", 200, vocabulary=30)), (31, "agent.pi0.vocabulary is 30"),
         "agent.pi0.vocabulary"),
        (at("cut.model"), ("no sentencepiece model", *file), "agent.language.model"),
        (at("none.model"), ("cannot be read", *file), "agent.language.model"),
        (at(""), ("cannot be", *file), "agent.language.model"),
        (lambda: LanguageConfig("sentencepiece"), file, "agent.language.model"),
        *((lambda agent=agent: agent(language=LanguageConfig("sentencepiece", model=str(MODEL))),
           ("agent.policy=pi0", "bytes"), "agent.language.tokenizer") for agent in (AcfqlConfig, BcConfig)),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=naming(*named)) as caught:
            make()
        assert caught.value.parameter == parameter
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match=naming("sentencepiece", "serl-chunk[pi0]")):
        SentencePieceTokenizer(str(MODEL), 31)
