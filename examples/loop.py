"""Train a policy in one process, without a network, with the names of `serl_chunk` alone.

    serl-chunk record --exp_name fake_aloha --n_demos 10 --out demos/fake_aloha
    python examples/loop.py demos/fake_aloha 100

The demonstrations are imitated first. Then the policy acts, a scripted human helps, and each step of the robot pays for
one update of the critic. `serl-chunk --local` does the same, resumable and with checkpoints and a report.
"""

import dataclasses
import sys
from itertools import count

import jax
import numpy as np

import serl_chunk as sc

PRETRAIN = 2_000  # policy updates on the demonstrations
WARMUP = 10  # episodes before the first critic update


class IntoReplay:
    """Takes the records of an episode, and puts them into a replay."""

    def __init__(self, replay: sc.Replay) -> None:
        self.replay, self.steps, self.total = replay, [], 0

    def begin(self, begin) -> None:
        self.replay.insert("loop", begin)
        self.name = begin.episode_id

    def step(self, step) -> None:
        self.steps.append(step)

    def end(self, end) -> None:
        self.replay.insert("loop", sc.StepBlock.from_steps(self.name, self.steps))
        self.replay.insert("loop", end)
        self.total, self.steps = self.total + len(self.steps), []


def train(demos: str, episodes: int, held_out: int = 50) -> float:
    """Return the share of held-out episodes that succeed."""
    config = sc.load_experiment("fake_aloha")
    actor = dataclasses.replace(config.actor, intervention="scripted")
    config = dataclasses.replace(config, actor=actor)
    env, rng, key = sc.make_env(config.robot), np.random.default_rng(0), jax.random.key(0)
    spec, size = env.robot_spec, config.learner.batch_size
    agent, demonstrations = sc.make_agent(config, spec), sc.load_demos([demos], spec).episodes
    preprocess = sc.fit_preprocess(config, spec, demonstrations)
    replay = sc.Replay(spec, config, preprocess, bc_on=config.agent.bc_on)
    replay.add_demo(*demonstrations)
    state, base, updates = agent.init(key), agent.new_base(key), 0
    for _ in range(PRETRAIN):
        state, _ = agent.update_policy(state, base, replay.sample(rng, size, 1, next_observations=False))
    policy, sink, version = sc.LocalPolicy(agent, preprocess, spec, seed=0), IntoReplay(replay), count()
    human = sc.make_intervention("scripted", env, config)
    runner = sc.EpisodeRunner(env, policy, sink, config=config, intervention=human)
    publish = lambda: policy.swap(  # noqa: E731
        sc.Snapshot(next(version), agent.flatten_params(agent.published(state, base, pretrained=not updates)))
    )
    for episode in range(episodes):
        publish()
        summary = runner.run_episode(3_000_000 + episode, explore=True)
        print(f"episode {episode}: success={summary.success}, {summary.human_ticks} human ticks, {updates} updates")
        while episode >= WARMUP and updates < sink.total:
            state, _ = agent.update(state, base, {"critic": replay.sample(rng, size, 1)})
            updates += 1
    publish()
    return sc.evaluate(env, policy, config, n=held_out).success_rate


if __name__ == "__main__":
    print(f"success: {100 * train(sys.argv[1], int(sys.argv[2])):.0f} %")
