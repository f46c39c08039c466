"""Interventions: cuts of windows, the step that is charged; both follow corrections, restarts and silence."""

from __future__ import annotations

import numpy as np
import pytest
from coded_episodes import LIMIT, SPEC, Checker, Coded, config, feed, make, normaliser
from coded_replay import CollectingReplay, read_held
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.config.agents import AcfqlConfig
from serl_chunk.config.critics import CriticConfig
from serl_chunk.config.experiment import ExperimentConfig, RewardConfig
from serl_chunk.config.presets import configured
from serl_chunk.config.replay import ReplayConfig
from serl_chunk.config.robots import RobotConfig
from serl_chunk.replay.episode import interventions
from serl_chunk.replay.replay import DEMO_SESSION, Replay
from serl_chunk.types import Amend, ConfigError, Outcome, Source, StepBlock

P, U, H, S, R = Source.POLICY, Source.HUMAN, Source.HOLD, Source.SCRIPTED, Source.RANDOM
EVERY = [set(range(LIMIT + 1)) for _ in SPEC.cameras]


def build(cfg, **kw):
    return Replay(SPEC, cfg, normaliser(cfg.chunk.horizon), **{"image_keys": ("a", "b")} | kw)


def check_all(replay, episodes, cfg, *, n=1_500):
    """Every window that may be sampled is, and says what it should; returns the batch's shortest window."""
    checker = Checker(episodes, cfg)
    if not replay.ready.windows:
        assert not checker.windows()
        return
    batch = replay.sample(np.random.default_rng(0), n)
    assert checker.check(batch) <= checker.windows()
    assert replay.ready.windows == len(checker.windows())


def episode(text: str, end: str = "limit", **kw) -> Coded:
    letters = {"p": P, "u": U, "h": H, "s": S, "r": R}
    source = np.array([letters[c] for c in text], np.uint8)
    return Coded(0, len(source), end, source, EVERY, **kw)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pppuu", [(2, 3)]),
        ("pphhu", [(1, 4)]),  # holds between the two are the approach
        ("puuhuup", [(0, 1)]),  # one segment
        ("puhhpu", [(0, 1), (4, 5)]),
        ("uupu", [(2, 3)]),  # the first one took it from no policy
        ("hhu", []),
        ("ru", [(0, 1)]),
        ("ppp", []),
    ],
)
def test_interventions(text, expected):
    e = episode(text)
    assert interventions(e.source).tolist() == [list(pair) for pair in expected]
    assert interventions(e.source).shape == (len(expected), 2)
    assert interventions(e.source).tolist() == [list(pair) for pair in e.interventions()]  # the other tests' own rule


def test_a_cut_window_bootstraps_from_the_observation_at_the_intervention():
    cfg = config(4, 4, intervention_windows="cut", penalty=0.5, demo_fraction="uniform", offset=0.0, scale=1.0)
    e = episode("pppppphuuuu")
    replay = build(cfg)
    feed(replay, [e], np.random.default_rng(0))
    checker = Checker([e], cfg)
    batch = replay.sample(np.random.default_rng(0), 400)
    checker.check(batch)
    tick = (batch.observations["state"] * checker.norm.state_std + checker.norm.state_mean)[:, 1]
    first = int(np.flatnonzero(tick == 5)[0])  # the policy's last step, a hold, and the human from tick 7 on
    assert batch.valid[first].tolist() == [1, 1, 0, 0]
    assert batch.rewards[first].tolist() == [5 - 0.5, 6, 0, 0]
    assert batch.mask[first] == 1
    assert batch.discount_n[first] == cfg.discount**2
    after = batch.next_observations["state"] * checker.norm.state_std + checker.norm.state_mean
    assert after[first, 1] == 7
    assert set(tick.astype(int)) == set(range(8))  # those before the intervention, and a human's full window
    actions = batch.actions[first] * checker.norm.scale + checker.norm.centre
    assert (actions[:, 1] + tick[first]).tolist() == [5, 6, 6, 6]  # nothing of the human's


@settings(max_examples=examples(30), deadline=None)
@given(
    sources=st.lists(
        st.lists(st.sampled_from([P, P, P, U, U, H, S, R]), min_size=1, max_size=24), min_size=1, max_size=4
    ),
    ends=st.lists(st.sampled_from(["success", "failure", "limit", "died"]), min_size=4, max_size=4),
    lengths=st.sampled_from([(1, 1, None), (4, 4, None), (6, 3, None), (2, 2, 7), (5, 2, 3)]),
    terminal=st.sampled_from(["keep", "drop"]),
    windows=st.sampled_from(["keep", "cut"]),
    penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**16),
)
def test_no_window_crosses_an_intervention_and_the_right_step_is_charged(
    sources, ends, lengths, terminal, windows, penalty, seed
):
    cfg = config(
        *lengths, penalty=penalty, intervention_windows=windows, terminal_windows=terminal, demo_fraction="uniform",
        capacity=200, demo_capacity=200, human_capacity=50, image_capacity=200,
    )  # fmt: skip
    episodes = [
        Coded(i, len(s), end, np.array(s, np.uint8), EVERY, session=f"s{i % 2}")
        for i, (s, end) in enumerate(zip(sources, ends, strict=False))
    ]
    replay = build(cfg)
    feed(replay, episodes, np.random.default_rng(seed))
    check_all(replay, episodes, cfg, n=400)
    if replay.ready.windows and windows == "cut":
        batch = replay.sample(np.random.default_rng(seed), 400)
        norm = normaliser(cfg.chunk.horizon)
        state = (batch.observations["state"] * norm.state_std + norm.state_mean).astype(int)
        for k, t, valid in zip(state[:, 0], state[:, 1], batch.valid, strict=True):
            seen = episodes[k].source[t : t + int(valid.sum())]
            own = np.flatnonzero((seen != U) & (seen != H))
            assert not len(own) or U not in seen[own[0] :], "a window goes from the policy's steps into a human's"


@pytest.mark.parametrize("age", [0, 2])
def test_with_missing_frames_evictions_and_the_human_store(age):
    rng = np.random.default_rng(3)
    cfg = config(
        capacity=400, human_capacity=300, demo_fraction="uniform", max_image_age=age, penalty=0.5,
        intervention_windows="cut",
    )  # fmt: skip
    episodes = [make(rng, i, session=f"s{i % 3}") for i in range(120)]
    replay = build(cfg)
    feed(replay, episodes, rng)
    assert replay.stats()["replay/kept_for_interventions"] > 10
    checker = Checker(episodes, cfg)
    for _ in range(5):
        checker.check(replay.sample(rng, 4_000))


def test_an_amended_episode_is_charged_once():
    rng = np.random.default_rng(4)
    cfg = config(intervention_windows="cut", penalty=0.5, demo_fraction="uniform")
    episodes = [make(rng, i, every_frame=True) for i in range(30)]
    replay = build(cfg)
    feed(replay, episodes, rng)
    for e in episodes:
        e.terminated, e.outcome, e.last_reward = True, Outcome.SUCCESS, 16.0
        replay.insert(e.session, Amend(e.episode_id, Outcome.SUCCESS, "operator", True, 16.0))
    check_all(replay, episodes, cfg)


def test_an_actor_that_was_silent_and_came_back():
    cfg = config(4, 4, intervention_windows="cut", penalty=0.5, demo_fraction="uniform")
    e = episode("pppphuuhpppuuu", "success")
    replay = build(cfg)
    begin, *_, end = e.records(np.random.default_rng(0))
    replay.insert("s", begin)
    for first, past in ((0, 5), (5, 7), (7, 12), (12, 14)):  # the first silence lies in the approach
        replay.insert("s", StepBlock.from_steps(e.episode_id, [e.step(t) for t in range(first, past)]))
        replay.close_session("s")
    replay.insert("s", end)
    check_all(replay, [e], cfg)


def test_put_back_from_records_it_is_the_same():
    rng = np.random.default_rng(5)
    cfg = config(intervention_windows="cut", penalty=0.5, demo_fraction="uniform")
    episodes = [make(rng, i) for i in range(25)]
    first, second = build(cfg), build(cfg)
    records = [(e.session, r) for e in episodes for r in e.records(rng)]
    for session, record in records:
        first.insert(session, record)
    for session, episode_id in first.episodes():  # whole episodes in place of live blocks
        for record in read_held(first, session, episode_id):
            second.insert(session, record)
    a, b = (r.sample(np.random.default_rng(0), 500) for r in (first, second))
    np.testing.assert_array_equal(a.rewards, b.rewards)
    np.testing.assert_array_equal(a.valid, b.valid)
    np.testing.assert_array_equal(a.next_observations["state"], b.next_observations["state"])


def test_demonstrations_are_cut_and_not_charged():
    rng = np.random.default_rng(6)
    cfg = config(intervention_windows="cut", penalty=0.5, demo_fraction=1.0)
    demos = [make(rng, i, demonstration=True, session=DEMO_SESSION) for i in range(20)]
    assert sum(len(d.interventions()) for d in demos) > 3
    replay = build(cfg)
    replay.add_demo(*(d.episode() for d in demos))
    checker = Checker(demos, cfg)
    assert checker.check(replay.sample(rng, 8_000)) == checker.windows()


def test_the_realised_return_includes_what_was_charged():
    cfg = config(4, 4, penalty=0.5, scale=0.0, offset=0.0)
    replay = CollectingReplay(SPEC, cfg, normaliser(4))
    e = episode("ppuupp")
    steps = [e.step(t) for t in range(e.length)]
    steps[0] = steps[0]._replace(decision={"q": np.float32(0.25)})
    for record in (e.records(np.random.default_rng(0))[0], StepBlock.from_steps(e.episode_id, steps), e.end_record()):
        replay.insert("s", record)
    assert replay.finished[0].decisions == ((0.25, -0.5 * cfg.discount),)


def test_off_is_as_before_and_published_conventions_switch_it_off():
    base = ExperimentConfig("x", RobotConfig())
    assert (base.replay.intervention_windows, base.reward.intervention_penalty) == ("keep", 0.0)
    agent = AcfqlConfig(critic=CriticConfig(loss="squared"))
    on = ExperimentConfig(
        "x", RobotConfig(), agent=agent, replay=ReplayConfig(intervention_windows="cut"),
        reward=RewardConfig(intervention_penalty=0.1),
    )  # fmt: skip
    off = configured(on, compat="qc")
    assert (off.replay.intervention_windows, off.reward.intervention_penalty) == ("keep", 0.0)
    assert configured(on, preset="qc").reward.intervention_penalty == 0.1


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match=naming("reward.intervention_penalty", -1, 0)):
        RewardConfig(intervention_penalty=-1)
    with pytest.raises(ConfigError, match=naming("replay.intervention_windows", "cut", "replay.windows", "qc")):
        ReplayConfig(intervention_windows="cut", windows="qc", terminal_windows="drop")
    with pytest.raises(
        ConfigError,
        match=naming("agent.critic.loss", "bounded", "agent.critic.value_low", -0.1, "agent.critic.value_high", 1),
    ):
        ExperimentConfig("x", RobotConfig(), agent=AcfqlConfig(), reward=RewardConfig(intervention_penalty=0.1))
