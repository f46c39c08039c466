"""An agent and a trainer from outside of the package: an experiment in which chunks are regressed on the state.

    serl-chunk record --exp_name fake_aloha --n_demos 10 --out demos/fake_aloha
    serl-chunk --exp_name examples/own_agent.py --local --demo_path demos/fake_aloha
    serl-chunk --exp_name examples/own_agent.py:counted --local --demo_path demos/fake_aloha

The second run trains nothing: its trainer publishes the fresh policy once, and counts what the actors record.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

import serl_chunk as sc


@dataclasses.dataclass(frozen=True)
class RegressionConfig(sc.AgentConfig):
    """Settings; each is one of the command line, too: `--config.agent.width=512`."""

    kind: ClassVar[str] = "regression"

    width: int = sc.setting(256, "of both hidden layers", least=1)


class Regression(sc.Agent):
    """The chunk with the least absolute error under the sampler's imitation weights."""

    def __init__(self, config, spec):
        super().__init__(config, spec)
        layers = [nn.Dense(config.width), nn.relu, nn.Dense(config.width), nn.relu, nn.Dense(self.chunk_dim)]
        self.net = nn.Sequential(layers)

    def init(self, rng):
        encoder, features = self.perception.init_encoder(rng)
        return self.fresh_state(rng, {"encoder": encoder, "net": self.net.init(rng, features)})

    def chunk(self, policy, base, observation):
        flat = self.net.apply(policy["net"], self.perception.policy_context(policy, {}, base, observation).features)
        return flat.reshape(*flat.shape[:-1], self.spec.horizon, self.spec.action_dim)

    def policy_draws(self, key, batch):
        return {}

    def policy_loss(self, policy, state, base, batch, draws, *, bc_only):
        error = jnp.abs(self.chunk(policy, base, batch.observations) - batch.actions).mean(-1)
        loss = sc.Sum((error * batch.bc_weight).sum(), batch.bc_weight.sum())
        return sc.Loss((loss,), {"actor/bc_loss": loss})

    def policy_params(self, state, *, pretrained=False):
        return {"policy": self.acting_policy(state)}

    def acting_noise(self, key, observation, *, explore, alone=False):
        return 0.05 * explore * jax.random.normal(key, (1, self.chunk_dim))

    def act(self, params, base, observation, noise, committed):
        chunk = self.chunk(params["policy"], base, observation)[None] + noise.reshape(1, self.spec.horizon, -1)
        return self.finished(chunk, committed)[0], {}


class Counter(sc.Trainer):
    """Trains nothing; `learner.online_steps` of the robot are the end."""

    phase = "counting"
    first = True

    @property
    def done(self):
        return self._learner.env_steps >= self._learner.config.learner.online_steps

    def work(self):
        if self.first:
            self._learner.publish()
        first, self.first = self.first, False
        return first

    def status(self):
        return {"done": self._learner.env_steps, "total": self._learner.config.learner.online_steps}


@dataclasses.dataclass(frozen=True)
class CountedConfig(RegressionConfig):
    """The same agent with the other trainer."""

    kind: ClassVar[str] = "counted"


sc.register_agent(RegressionConfig, Regression)
sc.register_agent(CountedConfig, Regression, trainer=Counter)


def experiment(variant=""):
    base = sc.load_experiment("fake_aloha")
    agent = CountedConfig() if variant == "counted" else RegressionConfig()
    learner = dataclasses.replace(base.learner, online_steps=2_000, utd_ratio=0.1)
    return dataclasses.replace(base, name="own_agent", agent=agent, learner=learner)
