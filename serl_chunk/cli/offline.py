"""`--online_steps 0`: training on demonstrations alone, by the same loop; no network and no actor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from serl_chunk.cli.demos import DemoOptions, check_data
from serl_chunk.cli.learner import LOG, STOPPING, build_learner, finish_run, log_final_checkpoint
from serl_chunk.cli.learner_status import status_fields
from serl_chunk.cli.logs import log_to_file, status_line
from serl_chunk.cli.process import print_config, spec_of
from serl_chunk.cli.signals import GRACE, before_exit, exit_at_once_while, never, stop_on_signals
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.learner.learner import Learner
from serl_chunk.runs.folder import open_run
from serl_chunk.types import Snapshot


def run_offline(
    config: ExperimentConfig,
    demo_paths: Sequence[str],
    checkpoint_path: str | None,
    *,
    wandb: bool,
    threaded: bool = True,
    demo_options: DemoOptions = DemoOptions(),  # noqa: B008 (immutable)
) -> int:
    """Train until `offline_steps` or a signal, then write the last checkpoint and the report.

    `threaded`: batches are prepared beside the training thread; without, a seed reproduces a run.
    """
    stop = threading.Event()
    return finish_run(
        train_offline(
            config,
            demo_paths,
            checkpoint_path,
            stop=stop,
            signals=True,
            wandb=wandb,
            threaded=threaded,
            demo_options=demo_options,
        )
    )


def train_offline(
    config: ExperimentConfig,
    demo_paths: Sequence[str],
    checkpoint_path: str | None,
    *,
    stop: threading.Event | None = None,
    signals: bool = False,
    wandb: bool = False,
    threaded: bool = False,
    demo_options: DemoOptions = DemoOptions(),  # noqa: B008 (immutable)
) -> Learner:
    """What `run_offline` does, for benchmarks and tests; returns the closed learner. Raises as `build_learner`."""
    stop = stop or threading.Event()
    spec = spec_of(config)
    print_config(config, spec)
    check_data(config, demo_paths, demo_options)
    with status_line() as status, contextlib.ExitStack() as stack:
        run = open_run(config, spec, checkpoint_path)
        stack.enter_context(run.locked())
        log_to_file(run.path / LOG)
        started = threading.Event()
        if signals:
            stop_on_signals(stop, STOPPING, started.is_set)
            before_exit(run.discard_fresh)
        learner = build_learner(
            config, demo_paths, run, spec,
            publish=_to_no_actor, threaded=threaded, wandb=wandb, tell=status.say, demo_options=demo_options,
            stopping=stop.is_set,
        )  # fmt: skip
        stack.callback(learner.metrics.close)
        stack.callback(learner.close)
        status.say(f"offline only, without a network; run folder {run.path}")
        started.set()
        if signals:
            exit_at_once_while(lambda: not learner.has_trained, GRACE)
        learner.run(stop, lambda: status.update(str(learner.phase), status_fields(config, learner)))
        exit_at_once_while(never)
        status.update(str(learner.phase), status_fields(config, learner))
        log_final_checkpoint(learner, status.say)
    return learner


def _to_no_actor(snapshot: Snapshot, info: dict[str, Any]) -> None:
    """There are no actors."""
