"""The products that updates.py times alone are those of an update of the plain agents."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from plain import agents, batches, contestants, products


def operations(jaxpr: Any) -> int:
    """Multiplications and additions of all matrix products."""
    count = 0
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                count += times * operations(inner) if hasattr(inner, "eqns") else 0
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            length = math.prod(equation.invars[0].aval.shape[i] for i in contracted)
            count += 2 * length * math.prod(equation.outvars[0].aval.shape)
    return count


@pytest.mark.parametrize("preset", ["qc-rlpd", "qc-fql", "qc"])
def test_as_many_as_the_update_has(preset):
    setting = contestants.plain_setting(preset, contestants.experiment_agent(preset, 64))
    agent = jax.eval_shape(lambda: agents.create(setting))
    draws = batches.random_draws(0, 16, setting.candidates)
    draws["next"] = draws["next"] if preset == "qc" else draws["next"][:, 0]
    batch = contestants._published_layout(batches.random_batch(0, 16))
    update = jax.make_jaxpr(lambda *inputs: type(agent).step(*inputs)[1])(agent, batch, draws)
    alone = products.ProductsContestant()
    alone.open(preset, 64, 16)
    bare = jax.make_jaxpr(alone.run)(alone.weights, alone.inputs, alone.blocks)
    # The policies' outputs and the one-step policy's inputs are some numbers wider or narrower in the update.
    assert operations(bare.jaxpr) == pytest.approx(operations(update.jaxpr), rel=0.01)
