"""`serl-chunk pi0`: what is in a checkpoint of openpi, its parameters for a run of ours, and ours for openpi."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from serl_chunk.cli.process import add_experiment_flags, load_flags, spec_of
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.pi0 import PI0_PRESETS, Pi0Config
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.presets import PI0_ROBOTS
from serl_chunk.io import os_reason
from serl_chunk.logs import quiet_libraries
from serl_chunk.types import ConfigError, DataError

if TYPE_CHECKING:
    from serl_chunk.models.pi0.tree import Leaf

DESCRIPTION = (
    "Checkpoints of openpi: look into one (inspect), take its parameters as a run's first ones (import), and give a "
    "run's to openpi (export)."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command lines of inspect, import and export."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="inspect|import|export")
    p = commands.add_parser("inspect", help="list a checkpoint's parameters and statistics", allow_abbrev=False)
    p.add_argument("folder", metavar="DIR", help="a step's folder, its params/, or PaliGemma's .npz")
    p.add_argument("--robot", help=f"say whether its statistics fit one of {', '.join(PI0_ROBOTS)}")
    p.set_defaults(run=lambda flags, rest: run_inspect(Path(flags.folder), flags.robot))
    p = commands.add_parser("import", help="write agent.pi0.weights of a checkpoint", allow_abbrev=False)
    p.add_argument("folder", metavar="FROM", help="a step's folder, its params/, or PaliGemma's .npz")
    p.add_argument("file", metavar="TO", help="the .npz to write")
    p.add_argument("--model", help=f"its sizes, one of {', '.join(PI0_PRESETS)} (default: the experiment's)")
    p.add_argument("--init_seed", type=int, default=0, help="of parameters that the checkpoint lacks (default: 0)")
    p.add_argument("--exp_name", help="the experiment whose agent.pi0 has its sizes")
    add_experiment_flags(p)
    p.set_defaults(run=run_import)
    p = commands.add_parser("export", help="write a run's parameters as openpi's checkpoint", allow_abbrev=False)
    p.add_argument("run_folder", metavar="RUN", help="the run's folder")
    p.add_argument("folder", metavar="TO", help="a folder that is absent or empty")
    p.add_argument("--step", default="latest", help="of the checkpoint (default: the newest)")
    p.add_argument("--asset_id", help="of the statistics, where openpi looks for them (default: as that of the run's "
                   "normaliser.norm_stats)")  # fmt: skip
    p.add_argument("--exp_name", help="the experiment whose agent.pi0 has its sizes")
    add_experiment_flags(p)
    p.set_defaults(run=run_export)


def run(flags: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run the one that was given. Raises ConfigError and DataError."""
    quiet_libraries()
    if rest and flags.command == "inspect":
        raise ConfigError(f"unrecognized arguments: {' '.join(rest)}; see serl-chunk pi0 inspect --help")
    return int(flags.run(flags, rest))


def run_inspect(folder: Path, robot: str | None = None) -> int:
    """Print path, shape and dtype of each parameter, the totals of its groups, and the statistics that there are.

    With a `robot`, raises DataError where no statistics have as many numbers as it.
    """
    if robot is not None and robot not in PI0_ROBOTS:
        raise ConfigError(f"unknown robot {robot!r}. Valid: {', '.join(PI0_ROBOTS)}", parameter="robot")
    from serl_chunk.models.pi0.tree import GROUPS, group_of
    from serl_chunk.runs.openpi_checkpoints import Checkpoint

    checkpoint = Checkpoint(folder)
    counts: dict[str, int] = dict.fromkeys([*GROUPS, "unknown"], 0)
    for path, stored in sorted(checkpoint.stored.items()):
        print(f"{path}  {'x'.join(map(str, stored.shape))}  {stored.dtype}")
        try:
            group: str = group_of(path)
        except StopIteration:
            group = "unknown"
        counts[group] += int(np.prod(stored.shape))
    shown = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    print(f"{len(checkpoint.stored)} arrays, {sum(counts.values()):,} parameters: {shown}")
    found = {}
    for name, stats in checkpoint.norm_stats().items():
        found[name] = {vector: len(values["mean"]) for vector, values in stats.items()}
        print(f"statistics {name}: {', '.join(f'{vector} {size}' for vector, size in found[name].items())}")
    if robot is not None:
        _check_fits(robot, found)
    return 0


def _check_fits(name: str, found: Mapping[str, Mapping[str, int]]) -> None:
    """Print which statistics have a robot's numbers, zeros behind them allowed. Raises DataError where none has."""
    robot = PI0_ROBOTS[name]
    wanted = {"state": robot.state_dim, "actions": robot.action_dim}
    fitting = [each for each, sizes in found.items() if all(sizes.get(v, 0) >= size for v, size in wanted.items())]
    if not fitting:
        raise DataError(
            f"no statistics for {name}, whose state has {robot.state_dim} numbers and whose actions have "
            f"{robot.action_dim}. Write them from demonstrations with serl-chunk data stats"
        )
    print(f"for {name}: {', '.join(fitting)}")


def run_import(flags: argparse.Namespace, rest: Sequence[str]) -> int:
    """Write the parameters of a checkpoint, one at a time, into an .npz."""
    import jax

    from serl_chunk.models.pi0 import weights
    from serl_chunk.runs.openpi_checkpoints import Checkpoint

    model = _model(flags, rest)
    checkpoint, out = Checkpoint(flags.folder), Path(flags.file)
    if out.suffix != ".npz":
        raise ConfigError(f"must end in .npz, got {out}", parameter="TO")
    with _whole(out) as temporary, weights.Writer(temporary) as writer:

        def keep(leaf: Leaf, array: np.ndarray) -> None:  # one at a time is in memory
            writer.add(leaf.path, array)

        checkpoint.load(model, jax.random.key(flags.init_seed), keep)
    print(f"{out}: {out.stat().st_size / 1e6:,.1f} MB. Use it with --config.agent.pi0.weights={out}")
    return 0


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """Give a file beside `file`, which takes its place once it is complete."""
    temporary = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, file)
    except OSError as error:
        raise DataError(f"{file}: cannot be written: {os_reason(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def run_export(flags: argparse.Namespace, rest: Sequence[str]) -> int:
    """Write the parameters of a run's checkpoint, those of the base included, as openpi's."""
    from serl_chunk.agents.registry import make_agent
    from serl_chunk.data.normalise.chunk_statistics import read_norm_stats
    from serl_chunk.data.preprocess import fit_preprocess
    from serl_chunk.runs.checkpoints import CheckpointStore
    from serl_chunk.runs.evaluations import wanted_policy
    from serl_chunk.runs.folder import read_config
    from serl_chunk.runs.openpi_checkpoints import export

    config, run = load_flags(flags, rest), Path(flags.run_folder)
    model = _of(config)
    if not run.is_dir():
        raise DataError(f"{run}: there is no such folder. Give the folder of a run")
    read_config(run)  # checks its format
    stored = wanted_policy(run, CheckpointStore(run), flags.step)
    spec = spec_of(config)
    agent = make_agent(config, spec)
    agent.check_base(stored.meta["base_digest"])
    params: Any = agent.load_params(stored.params)
    base = params.get("base", {}).get("pi0", {})
    stats, file = None, Path(config.normaliser.norm_stats)
    if config.normaliser.actions == "openpi":
        if fit_preprocess(config, spec, []).digest() != stored.meta["normaliser_digest"]:
            raise ConfigError(
                f"{file} has other statistics than step {stored.step} was trained with. Give the run's",
                parameter="normaliser.norm_stats",
            )
        vectors, _ = read_norm_stats(file)
        asset = flags.asset_id or file.absolute().parent.name
        stats = {asset: {name: _plain(vector) for name, vector in vectors.items()}}
    export(flags.folder, model, params["policy"]["pi0"], base, stats)
    print(f"{flags.folder}: step {stored.step} of {run}, statistics {', '.join(stats or ['none'])}")
    if stats is None:
        print(f"normaliser.actions={config.normaliser.actions} is none of openpi's transforms: it would act otherwise")
    return 0


def _plain(vector: Any) -> dict[str, Any]:
    return {name: None if value is None else value.tolist() for name, value in vector._asdict().items()}


def _model(flags: argparse.Namespace, rest: Sequence[str]) -> Pi0Config:
    if flags.model is None:
        return _of(load_flags(flags, rest))
    if flags.model not in PI0_PRESETS:
        raise ConfigError(f"unknown model {flags.model!r}. Valid: {', '.join(PI0_PRESETS)}", parameter="model")
    return PI0_PRESETS[flags.model]


def _of(config: ExperimentConfig) -> Pi0Config:
    if not isinstance(config.agent, BcConfig) or config.agent.policy != "pi0":
        raise ConfigError("is no pi0 in this experiment. Use one with agent.policy=pi0", parameter="agent.policy")
    return config.agent.pi0
