"""Batches of windows whose chunks were chosen anew."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from agent_tools import make_batches
from pi0_agents import SPEC

from serl_chunk.learner.trainers.phases import PhaseTrainer
from serl_chunk.learner.trainers.relabelling import HELD, SERVED, Relabelled
from serl_chunk.types import PROMPT, PROMPT_MASK


class Drawn:
    """Batches that are numbered in the state, with prompts of lengths that differ."""

    def __init__(self):
        self.count = 0

    def sample(self, rng, batch_size, updates, *, half, next_observations, frames, imitated):
        assert (next_observations, frames, imitated) == (False, True, False)
        self.count += 1
        batch, slots = make_batches(SPEC, updates, batch_size), 16 * (1 + self.count % 2)
        state = np.full((updates, batch_size, 4), self.count, np.float32)
        text = {PROMPT: np.ones((updates, batch_size, slots), np.int32),
                PROMPT_MASK: np.ones((updates, batch_size, slots), bool)}  # fmt: skip
        return batch._replace(observations={**batch.observations, "state": state, **text}, next_observations={})


def test_chunks_are_chosen_once_for_several_batches_which_mix_the_newest_ones():
    replay, keys = Drawn(), []

    class Chooses:
        def relabel(self, state, base, batch, key):
            keys.append(jax.random.key_data(key).tolist())
            return np.full(batch.actions.shape, batch.observations["state"][0, 0]), {"relabel/q_best": len(keys)}

        def policy_part(self, batch):  # of a critic that scores more
            return batch._replace(**{name: getattr(batch, name)[:, :2] for name in ("actions", "valid", "bc_weight")})

    batches = Relabelled(replay, Chooses(), 8, seed=3, prefetch=0)
    calls = SERVED * (HELD + 4)
    for update in range(calls):
        batch, metrics = batches.next(None, {}, update)
        newest = update // SERVED + 1
        assert metrics == {"relabel/q_best": newest}
        number = batch.observations["state"][0, :, 0]
        np.testing.assert_array_equal(batch.actions, np.broadcast_to(number[None, :, None, None], batch.actions.shape))
        np.testing.assert_array_equal(batch.bc_weight, batch.valid)
        assert batch.valid.shape == (1, 8, 2)
        assert set(number.tolist()) <= set(range(max(1, newest - HELD + 1), newest + 1))
    assert (replay.count, len({str(key) for key in keys})) == (calls // SERVED, calls // SERVED)
    assert len(set(number.tolist())) > 1
    again = Relabelled(Drawn(), Chooses(), 8, seed=3, prefetch=0)
    same = [again.next(None, {}, update)[0] for update in range(2)]
    first = Relabelled(Drawn(), Chooses(), 8, seed=3, prefetch=0).next(None, {}, 1)[0]
    assert not np.array_equal(same[0].observations["images/top"], same[1].observations["images/top"])
    np.testing.assert_array_equal(first.observations["images/top"], same[1].observations["images/top"])


@pytest.mark.parametrize("pretrained", [True, False])
def test_a_row_says_whether_its_chunks_were_chosen_anew(pretrained):
    """A critic that does not choose yet is no teacher: the policy imitates what the replay marks."""
    nothing = lambda *of: contextlib.nullcontext()  # noqa: E731
    stats = SimpleNamespace(timed=nothing, first_call=nothing)
    learner = SimpleNamespace(stats=stats, state=0, base={}, updates=0)
    agent = SimpleNamespace(
        wants=lambda: {"critic": 1}, batch_spec=str, update=lambda state, base, given: (state, {"batches": set(given)})
    )
    trainer = SimpleNamespace(
        _learner=learner, _agent=agent, _config=SimpleNamespace(cta_ratio=2), pretrained=pretrained,
        _relabelled=SimpleNamespace(next=lambda *of: ("chosen", {"relabel/q_best": 1})),
        _next_batches=lambda wanted, n: dict(wanted),
    )  # fmt: skip
    chosen = {"relabel/share": 0.0} if pretrained else {"relabel/share": 1.0, "relabel/q_best": 1}
    assert PhaseTrainer._update_with_batches(trainer) == {"batches": {"critic", "policy"}} | chosen
