"""Records cases of the published Q-chunking code for `parity_qc.py`, with tiny networks.

Runs in that code's own environment and imports nothing of ours. Of each case NAME.npz holds parameters, a data set,
a batch that the published sampler made of it, all random draws, losses, gradient norms, intermediates, one update and
one action; NAME.json holds agent and configuration. Everything follows from one seed, so a recording can be repeated;
another jax may draw other numbers. Nothing is compiled, so that what is drawn can be watched: seconds a case.

/path/to/qc's python benchmarks/record_qc.py --qc CHECKOUT --out DIR [--case NAME,...]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

SEED, STATE, ACTION, HORIZON, BATCH, HIDDEN = 1, 4, 2, 3, 8, (8, 8)  # with seed 0 a mean is next to 0
# name -> (agent, options); what is not named is the published default
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "acfql_best_of_n": ("acfql", {
        "actor_type": "best-of-n", "actor_num_samples": 3, "num_qs": 3, "q_agg": "min", "use_fourier_features": True,
        "fourier_feature_dim": 6, "weight_decay": 0.01,
    }),
    "acfql_ddpg": ("acfql", {"alpha": 10.0}),
    "acfql_n_step": ("acfql", {"alpha": 10.0, "action_chunking": False}),
    "acfql_n_step_best_of_n": ("acfql", {"actor_type": "best-of-n", "actor_num_samples": 3, "action_chunking": False}),
    "acfql_one_critic": ("acfql", {"alpha": 10.0, "num_qs": 1}),
    "acfql_one_critic_min": ("acfql", {"alpha": 10.0, "num_qs": 1, "q_agg": "min"}),
    "acrlpd_bc": ("acrlpd", {"num_qs": 3, "bc_alpha": 0.01}),
    "acrlpd_min": ("acrlpd", {"num_qs": 3, "bc_alpha": 0.01, "q_agg": "min"}),
    "acrlpd_no_bc": ("acrlpd", {"num_qs": 3}),
    "acrlpd_n_step": ("acrlpd", {"num_qs": 3, "bc_alpha": 0.01, "action_chunking": False}),
    "acrlpd_one_critic": ("acrlpd", {"num_qs": 1, "bc_alpha": 0.01}),
}  # fmt: skip
# The data set: (steps, whether the last one succeeded, whether it is marked as an end)
EPISODES = ((9, True, True), (12, False, True), (1, True, True), (6, True, False), (5, False, True), (7, False, False))
# The windows: inside an episode; ending with it; beyond a success; from a time-out's last row; an episode of one
# step; beyond a success that is no end; beyond a time-out; inside the episode that is not over
STARTS = (2, 6, 7, 20, 21, 26, 31, 36)
Arrays = dict[str, np.ndarray]


@contextlib.contextmanager
def watched(given: Sequence[np.ndarray] = ()) -> Iterator[list[np.ndarray]]:
    """Lists what jax.random's normal and uniform return meanwhile; first they return `given`, whatever their keys."""
    drawn, waiting = [], list(given)

    def watch(draw: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def instead(*args: Any, **kwargs: Any) -> jax.Array:
            value = draw(*args, **kwargs)
            if isinstance(value, jax.core.Tracer):
                return value  # flax asks the initialisers for shapes
            drawn.append(waiting.pop(0) if waiting else np.asarray(value))
            return jnp.asarray(drawn[-1])

        return instead

    with mock.patch.multiple(jax.random, normal=watch(jax.random.normal), uniform=watch(jax.random.uniform)):
        yield drawn


def data_set(rng: np.random.Generator) -> Arrays:
    """Random rows of EPISODES. Rewards are noisy, so that a wrong row shows; some actions are at the limits."""
    steps, succeeded, marked = (np.array(column) for column in zip(*EPISODES, strict=True))
    size, last = steps.sum(), steps.cumsum() - 1
    rows = {
        "observations": rng.normal(size=(size, STATE)),
        "actions": np.clip(rng.normal(scale=0.7, size=(size, ACTION)), -1, 1),
        "rewards": rng.normal(-1, 0.1, size),
        "masks": np.ones(size),
        "terminals": np.zeros(size),
        "next_observations": rng.normal(size=(size, STATE)),
    }
    rows["rewards"][last[succeeded]] += 1
    rows["masks"][last[succeeded]] = 0
    rows["terminals"][last[marked]] = 1
    return {k: v.astype(np.float32) for k, v in rows.items()}


def flat(prefix: str, tree: Any) -> Arrays:
    return {f"{prefix}/{k}": np.asarray(v) for k, v in flatten_dict(tree, sep="/").items()}


class Recorder:
    """One published agent with perturbed parameters, and a batch."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        config = importlib.import_module(f"agents.{kind}").get_config()
        config.update({"horizon_length": HORIZON, "batch_size": BATCH, **options})
        config.update({"actor_hidden_dims": HIDDEN, "value_hidden_dims": HIDDEN})
        example = np.zeros(STATE, np.float32), np.zeros(ACTION, np.float32)
        agent = importlib.import_module("agents").agents[kind].create(SEED, *example, config)
        self.kind, self.rng, self.key = kind, np.random.default_rng(SEED), jax.random.PRNGKey(SEED + 1)
        # as created, norms and biases are trivial, and the target critic is the critic
        stirred = lambda x: x + jnp.asarray(0.1 * self.rng.normal(size=x.shape), x.dtype)  # noqa: E731
        params = jax.tree.map(stirred, agent.network.params)
        self.agent: Any = agent.replace(network=agent.network.replace(params=params))
        self.best_of_n = self.agent.config.get("actor_type") == "best-of-n"
        rows = data_set(self.rng)
        published = importlib.import_module("utils.datasets").Dataset.create(**rows)
        self.rows = rows | {"idxs": np.array(STARTS)}
        with mock.patch.object(np.random, "randint", return_value=self.rows["idxs"]):
            self.batch = published.sample_sequence(BATCH, HORIZON, self.agent.config["discount"])

    def record(self) -> Arrays:
        params, batch = self.agent.network.params, jax.tree.map(jnp.asarray, self.batch)
        out = flat("params", params) | flat("batch", self.batch) | flat("dataset", self.rows)
        with watched() as drawn:
            loss = lambda p: self.agent.total_loss(batch, p, rng=self.key)  # noqa: E731
            (total, info), grads = jax.value_and_grad(loss, has_aux=True)(params)
        out |= flat("noise", self._named(drawn)) | flat("loss", info | {"total": total})
        out |= flat("grad_norm", jax.tree.map(jnp.linalg.norm, grads)) | flat("mid", self._intermediates(batch, drawn))
        with watched() as drawn:
            after, info = self.agent.update(batch)
        out |= flat("after1", after.network.params) | flat("after1_info", info)
        out |= flat("noise_update", self._named(drawn))
        observation = self.rng.normal(size=STATE).astype(np.float32)
        with watched() as drawn:
            action = self.agent.sample_actions(observation, rng=self.key)
        return out | flat("sample", {"observation": observation, "noise": drawn[0], "action": action})

    def _named(self, drawn: list[np.ndarray]) -> Arrays:
        """The draws of one evaluation of all losses: the critic's first."""
        if self.kind == "acrlpd":  # a distribution draws the batch of each dimension
            return {name: value.T for name, value in zip(("next", "pi"), drawn, strict=True)}
        names = ("next", "x0", "t") if self.best_of_n else ("next", "x0", "t", "distill")
        return dict(zip(names, drawn, strict=True))

    def _intermediates(self, batch: dict[str, jax.Array], drawn: list[np.ndarray]) -> dict[str, Any]:
        """What the losses are made of, by the agent's own networks with what was `drawn` for them."""
        config, net = self.agent.config, self.agent.network.select
        fold = jnp.min if config["q_agg"] == "min" else jnp.mean
        now, following = batch["observations"], batch["next_observations"][:, -1]
        taught = batch["actions"].reshape(BATCH, -1) if config["action_chunking"] else batch["actions"][:, 0]
        with watched(drawn[:1]):
            mid = {"next_actions": self.agent.sample_actions(following, rng=self.key)}
        next_qs = net("target_critic")(following, mid["next_actions"])
        next_q = fold(next_qs, axis=0)
        target = batch["rewards"][:, -1] + config["discount"] ** HORIZON * batch["masks"][:, -1] * next_q
        mid |= {"q": net("critic")(now, taught), "next_qs": next_qs, "next_q": next_q, "target_q": target}
        if self.best_of_n:
            each = jnp.broadcast_to(following[:, None], (*drawn[0].shape[:2], STATE))
            mid["next_candidates"] = self.agent.compute_flow_actions(each, drawn[0])
            mid["next_candidate_q"] = fold(net("critic")(each, mid["next_candidates"]), axis=0)
            mid["next_index"] = jnp.argmax(mid["next_candidate_q"], axis=1)
        elif self.kind == "acfql":
            mid["target_flow_actions"] = self.agent.compute_flow_actions(now, noises=drawn[3])
        else:
            for name, draw, observations in (("next", drawn[0], following), ("pi", drawn[1], now)):
                policy = net("actor")(observations)
                mid |= {f"{name}_loc": policy.distribution.loc, f"{name}_scale": policy.distribution.stddev()}
                with watched([draw, draw]):
                    mid[f"{name}_pretanh"] = policy.distribution.sample(seed=self.key)
                    mid[f"{name}_actions"] = policy.sample(seed=self.key)
            mid["log_probs"] = policy.log_prob(mid["pi_actions"])
            mid["bc_log_probs"] = policy.log_prob(jnp.clip(taught, 1e-5 - 1, 1 - 1e-5))
            mid |= {"pi_q_mean": net("critic")(now, mid["pi_actions"]).mean(axis=0), "alpha": net("alpha")()}
        return mid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qc", type=Path, required=True, metavar="CHECKOUT", help="of the published code")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the cases")
    parser.add_argument("--case", default=",".join(CASES), metavar="NAME,...", help="default: %(default)s")
    args = parser.parse_args()
    names = args.case.split(",")
    if unknown := sorted(set(names) - set(CASES)):
        parser.error(f"no case {', '.join(unknown)}")
    sys.path.insert(0, str(args.qc.resolve()))
    jax.config.update("jax_default_matmul_precision", "highest")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        recorder = Recorder(*CASES[name])
        with jax.disable_jit():
            arrays = recorder.record()
        np.savez_compressed(args.out / f"{name}.npz", **arrays)
        meta: dict[str, Any] = {"case": name, "agent": recorder.kind, "config": dict(recorder.agent.config)}
        meta |= {"seed": SEED, "versions": {m: version(m) for m in ("jax", "flax", "optax", "numpy")}}
        meta["scalars"] = {k[5:]: float(v) for k, v in arrays.items() if k.startswith("loss/")}
        (args.out / f"{name}.json").write_text(json.dumps(meta, indent=1) + "\n")
        print(args.out / f"{name}.npz")


if __name__ == "__main__":
    main()
