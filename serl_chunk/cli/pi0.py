"""`serl-chunk pi0`: what is in a checkpoint of openpi, its parameters for a run of ours, and ours for openpi."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from serl_chunk.cli.process import add_experiment_flags, load_flags
from serl_chunk.config.agents.pi0 import PI0_PRESETS, Pi0Config
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.config.presets import PI0_ROBOTS
from serl_chunk.io import atomic_path, os_reason
from serl_chunk.logs import quiet_libraries
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.types import ConfigError, DataError

_FROM = "a step's folder, its params/ or model.safetensors, or PaliGemma's .npz"


def inspect_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `inspect`."""
    p.add_argument("folder", metavar="DIR", help=_FROM)
    p.add_argument("--robot", help=f"say whether its statistics fit one of {', '.join(PI0_ROBOTS)}")


def import_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `import`."""
    p.add_argument("folder", metavar="FROM", help=_FROM)
    p.add_argument("file", metavar="TO", help="the .npz to write")
    p.add_argument("--model", help=f"its sizes, one of {', '.join(PI0_PRESETS)} (default: the experiment's)")
    p.add_argument("--init_seed", type=int, default=0, help="of parameters that the checkpoint lacks (default: 0)")
    p.add_argument("--exp_name", help="the experiment whose agent.pi0 has its sizes")
    add_experiment_flags(p)


def export_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `export`."""
    p.add_argument("run_folder", metavar="RUN", help="the run's folder")
    p.add_argument("folder", metavar="TO", help="a folder that is absent or empty")
    p.add_argument("--step", default="latest", help="of the checkpoint (default: the newest)")
    p.add_argument(
        "--merge_lora",
        action="store_true",
        help="fold LoRA into the weights that it adds to, for a server whose configuration has none",
    )
    p.add_argument(
        "--asset_id",
        help="of the statistics, where openpi looks for them (default: as that of the run's normaliser.norm_stats)",
    )
    p.add_argument("--exp_name", help="the experiment whose agent.pi0 has its sizes")
    add_experiment_flags(p)


def inspect_command(flags: argparse.Namespace) -> int:
    """Print path, shape and dtype of each parameter, the totals of its groups, and the statistics that there are.

    With `--robot`, raises DataError where no statistics have as many numbers as it.
    """
    robot = flags.robot
    if robot is not None and robot not in PI0_ROBOTS:
        raise ConfigError(f"unknown robot {robot!r}. Valid: {', '.join(PI0_ROBOTS)}", parameter="robot")
    quiet_libraries()
    from serl_chunk.models.pi0.tree import GROUPS
    from serl_chunk.runs.openpi_checkpoints import Checkpoint

    checkpoint = Checkpoint(flags.folder)
    counts: dict[str, int] = dict.fromkeys([*GROUPS, "unknown"], 0)
    for path, stored in sorted(checkpoint.stored.items()):
        print(f"{path}  {'x'.join(map(str, stored.shape))}  {stored.dtype}")
        counts[checkpoint.group_of(path)] += math.prod(stored.shape)
    shown = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    print(f"{len(checkpoint.stored)} arrays, {sum(counts.values()):,} parameters: {shown}")
    found = {}
    for name, stats in checkpoint.norm_stats().items():
        found[name] = {vector: len(values["mean"]) for vector, values in stats.items()}
        print(f"statistics {name}: {', '.join(f'{vector} {size}' for vector, size in found[name].items())}")
    if robot is None:
        return 0
    wanted = {"state": PI0_ROBOTS[robot].state_dim, "actions": PI0_ROBOTS[robot].action_dim}  # zeros behind them fit
    fitting = [each for each, sizes in found.items() if all(sizes.get(v, 0) >= size for v, size in wanted.items())]
    if not fitting:
        raise DataError(
            f"no statistics for {robot}, whose state has {wanted['state']} numbers and whose actions have "
            f"{wanted['actions']}. Write them from demonstrations with serl-chunk data stats"
        )
    print(f"for {robot}: {', '.join(fitting)}")
    return 0


def import_command(flags: argparse.Namespace) -> int:
    """Write the parameters of a checkpoint, one at a time, into an .npz."""
    quiet_libraries()
    import jax

    from serl_chunk.models.pi0 import weights
    from serl_chunk.runs.openpi_checkpoints import Checkpoint

    model = _model(flags)
    checkpoint, out = Checkpoint(flags.folder), Path(flags.file)
    require(out.suffix == ".npz", "TO", f"must end in .npz, got {out}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(out) as temporary, weights.Writer(temporary) as writer:
            # One at a time is in memory.
            checkpoint.load(model, jax.random.key(flags.init_seed), lambda leaf, array: writer.add(leaf.path, array))
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {os_reason(error)}") from error
    print(f"{out}: {out.stat().st_size / 1e6:,.1f} MB. Use it with --config.agent.pi0.weights={out}")
    return 0


def export_command(flags: argparse.Namespace) -> int:
    """Write the parameters of a run's checkpoint, those of the base included, as openpi's."""
    quiet_libraries()
    from serl_chunk.agents.registry import make_agent
    from serl_chunk.data.preprocess import fit_preprocess
    from serl_chunk.models.pi0.tree import flat, folded, nested, without_lora
    from serl_chunk.runs.checkpoints import CheckpointStore
    from serl_chunk.runs.evaluations import wanted_policy
    from serl_chunk.runs.folder import read_config
    from serl_chunk.runs.openpi_checkpoints import export, norm_stats_of

    config, run = load_flags(flags), Path(flags.run_folder)
    model = _of(config)
    require(not flags.merge_lora or model.vlm.has_lora or model.expert.has_lora, "merge_lora",
        "has no effect: agent.pi0 has no LoRA. Remove it")  # fmt: skip
    if not run.is_dir():
        raise DataError(f"{run}: there is no such folder. Give the folder of a run")
    read_config(run)  # checks its format
    stored = wanted_policy(run, CheckpointStore(run), flags.step)
    spec = spec_of(config)
    agent = make_agent(config, spec)
    agent.check_base(stored.meta["base_digest"])
    params: Any = agent.load_params(stored.params)
    base, trained = (flat(params.get(tree, {}).get("pi0", {})) for tree in ("base", "policy"))
    whole = nested(base | trained)
    changed: list[str] = []
    if flags.merge_lora:
        model, (whole, changed) = without_lora(model), folded(model, whole)
    if stats := norm_stats_of(config.normaliser, flags.asset_id or "", state_dims=model.state_dims):
        require(fit_preprocess(config, spec, []).digest() == stored.meta["normaliser_digest"], "normaliser.norm_stats",
            f"{config.normaliser.norm_stats} has other statistics than step {stored.step} was trained with. Give the "
            "run's")  # fmt: skip
    export(flags.folder, model, whole, {}, stats)
    print(f"{flags.folder}: step {stored.step} of {run}, statistics {', '.join(stats or ['none'])}")
    if changed:
        print(f"LoRA folded into {len(changed)} arrays, now float32: {', '.join(changed)}")
    if stats is None:
        print(f"normaliser.actions={config.normaliser.actions} is none of openpi's transforms: it would act otherwise")
    return 0


def _model(flags: argparse.Namespace) -> Pi0Config:
    if flags.model is None:
        return _of(load_flags(flags))
    require(flags.model in PI0_PRESETS, "model", f"unknown model {flags.model!r}. Valid: {', '.join(PI0_PRESETS)}")
    return PI0_PRESETS[flags.model]


def _of(config: ExperimentConfig) -> Pi0Config:
    if (model := config.agent.as_pi0) is None:
        raise ConfigError("is no pi0 in this experiment. Use one with agent.policy=pi0", parameter="agent.policy")
    return model
