"""One place for both sides: what it makes of observations, of rows of a replay, of chunks, of frames and of texts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from deferred_episodes import lazy
from errors import naming
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.cli.process import load
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.language import VOCABULARY, LanguageConfig
from serl_chunk.config.agents.pi0 import PI0_PRESETS
from serl_chunk.config.experiment import NormaliserConfig
from serl_chunk.data.frames import Frames
from serl_chunk.data.normalise.normaliser import fit_normaliser
from serl_chunk.data.preprocess import Preprocess, fit_preprocess, letterbox
from serl_chunk.data.prompts import (
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
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.types import PROMPT, PROMPT_MASK, STATE, Amend, CameraSpec, ConfigError, DataError

READING = [("agent.language.tokenizer", "bytes"), ("robot.task", "place the cube"), ("agent.image_keys", "top")]
RNG = np.random.default_rng


@pytest.fixture(scope="module")
def reading():
    config = load("fake_aloha_images", READING)
    return config, spec_of(config)


def observation_of(spec):
    frames = {f"images/{c.name}": RNG(1).integers(0, 256, (c.height, c.width, 3), np.uint8) for c in spec.cameras}
    return {STATE: RNG(0).normal(size=spec.state_dim).astype(np.float32), **frames}


def test_an_experiments_transforms_have_its_cameras_and_its_prompts(reading):
    config, spec = reading
    preprocess, observation = fit_preprocess(config, spec, []), observation_of(spec)
    assert (preprocess.image_keys, preprocess.horizon) == (("top",), config.chunk.carried)
    inputs = preprocess.observe(observation, "place the cube")
    assert set(inputs) == {STATE, "images/top", PROMPT, PROMPT_MASK}
    assert inputs["images/top"] is observation["images/top"]
    assert inputs[PROMPT_MASK].sum() == 15
    blind = fit_preprocess(load("fake_aloha", []), spec, [])
    assert set(blind.observe(observation, "place the cube")) == {STATE}
    scaled = fit_preprocess(load("fake_aloha_images", [READING[2], ("agent.encoder.frame_size", "24,32")]), spec, [])
    assert (scaled.cameras, scaled.recorded) == ((CameraSpec("top", 24, 32),), (spec.camera("top"),))
    frame = letterbox(observation["images/top"], 24, 32)
    np.testing.assert_array_equal(scaled.observe(observation)["images/top"], frame)
    for settings, words in (
        ([("agent.image_keys", "roof")], ("roof", "top")),
        ([*READING[:2], ("agent.language.length", "4")], ("agent.language.length", 15, 4)),
    ):
        with pytest.raises(ConfigError, match=naming(*words)):
            fit_preprocess(load("fake_aloha", settings), spec, [])
    assert len(preprocess.prompts("")[0]) == 48  # one length, unless the agent is pi0
    assert tokens_digest(config) == preprocess.prompts.digest() == ByteTokenizer().digest() != ""
    assert (make_prompts(load("fake_aloha", [])), tokens_digest(load("fake_aloha", []))) == (None, "")
    with pytest.raises(ConfigError, match=naming("robot.task", "agent.language.tokenizer=bytes")):
        dataclasses.replace(config, robot=dataclasses.replace(config.robot, task=""))
    # What is saved restores it.
    meta = {"experiment": "x", **preprocess.normaliser.fields()}
    again = Preprocess.restored(config, spec, meta, preprocess.normaliser.to_arrays())
    assert again.digest() == preprocess.digest() == meta["normaliser_digest"]
    assert again.image_keys == preprocess.image_keys
    assert again.prompts is not None


def test_observations_with_texts_of_different_lengths_are_stacked(reading):
    _, spec = reading
    config = load("fake_aloha_pi0", [])
    preprocess = fit_preprocess(config, spec, [])
    texts = ("a", "put the red cube into the basket on the left side")
    rows = [preprocess.observe(observation_of(spec), text) for text in texts]
    assert rows[0][PROMPT].size < rows[1][PROMPT].size
    stacked = preprocess.stacked(rows)
    assert stacked[PROMPT].shape == stacked[PROMPT_MASK].shape == (2, config.agent.language.length)
    for i, row in enumerate(rows):
        own = row[PROMPT].size
        for name in (PROMPT, PROMPT_MASK):
            np.testing.assert_array_equal(stacked[name][i, :own], row[name])
        assert not stacked[PROMPT_MASK][i, own:].any()
        np.testing.assert_array_equal(stacked[STATE][i], row[STATE])
    assert (stacked[PROMPT].dtype, stacked[PROMPT_MASK].dtype) == (np.int32, np.bool_)


@pytest.mark.parametrize("lazily", [False, True])
def test_records_enter_with_the_frames_that_the_agent_reads(spec, make_episode, lazily):
    """Cameras that it does not read, and all else, stay as recorded."""
    recorded = make_episode(spec, 6, seed=3)
    episode = lazy(recorded, final=True) if lazily else recorded
    normaliser, small = fit_normaliser(spec, NormaliserConfig(), 3, []), (CameraSpec("top", 8, 8),)
    preprocess = Preprocess(normaliser, small, recorded=(spec.camera("top"),))
    for same in (Preprocess(normaliser, (spec.camera("top"),)), Preprocess(normaliser, small, recorded=small)):
        assert same.episode(episode) is episode  # nothing is scaled: the replay checks the frames
        assert all(same.record(record) is record for record in episode)
    begin, steps, end = preprocess.episode(episode)
    assert begin is preprocess.record(begin) is episode.begin
    np.testing.assert_array_equal(steps.action, recorded.steps.action)
    frames, before = (of.sparse["images/top"] for of in (steps, recorded.steps))
    np.testing.assert_array_equal(frames.index, before.index)
    assert isinstance(frames.values, Frames) is lazily
    np.testing.assert_array_equal(np.asarray(frames.values), letterbox(before.values, 8, 8))
    last, was = end.final_observation, recorded.end.final_observation
    assert last["images/top"][None].shape == (1, 8, 8, 3)
    np.testing.assert_array_equal(np.asarray(last["images/top"]), letterbox(was["images/top"], 8, 8))
    assert steps.sparse["images/wrist"] is episode.steps.sparse["images/wrist"]
    assert last["images/wrist"] is episode.end.final_observation["images/wrist"]
    assert preprocess.record(end._replace(final_observation=None)).final_observation is None
    amend = Amend("e3", discard=True)
    assert preprocess.record(amend) is amend
    preprocess = dataclasses.replace(preprocess, recorded=(CameraSpec("top", 5, 6),))  # not the robot's size
    for record in episode[1:]:
        with pytest.raises(DataError, match=naming("e3", "top", "4, 6, 3", "5, 6, 3")):
            preprocess.record(record)


def test_rows_of_a_replay_are_what_single_observations_are(reading):
    config, spec = reading
    preprocess = fit_preprocess(config, spec, [])
    states = RNG(2).normal(size=(7, spec.state_dim)).astype(np.float32)
    texts = ("left", "right", "the one that no row has")
    numbers = np.array([1, 0, 0, 1, 1, 0, 1], np.int32)
    rows = preprocess.observe_rows(states, RowTexts(texts, numbers))
    for k, number in enumerate(numbers):
        single = preprocess.observe(observation_of(spec) | {STATE: states[k]}, texts[number])
        for name, value in rows.items():
            np.testing.assert_array_equal(value[k], single[name])
    assert (rows[PROMPT].dtype, rows[PROMPT_MASK].dtype) == (np.int32, np.bool_)
    rows[PROMPT][:] = 0  # the caller's
    assert preprocess.observe_rows(states, RowTexts(texts, numbers))[PROMPT].any()
    assert set(preprocess.observe_rows(states, None)) == {STATE}


ARRAYS = np.load(Path(__file__).parent / "pi0_transforms" / "transforms.npz")
IMAGES = ARRAYS["resize/uint8"]  # [2, 48, 64, 3]


@pytest.mark.parametrize("side", [56, 224])
def test_the_pixels_are_openpis(side):
    expected = ARRAYS[f"resize/pil_{side}"]
    for frames, of in ((IMAGES[1], expected[1]), (IMAGES[None], expected[None])):
        np.testing.assert_array_equal(letterbox(frames, side, side), of)
    assert letterbox(IMAGES, 48, 64) is IMAGES  # of the size: not copied


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


def test_a_tokenizers_file_is_checked(tmp_path):
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
        (lambda: LanguageConfig("sentencepiece"), file, "agent.language.model"),
        *((lambda agent=agent: agent(language=LanguageConfig("sentencepiece", model=str(MODEL))),
           ("agent.policy=pi0", "bytes"), "agent.language.tokenizer") for agent in (AcfqlConfig, BcConfig)),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=naming(*named)) as caught:
            make()
        assert caught.value.parameter == parameter
