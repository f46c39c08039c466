"""The policy of an openpi server, `actor.policy=openpi://HOST:PORT`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from serl_chunk.actor.policy import AWAY_POLL_SECONDS, Decision, Policy, PolicyAwayError, PolicyError, Request
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.serving.client import PolicyClient, RefusedError, ServerAwayError
from serl_chunk.serving.endpoint import Address, client_key, websockets
from serl_chunk.serving.observations import ObservationWriter
from serl_chunk.types import ConfigError, RobotSpec
from serl_chunk_robot.wire.sockets import unknown_host


class RemotePolicy(Policy):
    """Decides by the replies of a policy server, whose actions are in the robot's units.

    Committed actions are not part of that protocol: they are kept, and the server plans as if it could change them.
    Whether it explores is the server's choice. `horizon`: actions of a chunk; what a reply has in addition is left out.
    """

    def __init__(self, client: PolicyClient, spec: RobotSpec, writer: ObservationWriter, horizon: int) -> None:
        super().__init__(spec)
        self._client, self._spec, self._writer = client, spec, writer
        self._horizon, self._version = horizon, -1
        self.image_keys = writer.cameras

    @property
    def version(self) -> int:
        """The server's `policy_version`; 0 where its replies have none, -1 before the first reply."""
        return self._version

    @property
    def waiting(self) -> str:
        return self._client.waiting

    def available(self) -> bool:
        """Return whether the server is connected. Raises PolicyError where it refuses this client."""
        with _raised_as_policy_error():
            return self._client.wait(0)

    refresh = available

    def interrupt(self) -> None:
        self._client.interrupt()

    def decide(self, request: Request) -> Decision:
        """Return the server's chunk. Raises PolicyAwayError while it is lost, PolicyError for a reply of no use."""
        values = self._writer.write(request.observation, request.task)
        with _raised_as_policy_error():
            reply = self._client.infer(values)
        actions = self._actions(reply.get("actions"))
        if request.prefix is not None:
            actions[: len(request.prefix)] = request.prefix
        version = reply.get("policy_version", 0)
        self._version = int(version) if isinstance(version, int | float) and 0 <= version < 2**31 else 0
        limited, clipped = self._limited(actions, self._version)
        record = {"actions": limited}
        if isinstance(q := reply.get("q"), int | float):
            record["q"] = np.asarray(q, np.float32)
        return Decision(limited, record, self._version, None, request.tick, request.epoch, clipped)

    def _decide_polling(self, request: Request, stop: Callable[[], str | None], poll: Callable[[], object]) -> Decision:
        """Decide on another thread: a reply may take minutes, in which keys must stop the robot."""
        decided: Future[Decision] = Future()
        threading.Thread(target=self._settle, args=(decided, request), name="policy request", daemon=True).start()
        try:
            while not wait([decided], AWAY_POLL_SECONDS).done:
                poll()
                if stop() is not None:
                    self.interrupt()  # again: the wait for the reply may begin just after it
        except BaseException:
            self.interrupt()
            raise
        return decided.result()

    def _settle(self, decided: Future[Decision], request: Request) -> None:
        try:
            decided.set_result(self.decide(request))
        except BaseException as error:  # raised by the thread that waits
            decided.set_exception(error)

    def _actions(self, value: object) -> np.ndarray:
        """Return a reply's actions, float32[H, A]. Raises PolicyError for those of another robot or length."""
        named, dim = self._client.address.named, self._spec.action_dim
        if not isinstance(value, np.ndarray) or value.ndim != 2 or value.dtype.kind not in "fiu":
            got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
            raise PolicyError(f"actions of the policy server at {named}: got {got}, expected float32[H, {dim}]")
        if value.shape[1] != dim:
            raise PolicyError(
                f"actions of the policy server at {named}: got {value.shape[1]} numbers an action, robot "
                f"{self._spec.name!r} has {dim}. Serve a policy of this robot"
            )
        if len(value) < self._horizon:
            raise PolicyError(f"actions of the policy server at {named}: {_too_short(len(value), self._horizon)}")
        return np.array(value[: self._horizon], np.float32)


def _too_short(got: int, expected: int) -> str:
    remedy = f"Set chunk.horizon={got}, and chunk.execute_steps to that or less"
    return f"got {got} of a chunk, expected {expected}. {remedy}"


def _check_metadata(metadata: Mapping[str, Any], named: str, spec: RobotSpec, horizon: int) -> None:
    """Raise RefusedError for a server of another robot, rate or shorter chunk. Servers of openpi name none of it."""
    valid = {"robot": spec.name, "action_dim": spec.action_dim, "state_dim": spec.state_dim,
             "control_hz": float(spec.control_hz)}  # fmt: skip
    for name, own in valid.items():
        got = metadata.get(name)
        if got is not None and not (isinstance(got, str | int | float) and got == own):
            raise RefusedError(
                f"the policy server at {named} is for another robot or rate: {name} is {got!r:.80}, robot "
                f"{spec.name!r} has {own!r}. Serve a policy of this robot"
            )
    got = metadata.get("action_horizon")
    if got is not None and not (isinstance(got, int | float) and got >= horizon):
        raise RefusedError(f"action_horizon of the policy server at {named}: {_too_short(got, horizon)}")


@contextlib.contextmanager
def _raised_as_policy_error() -> Iterator[None]:
    try:
        yield
    except ServerAwayError as error:
        raise PolicyAwayError(str(error)) from error
    except RefusedError as error:
        raise PolicyError(str(error)) from error


def sent_cameras(config: ExperimentConfig, spec: RobotSpec) -> tuple[str, ...]:
    """Return the cameras whose frames go to the server of `actor.policy`; none without. Raises as `remote_policy`."""
    if not config.actor.policy:
        return ()
    websockets()
    return _settings(config, spec)[1].cameras


def _settings(config: ExperimentConfig, spec: RobotSpec) -> tuple[Address, ObservationWriter, str]:
    """Return the server's address, what writes requests, and the API key. Raises ConfigError."""
    actor = config.actor
    writer = ObservationWriter(spec, actor.policy_observation, "actor.policy_observation")
    return Address.parse(actor.policy, "actor.policy"), writer, client_key(actor.policy_key, "actor.policy_key")


@contextlib.contextmanager
def remote_policy(
    config: ExperimentConfig, spec: RobotSpec, stop: Callable[[], object] = lambda: None
) -> Iterator[RemotePolicy]:
    """Yield the policy of `actor.policy`, connected or still connecting; its client is closed at the end.

    `stop`: polled while a reply is waited for; a true value ends the wait. Raises ConfigError for a bad address, key
    file or observation, and where the WebSocket library is missing.
    """
    address, writer, key = _settings(config, spec)
    if unknown := unknown_host(address.host):
        raise ConfigError(unknown, parameter="actor.policy")
    horizon = config.chunk.horizon
    client = PolicyClient(
        address,
        key=key,
        timeout=config.actor.policy_timeout,
        stop=lambda: bool(stop()),
        check=lambda metadata: _check_metadata(metadata, address.named, spec, horizon),
    )
    with contextlib.closing(client):
        yield RemotePolicy(client, spec, writer, horizon)
