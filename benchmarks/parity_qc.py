"""Compares the agents of `--compat qc` with recorded numbers of the published Q-chunking code.

Every case (NAME.npz beside NAME.json) of the folder is run with its recorded parameters, data and draws: sampler,
intermediates, losses, gradient norms of each parameter, one update, one action.

The relative error of an array is max|ours - recorded| / max|recorded|, of its largest number; where all of what is
recorded is 0, ours must be 0 too. Every parameter's gradient and every updated parameter is an array of its own.
Exit status 0 only if all errors are at most 2e-5 and no loss, gradient, updated parameter, batch or action that is
recorded goes uncompared; intermediates that are not known here are named and count for nothing.

python benchmarks/parity_qc.py DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from support.qc_case import Case

from serl_chunk.agents.published_qc import EDGE, PublishedAcrlpd
from serl_chunk.agents.state import AgentState, Committed, Noise
from serl_chunk.types import STATE, ChunkBatch, DataError

TOLERANCE = 2e-5
UNREAD = ("batch/terminals", "batch/next_actions")  # of the sampler; no loss reads them
INPUTS = ("params", "dataset", "noise", "noise_update")
NEEDED = ("loss", "grad_norm", "after1")  # of every case
OPTIONAL = ("mid", "after1_info")  # may hold what is not known here
UNUSED = "best-of-n has no one-step policy; the published one is never used"


class Compared(NamedTuple):
    """One recorded array, by the group of its name, and its relative error."""

    group: str
    name: str
    error: float


def relative_error(ours: Any, recorded: Any) -> float:
    """See the module's docstring; infinite where the shapes differ or ours is not finite."""
    a, b = np.asarray(ours, np.float64), np.asarray(recorded, np.float64)
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    return float(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30))


class Comparison:
    """All that is compared of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.compared: list[Compared] = []
        self.left_out: dict[str, str] = {}  # recorded name -> why it is not compared
        self._done: set[str] = set()
        agent: Any = case.agent
        self._over_batch = jnp.min if case.config["q_agg"] == "min" else jnp.mean
        if case.averages_the_batch:
            values = agent.critic.target_values
            agent.critic.target_values = lambda *args: jnp.broadcast_to(
                self._over_batch(values(*args)), case.arrays["batch/observations"].shape[:1]
            )

    def check(self, name: str, ours: Any) -> None:
        """Compare with what is recorded under `name`, if it is."""
        recorded = self.case.arrays.get(name)
        if recorded is None:
            return
        self._done.add(name)
        self.compared.append(Compared(name.split("/")[0], name, relative_error(ours, recorded)))

    def run(self) -> None:
        """Compare everything; call once."""
        case = self.case
        batch, state = self._batch(), case.state()
        self._losses(state, batch, "noise", "loss", gradients=True)
        self._losses(state, batch, "noise_update", "after1_info", gradients=False)
        self._update(state, batch)
        self._action(state)
        for name in case.arrays:
            if name in UNREAD:
                self.left_out.setdefault(name, "no loss reads it")
            if name not in self._done and name.split("/")[0] not in INPUTS:
                self.left_out.setdefault(name, "not known here")

    @property
    def missing(self) -> list[str]:
        """What should have been compared and was not."""
        there = {c.group for c in self.compared}
        forgiven = {k for k, why in self.left_out.items() if why == UNUSED or k in UNREAD or k == "dataset"}
        lost = [k for k in self.left_out if k not in forgiven and k.split("/")[0] not in OPTIONAL]
        return [f"{group}/*" for group in NEEDED if group not in there] + lost

    def _batch(self) -> ChunkBatch:
        case = self.case
        recorded = case.recorded_batch()
        if not case.group("dataset"):
            self.left_out["dataset"] = "not recorded: the sampler is not compared"
            return recorded
        for name, ours in case.sampler_columns():
            self.check(f"batch/{name}", ours)
        whole = case.sampled(case.steps, case.horizon)
        same_returns = all(c.error <= TOLERANCE for c in self.compared)
        return whole if same_returns else recorded

    def _losses(self, state: AgentState, batch: ChunkBatch, noise: str, group: str, *, gradients: bool) -> None:
        try:
            draws = self.case.draws(noise)
        except DataError as e:
            self.left_out.update({k: str(e) for k in self.case.arrays if k.split("/")[0] == group})
            return
        if not hasattr(self, "_evaluate"):
            self._evaluate = jax.jit(self._everything)
        mid, losses, grads = self._evaluate(state, batch, *draws)
        for name, value in losses.items():
            self.check(f"{group}/{name}", value)
        norms, extremes = [], []
        for name in self.case.group("params"):
            leaf = self.case.leaf(name)
            if leaf is None:
                grad = np.zeros(())  # no part in any loss
            else:
                grad = np.zeros(()) if leaf.field == "target" else self.case.pick(grads, leaf)
            norms.append(np.linalg.norm(np.ravel(grad)))
            extremes += [grad.max(), grad.min()]
            if gradients:
                self.check(f"grad_norm/{name}", norms[-1])
        self.check(f"{group}/grad/max", max(extremes))
        self.check(f"{group}/grad/min", min(extremes))
        self.check(f"{group}/grad/norm", np.sum(norms))  # the published "norm" is the sum of the parameters' norms
        if gradients:
            for name, value in mid.items():
                self.check(f"mid/{name}", value)

    def _everything(
        self, state: AgentState, batch: ChunkBatch, critic_draws: Noise, policy_draws: Noise
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, Any]]:
        """Intermediates, losses and gradients under their published names."""
        agent: Any = self.case.agent
        critic_grad, critic = agent._critic_gradient(state, {}, batch, critic_draws)
        policy_grad, policy = agent._policy_gradient(state, {}, batch, policy_draws, False)
        grads = {"critic": critic_grad, "policy": policy_grad}
        features = agent.perception.critic_context(state.critic, {}, batch.observations).features
        q = agent.critic.values(state.critic, features, agent.critic.truncate_flatten(batch.actions))
        mid = {"q": q}
        losses = {
            "critic/critic_loss": critic["critic/critic_loss"],
            "critic/q_mean": jnp.mean(q),
            "critic/q_max": jnp.max(q),
            "critic/q_min": jnp.min(q),
        }
        mid["target_q"] = agent.critic_target(state, {}, batch, critic_draws)
        if isinstance(agent, PublishedAcrlpd):
            more = _acrlpd(agent, state, batch, critic_draws, policy_draws, policy)
            grads["temperature"] = jax.grad(agent.temperature_loss)(state.temperature, policy["actor/entropy"])
        else:
            more = _acfql(agent, state, batch, critic_draws, policy_draws, policy)
        mid, losses = mid | more[0], losses | more[1]
        following = agent.perception.critic_context(state.target, {}, batch.next_observations).features
        mid["next_qs"] = agent.critic.values(state.target, following, mid["next_actions"])
        mid["next_q"] = agent.critic.target_values(state.target, critic_draws, following, mid["next_actions"])
        if self.case.averages_the_batch:
            mid |= {"q": q[0], "next_qs": mid["next_qs"][0], "next_q": self._over_batch(mid["next_q"])}
        actor = losses.get("actor/total_loss", losses["actor/actor_loss"])
        losses["total"] = losses["critic/critic_loss"] + actor
        return mid, losses, grads

    def _update(self, state: AgentState, batch: ChunkBatch) -> None:
        case = self.case
        try:
            draws = case.draws("noise_update")
        except DataError as e:
            self.left_out.update({k: str(e) for k in case.arrays if k.split("/")[0] == "after1"})
            return
        after, _ = jax.jit(case.agent.step)(state, {}, batch, dict(zip(("critic", "policy"), draws, strict=True)))
        trees = {f: getattr(after, f) for f in ("policy", "critic", "target", "temperature")}
        for name in case.group("after1"):
            leaf = case.leaf(name)
            if leaf is None:
                self.left_out[f"after1/{name}"] = UNUSED
            else:
                self.check(f"after1/{name}", case.pick(trees, leaf))

    def _action(self, state: AgentState) -> None:
        sample, agent = self.case.group("sample"), self.case.agent
        if not {"observation", "noise", "action"} <= set(sample):
            return
        steps = self.case.steps
        prefix = Committed(np.zeros((steps, self.case.action_dim), np.float32), np.zeros(steps, np.float32))
        noise = sample["noise"].astype(np.float32).reshape(-1, agent.chunk_dim)
        observation = {STATE: jnp.asarray(sample["observation"], jnp.float32).reshape(-1)}
        chunk, _ = jax.jit(agent.act)(agent.policy_params(state), {}, observation, noise, prefix)
        self._done |= {"sample/observation", "sample/noise"}
        self.check("sample/action", np.asarray(chunk).reshape(sample["action"].shape))


Named = tuple[dict[str, jax.Array], dict[str, jax.Array]]


def _acrlpd(agent: Any, state: Any, batch: Any, critic: Noise, policy: Noise, metrics: dict[str, jax.Array]) -> Named:
    context = lambda observations: agent.perception.policy_context(state.policy, state.critic, {}, observations)  # noqa: E731
    following = agent.net.distribution(state.policy["net"], context(batch.next_observations))
    now = agent.net.distribution(state.policy["net"], context(batch.observations))
    action, log_prob = now.sample_and_log_prob(policy["pi"])
    features = agent.perception.critic_context(state.critic, {}, batch.observations).features
    noise, flat = critic["next"][:, 0], batch.actions.reshape(len(batch.actions), -1)
    entropy, alpha = metrics["actor/entropy"], metrics["actor/temperature"]
    mid = {
        "next_loc": following.mean,
        "next_scale": jnp.exp(following.log_std),
        "next_actions": following.sample_and_log_prob(noise)[0],
        "next_pretanh": following.mean + jnp.exp(following.log_std) * noise,
        "pi_loc": now.mean,
        "pi_scale": jnp.exp(now.log_std),
        "pi_actions": action,
        "pi_pretanh": now.mean + jnp.exp(now.log_std) * policy["pi"],
        "log_probs": jnp.sum(log_prob, -1),
        "bc_log_probs": jnp.sum(now.log_prob(flat, EDGE), -1),
        "pi_q_mean": agent.critic.mean_value(state.critic, features, action),
        "alpha": alpha,
    }
    losses = {
        "actor/actor_loss": -alpha * entropy - metrics["actor/q"],
        "actor/alpha": alpha,
        "actor/alpha_loss": agent.temperature_loss(state.temperature, entropy),
        "actor/bc_loss": agent.config.bc_alpha * metrics["actor/bc_loss"],
        "actor/entropy": entropy,
        "actor/q": metrics["actor/q"],
    }
    parts = ("actor/actor_loss", "actor/alpha_loss", "actor/bc_loss")
    return mid, losses | {"actor/total_loss": sum(losses[k] for k in parts)}


def _acfql(agent: Any, state: Any, batch: Any, critic: Noise, policy: Noise, metrics: dict[str, jax.Array]) -> Named:
    mid = {"next_actions": agent.next_chunk(state, {}, batch.next_observations, critic["next"])}
    if "distill" in policy:
        context = agent.perception.policy_context(state.policy, state.critic, {}, batch.observations)
        taught = agent.bounded(agent.flow.sample(state.policy["flow"], context, policy["distill"][:, None]))
        mid["target_flow_actions"] = taught.reshape(len(taught), -1)
    else:
        sampled, context = agent.candidates(state.policy, state.critic, {}, batch.next_observations, critic["next"])
        chunks = agent.critic.truncate_flatten(sampled)
        values = agent.critic.candidate_values(state.critic, context.features, chunks)
        mid |= {"next_candidates": chunks, "next_candidate_q": values, "next_index": jnp.argmax(values, 1)}
    losses = {
        "actor/actor_loss": metrics.get("actor/actor_loss", metrics["actor/bc_loss"]),
        "actor/bc_flow_loss": metrics["actor/bc_loss"],
        "actor/distill_loss": metrics.get("actor/distill_loss", jnp.zeros(())),
    }
    return mid, losses


def compare(folder: Path) -> Iterator[tuple[str, Comparison | str]]:
    """(name, what was compared, or why it could not be) of every case in `folder`."""
    for file in sorted(folder.glob("*.npz")):
        if not file.with_suffix(".json").is_file():
            yield file.stem, f"{file.with_suffix('.json').name} is missing"
            continue
        try:
            comparison = Comparison(Case(file))
            comparison.run()
        except Exception as e:  # whatever is wrong with one case, the others are compared
            yield file.stem, f"{type(e).__name__}: {e}"
        else:
            yield file.stem, comparison


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder
    jax.config.update("jax_default_matmul_precision", "highest")  # accelerators multiply coarser by default
    good, cases = True, 0
    print(f"{'case':32} {'quantity':12} {'arrays':>6} {'largest relative error':>22}  of")
    for name, result in compare(folder):
        cases += 1
        if isinstance(result, str):
            good = False
            print(f"{name:32} cannot be run: {result}")
            continue
        for group in dict.fromkeys(c.group for c in result.compared):
            members = [c for c in result.compared if c.group == group]
            worst = max(members, key=lambda c: c.error)
            fine = worst.error <= TOLERANCE
            good = good and fine
            verdict = "" if fine else "  TOO LARGE"
            print(f"{name:32} {group:12} {len(members):6} {worst.error:22.2e}  {worst.name}{verdict}")
        if result.missing:
            good = False
            print(f"{name:32} NOT COMPARED, and must be: {', '.join(result.missing)}")
        for reason in dict.fromkeys(result.left_out.values()):
            which = [k for k, v in result.left_out.items() if v == reason]
            print(f"{name:32} not compared: {', '.join(which)} ({reason})")
        if result.case.averages_the_batch:
            print(f"{name:32} one critic: published next values are aggregated over the batch; so are these")
    if not cases:
        print(f"{folder}: no case (NAME.npz beside NAME.json) in it", file=sys.stderr)
        return 1
    print(f"all of {cases} cases within {TOLERANCE:g}" if good else f"NOT all of {cases} cases within {TOLERANCE:g}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
