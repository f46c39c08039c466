"""Updates per second of the training loop, and the share of time it spends outside the compiled update.

Four critic updates a call (UTD 4), batch 256, chunks of 5, ten critics of 2x256 (acrlpd), on random episodes of
14 joints and 30 state numbers. The bare rate is the compiled update on one batch that never changes; the loop
samples, normalises and moves every batch:

    python benchmarks/learner_throughput.py --json learner_throughput.json
"""

from __future__ import annotations

import statistics
import time

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
from serl_chunk.replay.replay import BatchLoader, Replay, Request
from serl_chunk.types import RobotSpec

STATE, ACTION, LENGTH, HORIZON, UTD, BATCH = 30, 14, 100, 5, 4, 256


def measure(name: str, config: ExperimentConfig, spec: RobotSpec, seconds: float) -> dict[str, float]:
    """Medians over one-second slices, loop and bare alternating in one run."""
    rng = np.random.default_rng(0)
    demos = [noise_episode(f"demo{k}", spec, LENGTH, rng) for k in range(50)]
    agent = make_agent(config, spec)
    replay = Replay(spec, config, fit_preprocess(config, spec, demos), bc_on=config.imitated)
    replay.add_demo(*demos)
    for k in range(50):
        for record in noise_episode(f"online{k}", spec, LENGTH, rng):
            replay.insert("s", record)
    loader = BatchLoader(replay, rng, put=jax.device_put, prefetch=2)
    state = agent.init(jax.random.key(0))
    asked = Request("critic", UTD, BATCH)
    fixed = loader.next(asked)
    state, _ = agent.update(state, {}, fixed)
    rates: dict[str, list[float]] = {"loop": [], "bare": []}
    for _ in range(max(1, round(seconds / 2))):
        for mode, values in rates.items():
            jax.block_until_ready(state)
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < 1.0:
                state, metrics = agent.update(state, {}, loader.next(asked) if mode == "loop" else fixed)
                jax.block_until_ready(metrics)
                count += UTD
            values.append(count / (time.perf_counter() - start))
    loader.close()
    loop, bare = statistics.median(rates["loop"]), statistics.median(rates["bare"])
    outside = max(0.0, 1 - loop / bare)
    print(
        f"{name}: {loop:.1f} updates/s in the loop, {bare:.1f} bare; {100 * outside:.1f} % of time outside the update"
    )
    return {f"{name}_updates_per_s": loop, f"{name}_bare_updates_per_s": bare, f"{name}_outside_share": outside}


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("--seconds", type=float, default=30.0, help="per agent")
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
