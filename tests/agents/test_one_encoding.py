"""However many candidates are sampled and compared, an observation is encoded once for each network."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from agent_tools import CAMERA, build, config_of, make_batches, named

from serl_chunk.models.encoder import ConvEncoder


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the pictures that encoders were applied to, in traces as well."""
    shapes: list[tuple[int, ...]] = []
    whole = ConvEncoder.__call__

    def call(self: ConvEncoder, image: jax.Array) -> jax.Array:
        shapes.append(image.shape)
        return whole(self, image)

    monkeypatch.setattr(ConvEncoder, "__call__", call)
    return shapes


@pytest.mark.parametrize(
    ("variant", "count"), [("published-image", "actor_num_samples"), ("acfql-image", "candidates")]
)
def test_candidates_share_what_the_encoder_makes(variant: str, count: str, encoded: list[tuple[int, ...]]) -> None:
    seen = []
    for n in (2, 7):
        agent = build(config_of(variant, **{count: n}))
        state = jax.eval_shape(agent.init, jax.random.key(0))
        prefix = (np.zeros((3, 2), np.float32), np.zeros(3, np.float32))
        picture = np.zeros((CAMERA.height, CAMERA.width, 3), np.uint8)
        observation = {"state": np.zeros(4, np.float32), f"images/{CAMERA.name}": picture}

        def act(s, k, agent=agent, observation=observation, prefix=prefix):
            return agent._sample_chunk(agent.policy_params(s), observation, k, prefix, explore=False)

        encoded.clear()
        jax.eval_shape(act, state, jax.random.key(0))
        acting = list(encoded)
        assert len(acting) == 2  # the policy's encoder, and that of the critic that chooses
        encoded.clear()
        jax.eval_shape(agent._update, state, {}, named(agent, make_batches(agent.spec)))
        seen.append((acting, sorted(encoded)))
    assert seen[0] == seen[1]
