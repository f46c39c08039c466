"""What a pi0 of the released sizes costs on one device: an update, by what is trained, and decisions.

    python benchmarks/pi0_device.py [--cases lora,expert,full,decide] [--batch 32] [--rounds 20] [--quick] [--json FILE]

Parameters and frames are random, which costs the same. The robot is `fake_aloha_pi0`'s, with three cameras of 224 x 224
pixels, 48 slots of text and chunks of 50 actions. An update is the learner's: windows are drawn from a replay, brought
to the device, augmented and computed. *decide* is what an actor waits for, with parameters in bfloat16: one call that
reads an observation and makes N chunks of ten steps. Times are medians; memory is the device's peak, of a process of
its own for each case.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from pi0_best_of_n import CANDIDATES, HORIZON, PROMPT, decide, inputs, seconds
from support.cli_args import make_parser, write_figures
from support.worker import Worker
from vision import Contestant

from serl_chunk.config.agents.pi0 import PI0_PRESETS, Pi0Config
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, ReplayConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.models.pi0.pi0 import Pi0
from serl_chunk.models.pi0.tree import initial

DECIDE = "decide"
CASES = {
    "lora_expert": dataclasses.replace(PI0_PRESETS["pi0_lora_both"], trainable="lora_expert"),
    "lora": PI0_PRESETS["pi0_lora_both"],
    "expert": dataclasses.replace(PI0_PRESETS["pi0"], trainable="expert"),
    "full": PI0_PRESETS["pi0"],
    DECIDE: PI0_PRESETS["pi0"],
}
QUICK = {"depth": 2, "vocabulary": 512, "image_size": (28, 28), "heads": 2, "head_dim": 16}


def config_of(model: Pi0Config, batch: int) -> ExperimentConfig:
    config = load_experiment("fake_aloha_pi0")
    agent = dataclasses.replace(
        config.agent,
        pi0=model,
        encoder=dataclasses.replace(config.agent.encoder, frame_size=model.image_size),
        language=dataclasses.replace(config.agent.language, length=PROMPT),
        policy_ema=0.0,
    )
    rows = 1000
    return dataclasses.replace(
        config,
        agent=agent,
        robot=dataclasses.replace(config.robot, image_size=model.image_size[0]),
        chunk=ChunkConfig(horizon=HORIZON),
        replay=ReplayConfig(capacity=rows, demo_capacity=rows, human_capacity=1, image_capacity=rows),
        learner=dataclasses.replace(config.learner, batch_size=batch),
    )


def quick(model: Pi0Config) -> Pi0Config:
    """The same with sizes for a test."""
    small = {"width": 32, "mlp": 32}
    return dataclasses.replace(
        model,
        **QUICK,
        siglip=dataclasses.replace(model.siglip, **small, depth=2, heads=2),
        vlm=dataclasses.replace(model.vlm, **small),
        expert=dataclasses.replace(model.expert, **small),
    )


class Measurement:
    """Measures one case. A process of its own makes one."""

    def update(self, case: str, small: bool, batch: int, rounds: int) -> dict[str, float]:
        """Return times of `rounds` updates in milliseconds, and memory in GB."""
        config = config_of(quick(CASES[case]) if small else CASES[case], batch)
        began = time.perf_counter()
        contestant = Contestant(case, config)
        first = time.perf_counter() - began
        for _ in range(rounds):
            contestant.turn(0.0)  # one update
        times = contestant.summary()
        leaves = jax.tree.leaves(contestant.state.policy)
        return {
            "update_ms": times["update_ms"],
            "total_ms": times["total_ms"],
            "first_s": first,
            "trained_millions": sum(leaf.size for leaf in leaves) / 1e6,
            **_memory(),
        }

    def decide(self, small: bool, rounds: int) -> dict[str, Any]:
        """Return the milliseconds of a decision by its number of candidates, and memory in GB."""
        model = quick(CASES[DECIDE]) if small else CASES[DECIDE]

        def made(key: jax.Array) -> Any:
            return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), initial(model, key))

        params, run = jax.jit(made)(jax.random.key(0)), jax.jit(decide(Pi0(model)))
        times = {}
        for n in CANDIDATES:
            observation, noise = jax.device_put(inputs(model, n))
            jax.block_until_ready(run(params, observation, noise))
            walls = [seconds(lambda o=observation, z=noise: run(params, o, z))[0] for _ in range(rounds)]
            times[str(n)] = 1e3 * statistics.median(walls)
        return {"decide_ms": times, **_memory()}

    def device(self) -> dict[str, str]:
        return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def _memory() -> dict[str, float]:
    """The device's peak in GB; nothing where it does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return {"peak_gb": stats["peak_bytes_in_use"] / 1e9} if "peak_bytes_in_use" in stats else {}


def row(case: str, batch: int, figures: dict[str, Any]) -> str:
    memory = f"{figures['peak_gb']:.1f} GB" if "peak_gb" in figures else "memory unknown"
    if case == DECIDE:
        times = ", ".join(f"{ms:.1f} ms for {n}" for n, ms in figures["decide_ms"].items())
        return f"{case:12} {times}; {memory}"
    rate = 1e3 * batch / figures["total_ms"]
    return (
        f"{case:12} {figures['total_ms']:.1f} ms an update of {batch} ({figures['update_ms']:.1f} on the device), "
        f"{rate:.0f} samples/s; {figures['trained_millions']:.0f} million trained; {memory}; first after "
        f"{figures['first_s']:.0f} s"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", default="lora,expert,full,decide", help=f"of {', '.join(CASES)}")
    parser.add_argument("--batch", type=int, default=32, help="windows of an update, an even number")
    parser.add_argument("--rounds", type=int, default=20, help="updates and decisions that are timed")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it works")
    args = parser.parse_args()
    cases = args.cases.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        sys.exit(f"--cases: {unknown[0]!r} is none; valid: {', '.join(CASES)}")
    if args.batch < 2 or args.batch % 2 or args.rounds < 1:
        sys.exit(f"--batch={args.batch} --rounds={args.rounds}: expected an even batch and at least one round")
    out: dict[str, Any] = {"batch": args.batch, "rounds": args.rounds}
    for case in cases:
        worker = Worker("pi0_device", "Measurement")
        if case == DECIDE:
            out[case] = worker("decide", small=args.quick, rounds=args.rounds)
        else:
            out[case] = worker("update", case=case, small=args.quick, batch=args.batch, rounds=args.rounds)
        out |= worker("device")
        worker.kill()  # it holds the device's memory
        print(row(case, args.batch, out[case]), flush=True)
        write_figures(args, out)
    print(f"on {out['device']}, JAX {out['jax']}")


if __name__ == "__main__":
    main()
