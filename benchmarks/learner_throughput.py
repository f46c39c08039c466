"""Updates per second of the training loop, the share of time outside the compiled update, and the host's time.

Four critic updates a call (UTD 4), batch 256, chunks of 5, ten critics of 2x256 (acrlpd), on random episodes of
14 joints and 30 state numbers. The bare rate is the compiled update on one batch that never changes; the loop
samples, normalises and moves every batch, and waits for the call before the last, as a learner does; on the device
it draws the windows of eight calls, which gather them. Parts are
processor time of the training thread per update, of calls of one update, medians; each call begins when the one before
it is over. Pinned to one core:

    taskset -c 1 python benchmarks/learner_throughput.py --json learner_throughput.json
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from support.cli_args import make_parser, write_figures
from support.noise import noise_episode

from serl_chunk.agents.registry import make_agent
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.data.preprocess import fit_preprocess
from serl_chunk.learner.device_replay import CALLS, DeviceReplay
from serl_chunk.replay.replay import BatchLoader, Replay, Request
from serl_chunk.types import RobotSpec

STATE, ACTION, LENGTH, HORIZON, UTD, BATCH = 30, 14, 100, 5, 4, 256
ROUND = 16  # updates of each way in a turn
NUMBERS = itertools.count()


class Loop:
    """A replay, an agent, and the batches of its updates."""

    def __init__(self, config: ExperimentConfig, spec: RobotSpec) -> None:
        self.rng = np.random.default_rng(0)
        demos = [noise_episode(f"demo{k}", spec, LENGTH, self.rng) for k in range(50)]
        self.agent = make_agent(config, spec)
        self.preprocess = fit_preprocess(config, spec, demos)
        self.replay = Replay(spec, config, self.preprocess, bc_on=config.imitated)
        self.replay.add_demo(*demos)
        for k in range(50):
            for record in noise_episode(f"online{k}", spec, LENGTH, self.rng):
                self.replay.insert("s", record)
        self.state = self.agent.init(jax.random.key(0))

    def update(self, batches: Any) -> Any:
        self.state, metrics = self.agent.update(self.state, {}, batches)
        return metrics


class Clock:
    """Processor time of calls of `updates`, ms an update: of the calling thread by part, and of the process."""

    def __init__(self, updates: int = 1) -> None:
        self.updates = updates
        self._parts: dict[str, list[float]] = {}
        self._process: list[float] = []

    def lap(self, part: str, work: Callable[[], Any]) -> Any:
        start = time.thread_time()
        done = work()
        self._parts.setdefault(part, []).append(1e3 * (time.thread_time() - start) / self.updates)
        return done

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        start = time.process_time()
        yield
        self._process.append(1e3 * (time.process_time() - start) / self.updates)

    def medians(self) -> dict[str, float]:
        parts = {part: statistics.median(values) for part, values in self._parts.items()}
        return parts | {"host": sum(parts.values()), "process": statistics.median(self._process)}


def with_batches(loop: Loop, clock: Clock) -> None:
    """Do a call of one update on a batch that the host gathers."""
    with clock.call():
        batch = clock.lap("sample", lambda: loop.replay.sample(loop.rng, BATCH, 1))
        batches = clock.lap("put", lambda: jax.device_put({"critic": batch}))
        jax.block_until_ready(clock.lap("dispatch", lambda: loop.update(batches)))


class OnDevice:
    """Updates of a loop whose windows are gathered on the device, of several calls at once."""

    def __init__(self, loop: Loop, config: ExperimentConfig) -> None:
        self._loop, self._config = loop, config
        self._device = DeviceReplay(loop.replay, loop.agent, config, loop.preprocess, loop.rng, threaded=False)

    def update(self, calls: int, updates: int, clock: Clock) -> Any:
        """Do so many calls, each of so many updates, in one dispatch."""
        loop, requests = self._loop, [Request("critic", updates, BATCH)]
        program = self._device.program(calls, loop.state, {}, requests)
        assert program.calls == calls
        drawn = clock.lap("draw", lambda: self._device.draw(calls, requests, None))
        dispatch = lambda: self._device.update(loop.state, {}, drawn, program)  # noqa: E731
        loop.state, metrics = clock.lap("dispatch", dispatch)
        return metrics

    def __call__(self, clock: Clock) -> None:
        """Do as many calls of one update as the clock has, after the steps that allow them came in."""
        loop, owed = self._loop, clock.updates
        steps = round(owed / (self._config.learner.utd_ratio or 1))
        for record in noise_episode(f"new{next(NUMBERS)}", loop.replay.spec, steps, loop.rng):
            loop.replay.insert("s", record)
        with clock.call():
            jax.block_until_ready(self.update(owed, 1, clock))


def rates(loop: Loop, on_device: OnDevice, seconds: float) -> dict[str, float]:
    """Updates per second: medians over one-second slices, loop, bare and on the device alternating."""
    loader = BatchLoader(loop.replay, loop.rng, put=jax.device_put, prefetch=2)
    asked = Request("critic", UTD, BATCH)
    fixed = loader.next(asked)
    several = functools.partial(on_device.update, max(CALLS), UTD, Clock())
    modes: dict[str, tuple[Callable[[], Any], int]] = {
        "loop": (lambda: loop.update(loader.next(asked)), UTD),
        "bare": (lambda: loop.update(fixed), UTD),
        "on_device": (several, UTD * max(CALLS)),
    }
    for work, _ in modes.values():
        work()  # compiles
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(max(1, round(seconds / 2))):
        for mode, (work, updates) in modes.items():
            jax.block_until_ready(loop.state)
            start, count, last = time.perf_counter(), 0, None
            while time.perf_counter() - start < 1.0:
                metrics = work()
                jax.block_until_ready(last)
                last, count = metrics, count + updates
            jax.block_until_ready(loop.state)
            found[mode].append(count / (time.perf_counter() - start))
    loader.close()
    return {mode: statistics.median(values) for mode, values in found.items()}


def measure(name: str, config: ExperimentConfig, spec: RobotSpec, seconds: float) -> dict[str, float]:
    loop = Loop(config, spec)
    on_device = OnDevice(loop, config)
    found = rates(loop, on_device, seconds)
    outside = max(0.0, 1 - found["loop"] / found["bare"])
    print(
        f"{name}: {found['loop']:.1f} updates/s in the loop, {found['on_device']:.1f} on the device, "
        f"{found['bare']:.1f} bare; {100 * outside:.1f} % of the loop outside the update"
    )
    figures = {
        f"{name}_updates_per_s": found["loop"], f"{name}_bare_updates_per_s": found["bare"],
        f"{name}_on_device_updates_per_s": found["on_device"], f"{name}_outside_share": outside,
    }  # fmt: skip
    clocks = {"batches": Clock()} | {f"on_device_{owed}": Clock(owed) for owed in (1, *sorted(CALLS))}
    works: list[Callable[[Clock], None]] = [functools.partial(with_batches, loop), *[on_device] * (len(clocks) - 1)]
    for work, clock in zip(works, clocks.values(), strict=True):
        work(Clock(clock.updates))  # compiles
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for work, clock in zip(works, clocks.values(), strict=True):
            for _ in range(ROUND // clock.updates):
                work(clock)
    for way, clock in clocks.items():
        parts = clock.medians()
        print(f"  {way}: " + ", ".join(f"{part} {ms:.3f}" for part, ms in parts.items()) + " ms an update")
        figures |= {f"{name}_{way}_{part}_ms": ms for part, ms in parts.items()}
    return figures


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("--seconds", type=float, default=30.0, help="of the rates of each agent, and of its parts")
    args = p.parse_args()
    spec = RobotSpec(
        "random", 50.0, STATE, (-1.0,) * ACTION, (1.0,) * ACTION, tuple(range(ACTION)), (6, 13), (), LENGTH
    )
    figures: dict[str, float] = {}
    for name, agent in (("acrlpd", AcrlpdConfig()), ("acfql", AcfqlConfig())):
        config = ExperimentConfig("throughput", FakeAlohaConfig(), agent=agent, chunk=ChunkConfig(HORIZON))
        figures |= measure(name, config, spec, args.seconds)
    write_figures(args, figures)


if __name__ == "__main__":
    main()
