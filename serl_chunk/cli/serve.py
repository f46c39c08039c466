"""`serl-chunk serve`: a policy by openpi-client's protocol, of a run's checkpoint or following a learner."""

from __future__ import annotations

import argparse
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serl_chunk.actor.handover import HoldPolicy, with_kept
from serl_chunk.actor.policy import LocalPolicy, PolicyError, Prepared, Request, blank_request
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.keys import LearnerAddress
from serl_chunk.cli.process import add_experiment_flags, load_flags
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.io import Waiting
from serl_chunk.logs import add_log_flags, quiet_libraries
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.serving.endpoint import read_key, websockets
from serl_chunk.serving.observations import ObservationReader
from serl_chunk.serving.server import Answer, Policy, PolicyServer, batch_sizes
from serl_chunk.signals import exit_at_once_while, never, stop_on_signals
from serl_chunk.transport.wire.handshake import DEFAULT_PORT, check_port
from serl_chunk.types import ConfigError, DataError, RobotSpec, SerlChunkError
from serl_chunk.version import version_info
from serl_chunk_robot.wire.sockets import is_loopback

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 0.1  # between looks at the learner's newest snapshot
OTHER_BYTES = 1 << 20  # of a request, for all but frames
LARGEST_BATCH = 256


def serve_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.description = (
        "Serve a policy by openpi-client's protocol, for programs that send observations and execute the chunks that "
        "come back: that of a run's checkpoint, or a learner's newest. Several clients are decided together."
    )
    p.add_argument("--exp_name", help="the experiment that the policy was trained in")
    p.add_argument("--checkpoint_path", metavar="RUN", help="the run folder whose checkpoint is served")
    p.add_argument("--checkpoint_step", metavar="N", help="the checkpoint: a step, latest (default) or best")
    p.add_argument("--ip", help="follow the learner at this address instead, as an actor does")
    p.add_argument("--learner_port", type=int, help="port of the learner (default: 5588)")
    p.add_argument("--keys", metavar="DIR", help="folder of this machine's keys for that learner")
    p.add_argument("--actor_id", help="name of this server at the learner (default: as --actor)")
    p.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)")
    p.add_argument("--port", type=int, default=8000, metavar="N", help="port to listen on (default: %(default)s)")
    p.add_argument("--api_key", metavar="FILE", help="clients must send the key in this file; needed beyond loopback")
    p.add_argument("--insecure", action="store_true", help="no keys, of clients and for the learner")
    p.add_argument("--max_batch", type=int, default=8, metavar="N", help="clients decided at once (default: 8)")
    add_experiment_flags(p)
    add_log_flags(p)


def serve_command(flags: argparse.Namespace) -> int:
    """Serve until a signal; raises as `run_serve`."""
    quiet_libraries()
    return run_serve(load_flags(flags), ServeOptions.of(flags))


class ServeOptions(NamedTuple):
    """What is served, and where."""

    run: Path | None = None
    step: str = "latest"
    learner: LearnerAddress | None = None
    bind: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    key: str = ""  # that clients must send
    largest: int = 8  # batch

    @classmethod
    def of(cls, flags: argparse.Namespace) -> ServeOptions:
        """Read the flags of `serl-chunk serve`. Raises ConfigError."""
        run, ip = flags.checkpoint_path, flags.ip
        require(bool(run or ip), "checkpoint_path", "give it, or --ip of a learner: one of them names the policy")
        require(not (run and ip), "ip", "names a policy, and so does --checkpoint_path. Remove one of them")
        for name in ("learner_port", "keys", "actor_id"):
            require(bool(ip) or not getattr(flags, name), name, "is of the learner that --ip names. Remove it")
        require(bool(run) or not flags.checkpoint_step, "checkpoint_step", "is of --checkpoint_path. Remove it")
        require(
            1 <= flags.max_batch <= LARGEST_BATCH, "max_batch", f"must be 1 to {LARGEST_BATCH}, got {flags.max_batch}"
        )
        require(0 <= flags.port < 2**16, "port", f"must be 0 to 65535, got {flags.port}")
        require(not (flags.insecure and flags.api_key), "insecure", "means no keys. Remove it, or --api_key")
        require(is_loopback(flags.bind) or bool(flags.api_key) or flags.insecure, "bind",
                f"{flags.bind} is open to other machines, which could read the policy. Give --api_key FILE, or "
                "--insecure where the network is trusted")  # fmt: skip
        address = None
        if ip:
            learner_port = DEFAULT_PORT if flags.learner_port is None else flags.learner_port
            check_port(learner_port)
            address = LearnerAddress(ip, learner_port, flags.actor_id, flags.keys, flags.insecure and not flags.keys)
        key = read_key(flags.api_key, "api_key") if flags.api_key else ""
        path = Path(run).expanduser() if run else None
        return cls(path, flags.checkpoint_step or "latest", address, flags.bind, flags.port, key, flags.max_batch)


def run_serve(
    config: ExperimentConfig, options: ServeOptions, *, stop: threading.Event | None = None,
    started: Callable[[PolicyServer[Any]], object] = lambda server: None,
) -> int:  # fmt: skip
    """Serve until a signal, or `stop`. Everything is compiled before the server listens.

    `started` is called once it does. Raises ConfigError where the policy cannot be served, and SerlChunkError where the
    learner is replaced by one of another run.
    """
    require(not config.actor.policy, "actor.policy", "a server serves a policy of this experiment. Remove it")
    websockets()  # a missing library is no reason to wait for a learner first
    spec = spec_of(config)
    ended = stop or threading.Event()
    if stop is None:
        exit_at_once_while(never)
        stop_on_signals(ended, "closing the connections")
    with contextlib.ExitStack() as stack:
        policy, follow = (_of_run if options.learner is None else _of_learner)(config, spec, options, stack, ended)
        if ended.is_set():
            return 0
        served = ServedPolicy(config, spec, policy)
        sizes = batch_sizes(options.largest)
        logger.info(
            f"compiling the policy for {', '.join(map(str, sizes))} clients at once, which may take minutes; no client "
            "is served before"
        )
        seconds = served.compile(sizes)
        if options.run is not None:
            _check(config, spec, policy, options.run, options.largest)
        server = PolicyServer(
            served.policy(), host=options.bind, port=options.port, max_bytes=served.max_bytes, largest=options.largest,
            key=options.key,
        )  # fmt: skip
        with server:
            logger.info(
                f"serving {config.name} (policy version {policy.version}) at ws://{options.bind}:{server.port}, "
                f"{'with' if options.key else 'without'} an API key; compiled in {seconds:.1f} s"
            )
            started(server)
            while not ended.wait(FOLLOW_SECONDS):
                follow()
        logger.info(f"batches by number of clients: {server.batch_counts or 'none'}")
    return 0


class ServedPolicy:
    """A policy between a server's messages and an agent."""

    def __init__(self, config: ExperimentConfig, spec: RobotSpec, policy: LocalPolicy) -> None:
        self._config, self._spec, self._chunks = config, spec, policy
        self._explore = config.learner.eval_mode != "mean"
        self._hold, self._kept = HoldPolicy(spec), spec.grippers if config.agent.gripper.kept else ()
        unmeasured = [g for g in self._kept if spec.joint_of_action[g] < 0]
        require(not unmeasured, "agent.gripper.fixed_value",
                f"none keeps grippers at their opening, and robot {spec.name!r} measures none of action dimensions "
                f"{unmeasured}: a server cannot return it. Set the opening")  # fmt: skip
        preprocess = policy.preprocess
        both = zip(preprocess.recorded, preprocess.cameras, strict=True)
        sizes = {c.name: ((c.height, c.width), (shown.height, shown.width)) for c, shown in both}
        needs = config.agent.language.reads and not config.robot.task  # several tasks
        self._reader = ObservationReader(spec, sizes, None if needs else config.robot.task)
        seen = max((h * w for each in sizes.values() for h, w in each), default=0)
        self.max_bytes = OTHER_BYTES + sum(3 * max(c.height * c.width, seen) for c in spec.cameras)
        """Of a request: with frames of all cameras of the robot."""

    def policy(self) -> Policy[Prepared]:
        return Policy(self.prepare, self.decide, self._metadata())

    def prepare(self, values: dict[str, Any]) -> Prepared:
        """Return a request's observation as the agent reads it. Raises SerlChunkError for a bad one."""
        observation, task = self._reader.read(values)
        return self._chunks.prepare(Request(observation, task=task))

    def decide(self, rows: Sequence[Prepared]) -> list[Answer | SerlChunkError]:
        began = time.perf_counter()
        decisions = self._chunks.decide_each(rows, explore=self._explore)
        seconds = time.perf_counter() - began
        answers: list[Answer | SerlChunkError] = []
        for row, decision in zip(rows, decisions, strict=True):
            if isinstance(decision, PolicyError):
                answers.append(decision)
                continue
            figures = {"policy_version": float(decision.version)}
            if "q" in decision.record:
                figures["q"] = float(decision.record["q"].max())
            # A client has no loop of ours that keeps these grippers, and the agent's numbers for them mean nothing.
            actions = with_kept(decision.actions, self._hold.initial(row.state), self._kept)
            answers.append(Answer(actions, seconds, figures))
        return answers

    def compile(self, sizes: Sequence[int]) -> float:
        """Compile batches of `sizes`; returns the seconds that it took."""
        began = time.perf_counter()
        task = max(self._config.robot.tasks, key=len)  # lengths of prompts follow the text
        row = self._chunks.prepare(blank_request(self._spec, self._chunks.image_keys, explore=self._explore, task=task))
        for size in sizes:
            self._chunks.decide_each([row] * size, explore=self._explore)
        return time.perf_counter() - began

    def _metadata(self) -> dict[str, Any]:
        spec, preprocess = self._spec, self._chunks.preprocess
        return {
            "server": version_info().text,
            "experiment": self._config.name,
            "robot": spec.name,
            "control_hz": float(spec.control_hz),
            "state_dim": spec.state_dim,
            "action_dim": spec.action_dim,
            "action_horizon": self._config.chunk.horizon,
            "execute_steps": self._config.chunk.executed,
            "images": {c.name: [c.height, c.width, 3] for c in preprocess.recorded},
            "reads_prompt": preprocess.prompts is not None,
        }


def _of_run(
    config: ExperimentConfig, spec: RobotSpec, options: ServeOptions, stack: contextlib.ExitStack, stop: threading.Event
) -> tuple[LocalPolicy, Callable[[], object]]:
    """Return the policy of a checkpoint, and what follows it: nothing."""
    from serl_chunk.cli.evaluation import checkpoints_of_run

    agent = make_agent(config, spec)
    assert options.run is not None
    [checkpoint] = checkpoints_of_run(config, spec, agent, options.run, [options.step])
    policy = LocalPolicy(agent, checkpoint.preprocess, spec, seed=config.seed + 1)
    policy.swap(checkpoint.snapshot)
    return policy, lambda: None


def _check(config: ExperimentConfig, spec: RobotSpec, policy: LocalPolicy, run: Path, batch: int) -> None:
    """Log what the policy makes of the run's demonstrations, where these are on this machine."""
    from serl_chunk.evaluation.open_loop import check_policy, demonstrations_of

    try:
        episodes = demonstrations_of(run, config)
        check_policy(policy, config, spec, episodes, checkpoint=policy.version, batch=batch).log()
    except (ConfigError, DataError) as error:
        logger.info(f"the policy is not checked against its demonstrations: {error}")


def _of_learner(
    config: ExperimentConfig, spec: RobotSpec, options: ServeOptions, stack: contextlib.ExitStack, stop: threading.Event
) -> tuple[LocalPolicy, Callable[[], object]]:
    """Return a learner's policy, and what follows its newest snapshot. A stop ends the wait for the first one."""
    from serl_chunk.actor.link import open_link, preprocess_of, replacement
    from serl_chunk.cli.actor import log_waiting

    agent, address = make_agent(config, spec), options.learner
    assert address is not None
    name, keys = address.credentials()
    # A second id: an actor of this machine may be running.
    link = open_link(config, spec, agent, address.ip, address.port, f"{name}-server", keys=keys)
    stack.callback(link.close)
    log_reason = log_waiting("--learner_port")

    def waiting(reason: str) -> None:
        log_reason(reason)
        if stop.is_set():
            raise KeyboardInterrupt

    welcome = link.connect(on_waiting=waiting)
    preprocess = preprocess_of(welcome, config, spec)
    policy = LocalPolicy(agent, preprocess, spec, seed=config.seed + 1, source=link, run=welcome.run)
    wait = Waiting(logger)

    def check() -> None:
        if link.error is not None:
            raise link.error
        if (reason := replacement(link, welcome.origin)) is not None:
            raise ConfigError(f"{reason}: its chunks would become other commands. Start this server again")

    def poll() -> None:
        wait.log("waiting for the learner's first policy", "see the learner's log: it may load or pretrain")
        check()

    def follow() -> None:
        before = policy.version
        policy.refresh()
        if policy.version != before:
            logger.info(f"policy version {policy.version} is served")
        check()

    wait.until(policy.refresh, stop.is_set, poll, stop.wait, FOLLOW_SECONDS)
    return policy, follow
