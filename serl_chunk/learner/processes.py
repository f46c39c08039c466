"""One learner in several processes, each with devices of its own: what process 0 does with arrays, all others do too.

Process 0 alone has sockets for actors, replay, journal and metrics. A compiled call, an array that is placed and a
checkpoint that is written are *instructions*: it sends them, in the order of its training thread, and every process
carries them out. Arrays that lie on the devices of all have numbers, the same in each process; others travel with the
instruction. The channel is encrypted with a key of the run that JAX's coordinator hands out, and is as private as that.

A process that ends, or stands still, ends all: their collectives would wait for it for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import numpy as np
import zmq

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.config.overrides import difference, to_dict
from serl_chunk.runs.checkpoints import Flat, Saves, begin_write
from serl_chunk.types import ConfigError, SerlChunkError
from serl_chunk.version import version_info
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.curve import Pair

if TYPE_CHECKING:
    from serl_chunk.learner.devices import Devices

logger = logging.getLogger(__name__)

JOINING = 300  # seconds in which all processes must have come
SILENCE = 20.0  # seconds without a sign of life from a process that is then held to be gone
SIGN = 1.0  # seconds between two of them
_LIMITS = codec.Limits(1 << 40, 1 << 20, 1 << 26)  # the channel's ends are one program
_AHEAD = 4  # instructions that wait for one process; each may hold a batch
_BY_VALUE, _KEY = -1, -2  # in place of a number


@dataclasses.dataclass(frozen=True)
class Processes:
    """Which of a learner's processes this is, and where they meet."""

    coordinator: str  # HOST:PORT of process 0
    index: int
    count: int

    @classmethod
    def parse(cls, coordinator: str | None, process: str | None) -> Processes:
        """That of `--coordinator` and `--process`. Raises ConfigError."""
        pair = "Give both --coordinator HOST:PORT and --process I/N, or none of them"
        require(bool(coordinator), "coordinator", f"it is missing. {pair}")
        require(bool(process), "process", f"it is missing. {pair}")
        host, _, port = str(coordinator).rpartition(":")
        require(bool(host) and port.isdigit() and 0 < int(port) < 65536, "coordinator",
            f"must be HOST:PORT, an address of process 0 and a free port there, got {coordinator!r}")  # fmt: skip
        index, _, count = str(process).partition("/")
        right = index.isdigit() and count.isdigit() and int(count) >= 2 and int(index) < int(count)
        require(right, "process", f"must be I/N, with N >= 2 processes and I from 0 to N - 1, got {process!r}")
        return cls(str(coordinator), int(index), int(count))

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0]

    @property
    def name(self) -> str:
        return f"learner process {self.index}/{self.count}"

    def check(self, config: ExperimentConfig) -> None:
        """Raise ConfigError for what several processes cannot do."""
        name = "group.eval_every" if config.agent.iterates else "learner.eval_interval"
        require(not config.eval_interval, name,
            "a learner of several processes evaluates nothing itself. Set 0, and evaluate by an actor: serl-chunk "
            "--actor --eval_checkpoint_step latest --eval_n_trajs K")  # fmt: skip
        require(config.group.reference_on != "host" or not config.agent.iterates, "group.reference_on",
            "host memory has no array of several processes. Set device")  # fmt: skip

    def join(self) -> None:
        """Meet the other processes; before any other use of JAX. Raises ConfigError where they do not come."""
        logger.info(f"{self.name}: waits up to {JOINING} s for the others at {self.coordinator}")
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which ends a run in order
        try:
            jax.distributed.initialize(  # a cluster's manager would show each process one device
                self.coordinator, self.count, self.index, initialization_timeout=JOINING,
                cluster_detection_method="deactivate",
            )  # fmt: skip
        except Exception as error:  # of gRPC
            raise ConfigError(
                f"the {self.count} processes did not meet at {self.coordinator} ({str(error).splitlines()[0]}). Start "
                "all of them, each with its own I/N, at an address of process 0 that the others reach",
                parameter="coordinator",
            ) from error


# -- trees ---------------------------------------------------------------------------------------------------


def outline(tree: Any) -> Any:
    """Return the structure of a tree whose leaves are numbers, as plain values. Raises TypeError for another node."""
    names, parts, kind = list[str](), list[Any](), type(tree)
    if isinstance(tree, int):
        return tree
    if isinstance(tree, flax.struct.PyTreeNode):
        names = [field.name for field in dataclasses.fields(tree)]  # type: ignore[arg-type]
        parts = [getattr(tree, name) for name in names]
    elif isinstance(tree, dict):
        names, parts = list(tree), list(tree.values())
    elif isinstance(tree, (tuple, list)):
        names, parts = list(getattr(tree, "_fields", ())), list(tree)
    elif tree is not None:
        raise TypeError(f"a {kind.__name__} is no node of trees that travel between processes")
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}:{kind.__qualname__}"
    return [name, names, [outline(part) for part in parts]]


def outlined(found: Any) -> Any:
    """The inverse of `outline`. Raises TypeError for a class that is no node, or not known in this process."""
    if isinstance(found, int):
        return found
    name, names, parts = found[0], found[1], [outlined(part) for part in found[2]]
    match name:
        case "NoneType":
            return None
        case "dict":
            return dict(zip(names, parts, strict=True))
        case "list" | "tuple":
            return parts if name == "list" else tuple(parts)
    return _class_of(name)(**dict(zip(names, parts, strict=True)))


def _class_of(name: str) -> Any:
    """A class of this program, by name: nothing is imported for it."""
    module, _, path = name.partition(":")
    found = functools.reduce(lambda of, part: getattr(of, part, None), path.split("."), sys.modules.get(module))
    if not (isinstance(found, type) and issubclass(found, (flax.struct.PyTreeNode, tuple)) and found is not tuple):
        raise TypeError(f"{name} is no node of trees here. Start all processes with the same version and settings")
    return found


def _data(leaf: Any) -> tuple[np.ndarray, bool]:
    """Return the numbers of an array that lies here alone, and whether it is a random key."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise RuntimeError("an array of all processes that process 0 made alone")
    key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if key else leaf), key


# -- both sides ----------------------------------------------------------------------------------------------


class Together:
    """Runs the instructions of one process; `Devices`, on which arrays lie, gives it the programs, all in one order."""

    devices: Devices

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self._programs: list[tuple[str, Callable[..., Any]]] = []
        self._counted = itertools.count()
        self._over = threading.Event()

    def program(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Take a program that all processes run; return what runs it in all."""
        self._programs.append((name, function))
        return functools.partial(self.call, len(self._programs) - 1)

    def call(self, number: int, *args: Any) -> Any:
        raise NotImplementedError("process 0 alone starts programs")

    def leaf(self, array: Any) -> jax.Array:
        raise NotImplementedError("process 0 alone has arrays to place")

    def saves(self) -> Saves:
        raise NotImplementedError("process 0 alone writes checkpoints")

    def _run(self, number: int, args: Sequence[Any]) -> Any:
        result = self._programs[number][1](*args)
        if jax.default_backend() == "cpu":
            # Threads of two programs at once would wait for each other's collectives in different orders.
            jax.block_until_ready(result)
        return result

    def _numbered(self, result: Any) -> dict[int, Any]:
        return {number: leaf for leaf, number in zip(jax.tree.leaves(result), self._counted, strict=False)}

    def _value(self, value: np.ndarray, *, key: bool) -> Any:
        return self.devices.placed(value, key=True) if key else value


def _socket(kind: int, own: Pair, server: str = "") -> zmq.Socket[bytes]:
    """A socket of process 0, or of another one with the public key of process 0's, `server`."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.linger, socket.sndhwm, socket.rcvhwm = 0, _AHEAD, _AHEAD
    socket.setsockopt(zmq.IPV6, 1)
    socket.curve_publickey, socket.curve_secretkey = own.public.encode(), own.secret.encode()
    if server:
        socket.curve_serverkey = server.encode()
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # what a connection loses that breaks does not come again
    else:
        socket.curve_server = True
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def _contract(config: ExperimentConfig) -> dict[str, Any]:
    found = {"version": version_info().text, "jax": jax.__version__, **to_dict(config)}
    return json.loads(json.dumps(found))  # tuples become lists, as those of another process do


def _shared(values: Sequence[Any]) -> Any:
    """Return the `values` of process 0."""
    from jax.experimental.multihost_utils import broadcast_one_to_all  # slow to import, and few runs need it

    data = broadcast_one_to_all(np.frombuffer(json.dumps(values).encode().ljust(256), np.uint8))
    return json.loads(bytes(np.asarray(data)))


# -- process 0 -----------------------------------------------------------------------------------------------


class Leader(Together):
    """Process 0. For the training thread alone, but for the watch over the others.

    Args:
        end: ends this process at once with a status, where another is gone; must not return.
    """

    def __init__(self, processes: Processes, config: ExperimentConfig, end: Callable[[int], Any]) -> None:
        super().__init__(processes)
        self._end, self._numbers = end, dict[int, tuple[int, Any]]()
        self._freed: deque[int] = deque()
        self._kinds: dict[Any, int] = {}  # structure of arguments -> its number
        self._others = [str(i).encode() for i in range(1, processes.count)]
        self._stop_wanted: Callable[[], object] = lambda: None
        pair = Pair.new()
        self._down, signs = (_socket(zmq.ROUTER, pair) for _ in range(2))
        _shared([*(socket.bind_to_random_port("tcp://*") for socket in (self._down, signs)), pair.public])
        self._greet(_contract(config))
        self._watch = threading.Thread(target=self._watched, args=(signs,), name="learner-processes", daemon=True)
        self._watch.start()

    def _greet(self, own: Mapping[str, Any]) -> None:
        """Compare what each process was started with. Raises ConfigError, in all of them, where that differs."""
        wrong, deadline = "", time.monotonic() + JOINING
        for _ in self._others:
            require(self._down.poll(max(0, int(1e3 * (deadline - time.monotonic())))) > 0, "process",
                f"another process did not reach {self.processes.host} within {JOINING} s. Process 0 must be reachable "
                "by the others at any port")  # fmt: skip
            name, *frames = self._down.recv_multipart(copy=False)
            if differ := difference(own, codec.decode(frames, _LIMITS).header):
                wrong = (
                    f"process {bytes(name.buffer).decode()} was not started as process 0 was ({differ[0]}). Give all "
                    "the same version, experiment and settings"
                )
        self._send("greeting", {"wrong": wrong})
        require(not wrong, "process", wrong)

    def begin(self, run: Path, stop: threading.Event) -> None:
        """Let a signal at any process set `stop`, and all look for the folder of the run: one that lacks it ends all.

        Each writes its part of checkpoints into it.
        """
        self._stop_wanted = stop.set
        self._send("folder", {"path": str(run.absolute())})

    def call(self, number: int, *args: Any) -> Any:
        found, structure = jax.tree.flatten(args)
        coded, values = [], {}
        for i, leaf in enumerate(found):
            if (known := self._number(leaf)) is None:
                value, key = _data(leaf)
                known, values[str(i)] = _KEY if key else _BY_VALUE, value
                found[i] = self._value(value, key=key)
            coded.append(known)
        header: dict[str, Any] = {"name": self._programs[number][0], "number": number, "leaves": coded}
        if structure not in self._kinds:
            header["outline"] = outline(jax.tree.unflatten(structure, range(len(found))))
        kind = self._kinds.setdefault(structure, len(self._kinds))
        with self._by_all():
            self._send("call", header | {"kind": kind}, values)
            return self._noted(self._run(number, jax.tree.unflatten(structure, found)))

    def leaf(self, array: Any) -> jax.Array:
        """Place one array of a state or a base on the devices of all."""
        if self._number(array) is not None:
            return array
        value, key = _data(array)
        with self._by_all():
            self._send("leaf", {"key": key}, {"0": value})
            return self._noted(self.devices.placed(value, key=key))

    def saves(self) -> Saves:
        """How checkpoints of arrays of all processes are written. One that fails in a process ends all.

        The others would wait for its part.
        """
        return Saves(self.devices.copied, self.devices.checksums, self._begin_write)

    def _begin_write(self, path: Path, items: Mapping[str, Flat], info: Mapping[str, Any]) -> Callable[[], None]:
        header: dict[str, Any] = {"path": str(path), "info": json.dumps(info), "items": {}}
        values: dict[str, np.ndarray] = {}
        for item, flat in items.items():
            numbers = {name: self._number(leaf) for name, leaf in flat.items()}
            values |= {f"{item} {name}": _data(flat[name])[0] for name, number in numbers.items() if number is None}
            header["items"][item] = numbers
        with self._by_all():
            self._send("save", header, values)
            finish = begin_write(path, items, info)

        def finished() -> None:
            with self._by_all():
                finish()

        return finished

    def close(self) -> None:
        """Let the other processes end; after all instructions."""
        with contextlib.suppress(zmq.ZMQError):  # one is gone
            self._send("end", {})
        self._over.set()
        self._watch.join()
        self._down.close(linger=int(1e3 * SILENCE))  # they may be behind

    def _number(self, leaf: Any) -> int | None:
        number, of = self._numbers.get(id(leaf), (None, None))
        return number if of is not None and of() is leaf else None

    def _noted(self, result: Any) -> Any:
        for number, leaf in self._numbered(result).items():
            of = id(leaf)

            def forget(_: Any, of: int = of, number: int = number) -> None:
                if self._numbers.get(of, (None,))[0] == number:
                    del self._numbers[of]
                self._freed.append(number)

            self._numbers[of] = number, weakref.ref(leaf, forget)
        return result

    def _send(self, kind: str, header: Mapping[str, Any], values: Mapping[str, np.ndarray] | None = None) -> None:
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        frames = codec.encode(kind, {**header, "freed": freed}, values)
        for name in self._others:
            self._down.send_multipart([name, *frames], copy=False)  # waits while that process is far behind

    @contextlib.contextmanager
    def _by_all(self) -> Iterator[None]:
        """Around what all processes do. Where it fails or is interrupted here, they are out of step, and all end."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):  # it may be the first sign of a process that is gone: the watch names it
                self._over.wait(SILENCE + 2 * SIGN)
            self._give_up(f"{self.processes.name}: {error!r}")
            raise

    def _watched(self, signs: zmq.Socket[bytes]) -> None:
        heard = dict.fromkeys(self._others, time.monotonic())
        with signs:
            while not self._over.is_set():
                if signs.poll(int(1e3 * SIGN)):
                    name, text = signs.recv_multipart()
                    heard[name] = time.monotonic()
                    with contextlib.suppress(zmq.ZMQError):
                        signs.send_multipart([name, b""])
                    if text == b"stop":
                        self._stop_wanted()
                    elif text:
                        self._give_up(f"{self._named(name)}: {text.decode()}")
                for name, last in heard.items():
                    if time.monotonic() - last > SILENCE and not self._over.is_set():
                        self._give_up(f"{self._named(name)} has been silent for {SILENCE:g} s")

    def _named(self, name: bytes) -> str:
        return dataclasses.replace(self.processes, index=int(name)).name

    def _give_up(self, reason: str) -> None:
        logger.error(f"{reason}. All processes end: start them again with the same commands, and the run goes on")
        self._end(1)


# -- the others ----------------------------------------------------------------------------------------------


class Follower(Together):
    """A process other than 0, which carries out its instructions. `end`: as `Leader`'s, where process 0 is gone."""

    def __init__(self, processes: Processes, config: ExperimentConfig, end: Callable[[int], Any]) -> None:
        super().__init__(processes)
        self._end, self._arrays = end, dict[int, Any]()
        self._trees: list[Any] = []  # structures of arguments, by their numbers
        *ports, public = _shared([])
        self._up, self._signs = (_socket(zmq.DEALER, Pair.new(), public) for _ in range(2))
        for socket, port in zip((self._up, self._signs), ports, strict=True):
            socket.setsockopt(zmq.IDENTITY, str(processes.index).encode())
            socket.connect(f"tcp://{processes.host}:{port}")
        self._up.send_multipart(codec.encode("hello", _contract(config)), copy=False)
        require(self._up.poll(1000 * JOINING) > 0, "coordinator",
            f"process 0 at {processes.host} does not answer at port {ports[0]}. It must be reachable at any "
            "port")  # fmt: skip
        wrong = codec.decode(self._up.recv_multipart(copy=False), _LIMITS).header["wrong"]
        require(not wrong, "process", wrong)
        self.stop = threading.Event()  # a signal came
        self._reports = deque[bytes]()  # failures, for process 0
        self._watch = threading.Thread(target=self._watched, name="learner-processes", daemon=True)
        self._watch.start()

    def follow(self, prepare: Callable[[], object]) -> None:
        """Carry out instructions until process 0 ends the run; first `prepare`, which gives `Devices` its programs."""
        try:
            prepare()
            while self._instruction(self._received()):
                pass
        except BaseException as error:
            self._report(error)
            # It may be the first sign of an end of process 0, which the watch names.
            sign = isinstance(error, Exception) and not isinstance(error, SerlChunkError)
            self._over.wait(2 * SIGN + (SILENCE if sign else 0))
            raise
        finally:
            self._over.set()
        self._watch.join()

    def _received(self) -> codec.Message:
        """Return the next instruction. Raises what a program that runs here raises while none comes."""
        while not self._up.poll(int(1e3 * SIGN)):  # process 0 may wait for a result that a device failed to compute
            jax.block_until_ready([array for array in self._arrays.values() if not array.is_deleted()])
        return codec.decode(self._up.recv_multipart(copy=False), _LIMITS)

    def _report(self, error: BaseException) -> None:
        self._reports.append(repr(error)[:500].encode())

    def _instruction(self, message: codec.Message) -> bool:
        header, values = message.header, message.arrays
        for number in header["freed"]:
            self._arrays.pop(number, None)
        match message.kind:
            case "call":
                self._arrays |= self._numbered(self._called(header, values))
            case "leaf":
                self._arrays |= self._numbered(self.devices.placed(values["0"], key=header["key"]))
            case "save":
                items = {
                    item: {n: values[f"{item} {n}"] if i is None else self._arrays[i] for n, i in numbers.items()}
                    for item, numbers in header["items"].items()
                }
                finish = begin_write(Path(header["path"]), items, json.loads(header["info"]))
                threading.Thread(target=self._finish, args=(finish,), name="checkpoint").start()
            case "folder":
                require(Path(header["path"]).is_dir(), "checkpoint_path",
                    f"{header['path']} is not there on {os.uname().nodename}. Give one on a disk that all processes "
                    "share")  # fmt: skip
        return message.kind != "end"

    def _called(self, header: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> Any:
        number, kind = header["number"], header["kind"]
        if self._programs[number][0] != header["name"]:
            raise RuntimeError(f"program {number} is {self._programs[number][0]} here, {header['name']} at process 0")
        if kind == len(self._trees):
            self._trees.append(jax.tree.structure(outlined(header["outline"])))
        found = [
            self._arrays[of] if of >= 0 else self._value(values[str(i)], key=of == _KEY)
            for i, of in enumerate(header["leaves"])
        ]
        return self._run(number, jax.tree.unflatten(self._trees[kind], found))

    def _finish(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except Exception as error:  # of the disk
            self._report(error)

    def _watched(self) -> None:
        heard = time.monotonic()
        with self._signs as signs:
            while not self._over.is_set():
                text = self._reports[0] if self._reports else b"stop" if self.stop.is_set() else b""
                with contextlib.suppress(zmq.ZMQError):  # the next round tries again
                    signs.send(text, zmq.NOBLOCK)
                    if self._reports and text is self._reports[0]:
                        self._reports.popleft()
                if signs.poll(int(1e3 * SIGN)):
                    signs.recv()
                    heard = time.monotonic()
                    self._over.wait(SIGN)
                elif time.monotonic() - heard > SILENCE and not self._over.is_set():
                    leader = dataclasses.replace(self.processes, index=0).name
                    logger.error(f"{leader} has been silent for {SILENCE:g} s: this process ends")
                    self._end(1)
