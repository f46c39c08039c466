"""One recorded case of the published Q-chunking code: its arrays, our agent in its conventions, and the names' mapping.

A case is NAME.npz (parameters, data, draws, results) beside NAME.json (`agent`, `config`). `parity_qc.py` compares.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from serl_chunk.agents.base import Agent
from serl_chunk.agents.losses import chunk_return
from serl_chunk.agents.registry import make_agent
from serl_chunk.agents.state import AgentState, Noise
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig
from serl_chunk.config.presets import configured
from serl_chunk.config.robots import RobotConfig
from serl_chunk.replay.windows import Rows, gather_adjacent
from serl_chunk.types import STATE, ChunkBatch, DataError, RobotSpec

Arrays = dict[str, np.ndarray]


# What an agent's configuration has under the same name, and what makes a value of it of one that was read.
_SHARED: dict[str, Callable[[Any], Any]] = {
    "lr": float, "tau": float, "num_qs": int, "layer_norm": bool, "q_agg": lambda v: "min" if v == "min" else "mean",
    "actor_hidden_dims": tuple, "value_hidden_dims": tuple,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "acfql": _SHARED | {
        "actor_type": str, "actor_num_samples": int, "alpha": float, "flow_steps": int, "actor_layer_norm": bool,
        "use_fourier_features": bool, "fourier_feature_dim": int, "weight_decay": lambda v: float(v or 0),
    },
    "acrlpd": _SHARED | {"bc_alpha": float, "init_temp": float, "target_entropy_multiplier": float},
}  # fmt: skip


class Leaf(NamedTuple):
    """Where a published parameter is in ours: `part` of the leaf at `path` of a state's field (None: all of it)."""

    field: str  # policy, critic, target or temperature
    path: tuple[str, ...]
    part: slice | None = None
    head: bool = False  # the published one has no ensemble axis, ours an axis of one


class Case:
    """A recorded case. Raises DataError for a file that is none, or an agent or option that we do not have."""

    def __init__(self, file: Path) -> None:
        self.name = file.stem
        meta = json.loads(file.with_suffix(".json").read_text())
        given: dict[str, Any] = meta.get("config", meta)
        self.kind = str(meta.get("agent", given.get("agent_name")))
        with np.load(file) as data:
            self.arrays: Arrays = {k: np.asarray(v) for k, v in data.items()}
        if self.kind not in ("acfql", "acrlpd"):
            raise DataError(f"{file}: agent {self.kind!r}; this compares acfql and acrlpd")
        self.config = given
        if given.get("encoder") not in (None, "None", "none", ""):
            raise DataError(f"{file}: encoder={given['encoder']}: its image encoders are not ours")
        self.horizon = int(self.config["horizon_length"])
        self.chunked = bool(self.config.get("action_chunking", True))
        self.steps = self.horizon if self.chunked else 1  # of a chunk
        self.best_of_n = self.kind == "acfql" and self.config["actor_type"] == "best-of-n"
        self.action_dim = self.arrays["batch/actions"].shape[-1]
        self.state_dim = self.arrays["batch/observations"].shape[-1]
        self.agent = self._agent()

    def group(self, name: str) -> Arrays:
        """The arrays below `name`/, without it."""
        return {k[len(name) + 1 :]: v for k, v in self.arrays.items() if k.startswith(f"{name}/")}

    # -- our agent -------------------------------------------------------------------------------------------

    def _agent(self) -> Agent:
        c = self.config
        preset = "qc-rlpd" if self.kind == "acrlpd" else "qc" if self.best_of_n else "qc-fql"
        config = ExperimentConfig("parity", RobotConfig(), discount=float(c["discount"]))
        config = configured(config, preset=preset, compat="qc")
        assert isinstance(config.agent, PublishedQcConfig)
        given = {name: convert(c[name]) for name, convert in OPTIONS[self.kind].items()}
        if c.get("target_entropy") is not None:  # of the whole chunk
            given["target_entropy_multiplier"] = -float(c["target_entropy"]) / (self.steps * self.action_dim)
        agent = dataclasses.replace(config.agent, **given)
        config = dataclasses.replace(config, agent=agent, chunk=ChunkConfig(self.steps, return_steps=self.horizon))
        low, high = (-1.0,) * self.action_dim, (1.0,) * self.action_dim
        robot = RobotSpec("parity", 50.0, self.state_dim, low, high, (-1,) * self.action_dim, (), (), 100)
        return make_agent(config, robot)

    @property
    def averages_the_batch(self) -> bool:
        """Whether the published code averages next values over the batch: acfql with a single critic does."""
        return self.kind == "acfql" and int(self.config["num_qs"]) == 1

    # -- parameters ------------------------------------------------------------------------------------------

    def leaf(self, name: str) -> Leaf | None:
        """Where the published parameter `name` is in ours; None for one we do not have."""
        module, *path = name.split("/")
        single = self.averages_the_batch
        if module in ("modules_critic", "modules_target_critic"):
            field = "critic" if module == "modules_critic" else "target"
            inner = path[1:]
            if self.kind == "acrlpd":  # the last layer is beside the others there
                last = f"Dense_{len(self.config['value_hidden_dims'])}"
                inner = path[2:] if path[1] == "MLP_0" else [last, *path[2:]]
            return Leaf(field, ("q", "VmapMlp_0", *inner), head=single)
        if module == "modules_actor_bc_flow":
            return Leaf("policy", ("flow", "Mlp_0", *path[1:]))
        if module == "modules_actor_onestep_flow" and not self.best_of_n:
            return Leaf("policy", ("onestep", "net", *path[1:]))
        if module == "modules_alpha":
            return Leaf("temperature", ("log_alpha",))
        if module == "modules_actor":
            if path[0] == "MLP_0":
                return Leaf("policy", ("net", *path[1:]))
            size, last = self.steps * self.action_dim, f"Dense_{len(self.config['actor_hidden_dims'])}"
            part = slice(0, size) if path[0] == "OutputDenseMean" else slice(size, 2 * size)
            return Leaf("policy", ("net", last, path[1]), part)
        return None

    def pick(self, trees: Mapping[str, Any], leaf: Leaf) -> np.ndarray:
        """The published parameter's counterpart in `trees` (a state's fields, or their gradients)."""
        value = trees[leaf.field]
        for key in leaf.path:
            value = value[key]
        value = np.asarray(value)
        if leaf.part is not None:
            value = value[..., leaf.part]
        return value[0] if leaf.head else value

    def state(self) -> AgentState:
        """A fresh state with the recorded parameters. Raises DataError where they are not exactly ours."""
        shapes = jax.eval_shape(self.agent.init, jax.random.key(0)).replace(rng=jax.random.key(0))
        state = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.zeros(x.shape, x.dtype), shapes)
        fields = {f: getattr(state, f) for f in ("policy", "critic", "target", "temperature")}
        unset = lambda x: np.full(x.shape, np.nan, np.float32)  # noqa: E731
        ours = {f: {k: unset(v) for k, v in flatten_dict(t).items()} for f, t in fields.items()}
        for name, value in self.group("params").items():
            leaf = self.leaf(name)
            if leaf is None:
                continue
            place = ours[leaf.field].get(leaf.path)
            if place is None:
                raise DataError(f"{self.name}: parameter {name} has no counterpart {leaf.field}/{'/'.join(leaf.path)}")
            place = place[0] if leaf.head else place
            place = place if leaf.part is None else place[..., leaf.part]
            if place.shape != value.shape:
                raise DataError(f"{self.name}: parameter {name} is {value.shape}, ours is {place.shape}")
            place[...] = value
        for f, tree in ours.items():
            for path, value in tree.items():
                if np.isnan(value).any():
                    raise DataError(f"{self.name}: no recorded parameter for {f}/{'/'.join(path)}")
        new = {
            f: jax.tree_util.tree_map_with_path(lambda at, _, f=f: jnp.asarray(ours[f][tuple(k.key for k in at)]), tree)
            for f, tree in fields.items()
        }
        return state.replace(**new)

    # -- data and draws --------------------------------------------------------------------------------------

    def recorded_batch(self) -> ChunkBatch:
        """The recorded batch as ours. Its returns are sums already, so each counts as one reward."""
        b = {k: v.astype(np.float32) for k, v in self.group("batch").items()}
        size, h = len(b["actions"]), self.steps
        return ChunkBatch(
            observations={STATE: b["observations"]},
            actions=b["actions"][:, :h],
            valid=b["valid"][:, :h],
            rewards=b["rewards"][:, -1:],
            mask=b["masks"][:, -1],
            discount_n=np.full(size, self.config["discount"] ** self.horizon, np.float32),
            next_observations={STATE: b["next_observations"][:, -1]},
            bc_weight=b["valid"][:, :h],
            delay=np.zeros(size, np.int32),
            weight=b["valid"][:, -1],
        )

    def sampled(self, steps: int, returned: int, offset: int = 0) -> ChunkBatch:
        """The windows of our sampler from the recorded rows and starts."""
        d = self.group("dataset")
        rows = Rows(d["observations"], d["next_observations"], d["actions"], d["rewards"], d["masks"], d["terminals"])
        discount = float(self.config["discount"])
        return gather_adjacent(rows, d["idxs"] + offset, horizon=steps, returned=returned, discount=discount)

    def sampler_columns(self) -> Iterator[tuple[str, np.ndarray]]:
        """What the published sampler returns, column by column, by ours."""
        h, discount = self.horizon, float(self.config["discount"])
        whole = self.sampled(h, h)
        yield "observations", whole.observations[STATE]
        yield "actions", whole.actions
        yield "valid", whole.valid
        columns = [self.sampled(h, i + 1) for i in range(h)]
        yield "rewards", np.stack([np.asarray(chunk_return(jnp.asarray(c.rewards), discount)) for c in columns], 1)
        yield "masks", np.stack([c.mask for c in columns], 1)
        yield "next_observations", np.stack([c.next_observations[STATE] for c in columns], 1)
        yield "full_observations", np.stack([self.sampled(1, 1, i).observations[STATE] for i in range(h)], 1)

    def draws(self, group: str) -> tuple[Noise, Noise]:
        """The recorded draws below `group`/ of the critic and of the policy. Raises DataError naming a missing one."""
        noise = {k: jnp.asarray(v, jnp.float32) for k, v in self.group(group).items()}

        def of(name: str) -> jax.Array:
            if name not in noise:
                raise DataError(f"no {group}/{name}")
            return noise[name]

        following = of("next")
        size, dim = len(self.arrays["batch/actions"]), self.steps * self.action_dim
        critic = {"next": following.reshape(size, -1, dim)}
        if self.kind == "acrlpd":
            return critic, {"pi": of("pi")}
        policy = {"x0": of("x0"), "t": of("t").reshape(-1)}
        if not self.best_of_n:
            policy["distill"] = of("distill")
        return critic, policy
