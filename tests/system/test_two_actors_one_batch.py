"""Actors, server and replay in one process, over real sockets: what comes together in a batch, and a late learner."""

import threading

import numpy as np
from ports import free_port
from processes import PATIENCE
from transport_tools import linked, serving

from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig
from serl_chunk.config.robots import RobotConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.replay.replay import Replay
from serl_chunk.types import Begin, ConfigError, End, Outcome, RobotSpec, Source, Step

EPISODES, LENGTH, HORIZON = 12, 9, 3
SPEC = RobotSpec(
    name="coded", control_hz=50.0, state_dim=3, action_low=(-1.0,), action_high=(1.0,), joint_of_action=(-1,),
    grippers=(), cameras=(), max_episode_steps=LENGTH,
)  # fmt: skip


def make_replay() -> Replay:
    robot, chunk = RobotConfig(max_episode_steps=LENGTH), ChunkConfig(HORIZON)
    config = ExperimentConfig(name="coded", robot=robot, agent=AcrlpdConfig(), chunk=chunk)
    zero, one = np.zeros((HORIZON, 1)), np.ones((HORIZON, 1))  # model space is robot space
    plain = Normaliser("absolute_range", np.zeros(3), np.ones(3), zero, one, np.array([-1]))
    return Replay(SPEC, config, Preprocess(plain))


def record(port: int, actor: int, failures: list[BaseException]) -> None:
    """Episodes whose states hold (actor, episode, tick) and whose actions hold the actor and the tick."""
    try:
        with linked(port, actor_id=f"actor-{actor}") as link:
            for episode in range(EPISODES):
                name = f"{actor}-{episode}"
                states = [{"state": np.array([actor, episode, tick], np.float32)} for tick in range(LENGTH + 1)]
                link.begin(Begin(name))
                for tick in range(LENGTH):
                    action, decided = np.array([100 * actor + tick], np.float32), tick - tick % HORIZON
                    link.step(Step(tick, states[tick], action, 0.0, Source.POLICY, decided, 1, 0.02 * tick))
                link.end(End(name, LENGTH, states[LENGTH], False, True, Outcome.UNKNOWN))
            assert link.flush(PATIENCE)
    except BaseException as error:
        failures.append(error)


def test_rows_of_two_actors_lie_in_one_sampled_batch():
    replay, port, failures, received = make_replay(), free_port(), [], {}

    def insert(info, record):
        received[info.actor_id] = received.get(info.actor_id, 0) + replay.insert(info.session, record).steps

    with serving(port, on_record=insert) as server:
        threads = [threading.Thread(target=record, args=(port, actor, failures)) for actor in (1, 2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(PATIENCE)
            assert not t.is_alive()
        assert not failures, failures
        assert server.stats()["steps"] == 2 * EPISODES * LENGTH
    assert received == {"actor-1": EPISODES * LENGTH, "actor-2": EPISODES * LENGTH}
    assert replay.ready.online == 2 * EPISODES * (LENGTH - HORIZON + 1)

    batch = replay.sample(np.random.default_rng(0), 256)
    here, after = batch.observations["state"], batch.next_observations["state"]
    assert set(here[:, 0]) == {1, 2}
    np.testing.assert_array_equal(after, here + np.array([0, 0, HORIZON]))  # of the same actor and episode
    np.testing.assert_array_equal(batch.actions[:, :, 0], 100 * here[:, :1] + here[:, 2:] + np.arange(HORIZON))


def test_a_learner_that_is_not_ready_keeps_its_actors_waiting_and_lives():
    """Until it is, it knows neither allowances nor episodes to close: asking it would end the server's thread."""
    port, sentences, ready = free_port(), [], threading.Event()

    def not_before(value):
        if not ready.is_set():
            raise ConfigError("the learner is still reading")
        return value

    def waiting(sentence):
        sentences.append(sentence)
        ready.set()

    callbacks = {
        "welcome": lambda: not_before(({}, {})), "allowance": lambda session: not_before(17),
        "on_silent": lambda info, gone: not_before(None),
    }  # fmt: skip
    with serving(port, **callbacks) as server, linked(port, connect=False) as link:
        link.connect(timeout=PATIENCE, on_waiting=waiting)
        assert "still reading" in sentences[0]
        assert link.allowance == 17
        server.check()
