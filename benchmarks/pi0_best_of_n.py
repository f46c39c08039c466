"""What N candidates of one decision cost a pi0 that reads its observation once, compared with N independent samples.

    python benchmarks/pi0_best_of_n.py [--width 4] [--depth 3] [--rounds 3] [--full] [--json FILE]
    taskset -c 0 python benchmarks/pi0_best_of_n.py --critic [--rounds 3] [--json FILE]

The model has the released one's shapes with all widths divided by `--width` and all depths by `--depth`: three cameras
of 256 tokens, 48 slots of text, chunks of 50 actions, ten steps, float32. *shared* is one call: the prefix, then N
chunks behind it. *independent* is N calls with one chunk each, of which at most two are made and counted for all. Both
take turns; figures are medians of the rounds.

- FLOPs of a compiled program, with its loops unrolled, by XLA's count, against a model that counts matrix products
  alone (2 for each multiplication and addition): at most 1.1. XLA counts all arithmetic, and leaves out what nothing
  reads of the last layer, a larger part of a model with fewer layers.
- Time of independent samples over that of shared ones, against the same ratio of the model's FLOPs: within 1.3. On a
  CPU it is processor time, which a machine's other work disturbs little. Where one decision takes less than 0.5 s,
  calls cost more than products, and it shows nothing.
- `--full`: the FLOPs of the released sizes, of the program before it is compiled, within 1.1. Nothing is computed.

Exit status 0 only if both hold for every N.

`--critic` measures `fake_aloha_pi0_rl` with `agent.pi0.trainable=expert` and random numbers in its place. By processor
time, which is that of one thread on one core: an update of the critic alone (64 windows, kept features, four heads),
and with that of pi0 (32 windows); decisions of 16 samples of which the critic chooses, and of 16 samples alone, in
turns. For each rule also the bytes of a snapshot and a checkpoint of `pi0_fold_box`, the released sizes, of which no
array is made. Exit status 0 only if the critic's update takes at most 40 ms and the choice at most 15 % of the samples.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.cli_args import make_parser, write_figures

from serl_chunk.agents.registry import make_agent
from serl_chunk.config.agents.pi0 import PI0_PRESETS, ExpertConfig, Pi0Config, SiglipConfig, VlmConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.data.prompts import make_prompts
from serl_chunk.learner.memory import batch_shapes
from serl_chunk.models.pi0.pi0 import Pi0
from serl_chunk.models.pi0.tree import initial, shapes
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import DataError

CANDIDATES = (1, 8, 32)
CALLS = 2  # of independent samples, made and timed
PROMPT, HORIZON, STEPS = 48, 50, 10
WIDTHS, DEPTHS = (1, 2, 4, 8), (1, 3, 9)  # common divisors of the released sizes
FLOPS_BAR, TIME_BAR, LEAST_SECONDS = 1.1, 1.3, 0.5
UPDATE_BAR, CHOICE_BAR = 40.0, 1.15  # milliseconds; times as long as samples alone
CALLS_OF_ROUND = 20
# Of the released sizes: name -> what differs from the experiment.
RULES: dict[str, dict[str, str]] = {
    "none": {"agent.pi0.trainable": "none"},
    "imitation": {},
    "distil": {"agent.improve_by": "distil"},
    "q_gradient": {"agent.improve_by": "q_gradient"},
    "edit": {"agent.pi0.trainable": "none", "agent.improve_by": "edit", "agent.edit_scale": "0.05"},
    "rlt": {"agent.pi0.trainable": "none", "agent.improve_by": "rlt", "agent.edit_scale": "0.05"},
    "dsrl": {"agent.pi0.trainable": "none", "agent.improve_by": "dsrl"},
}


def divided(width: int, depth: int) -> Pi0Config:
    """Return the released model with widths and depths divided."""
    full = PI0_PRESETS["pi0"]
    if width not in WIDTHS or depth not in DEPTHS:
        raise DataError(f"--width {width}, --depth {depth}: expected a width of {WIDTHS} and a depth of {DEPTHS}")
    s = full.siglip
    return dataclasses.replace(
        full,
        vocabulary=512,
        depth=full.depth // depth,
        head_dim=full.head_dim // width,
        siglip=SiglipConfig(s.width // width, s.depth // depth, s.mlp // width, s.heads, s.patch),
        vlm=VlmConfig(full.vlm.width // width, full.vlm.mlp // width),
        expert=ExpertConfig(full.expert.width // width, full.expert.mlp // width),
        dtype="float32",
    )


def prefix_flops(c: Pi0Config) -> float:
    """FLOPs of the matrix products that read an observation."""
    s, images, patches = c.siglip, len(c.cameras), c.camera_tokens
    layer = 4 * s.width**2 + 2 * s.width * s.mlp
    tower = s.depth * (2 * layer * patches + 4 * patches**2 * s.width)
    tower += 2 * patches * s.width * (3 * s.patch**2 + c.vlm.width)
    tokens = images * patches + PROMPT
    return images * tower + c.depth * (2 * tokens * _layer(c, c.vlm) + 4 * tokens**2 * c.heads * c.head_dim)


def step_flops(c: Pi0Config) -> float:
    """FLOPs of the matrix products of one step of one chunk."""
    before, own, w = len(c.cameras) * c.camera_tokens + PROMPT, HORIZON + 1, c.expert.width
    stack = c.depth * (2 * own * _layer(c, c.expert) + 4 * own * (before + own) * c.heads * c.head_dim)
    return stack + 2 * (HORIZON * (2 * c.action_dim * w + 3 * w**2) + c.action_dim * w)


def _layer(c: Pi0Config, e: Any) -> int:
    """Numbers of the matrices of one layer."""
    return 2 * (c.heads + c.kv_heads) * e.width * c.head_dim + 3 * e.width * e.mlp


def shared_flops(c: Pi0Config, n: int) -> float:
    """FLOPs of N candidates behind one prefix."""
    return prefix_flops(c) + n * STEPS * step_flops(c)


def decide(model: Pi0) -> Callable[..., jax.Array]:
    """Return a function (params, observation, noise [1, N, H, D]) -> chunks."""

    def decided(params: Any, observation: Any, noise: jax.Array) -> jax.Array:
        return model.sample(params, model.encode(params, observation), noise, None, STEPS)

    return decided


def inputs(c: Pi0Config, n: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    images = {f"images/{k}": rng.uniform(-1, 1, (1, *c.image_size, 3)).astype(np.float32) for k in c.cameras}
    text = {"prompt": np.ones((1, PROMPT), np.int32), "prompt_mask": np.ones((1, PROMPT), bool)}
    noise = rng.standard_normal((1, n, HORIZON, c.action_dim), np.float32)
    return {"state": np.zeros((1, c.action_dim), np.float32), **images, **text}, noise


def counted(lowered: Any) -> float:
    """FLOPs by XLA's count; 0 where the platform has none."""
    found = lowered.cost_analysis()
    found = found[0] if isinstance(found, list) else found
    return float((found or {}).get("flops", 0.0))


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Time of a call until the device is done, by the clock and as it is compared."""
    began = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    return wall, cpu if jax.default_backend() == "cpu" else wall


def measure(config: Pi0Config, rounds: int) -> dict[str, dict[str, float]]:
    params = jax.jit(lambda key: initial(config, key))(jax.random.key(0))
    run, whole = jax.jit(decide(Pi0(config))), jax.jit(decide(Pi0(config, unroll=True)))
    figures = {}
    for n in CANDIDATES:
        observation, noise = jax.device_put(inputs(config, n))
        programs = (whole.lower(params, observation, noise).compile(), run.lower(params, observation, noise).compile())
        one = run.lower(params, observation, noise[:, :1]).compile()
        made = range(min(n, CALLS))
        calls: dict[str, Callable[[], Any]] = {
            "shared": lambda p=programs[1], o=observation, z=noise: p(params, o, z),
            "independent": lambda p=one, o=observation, z=noise, k=made: [p(params, o, z[:, i : i + 1]) for i in k],
        }
        together, apart = (jax.block_until_ready(call()) for call in calls.values())
        difference = float(jnp.abs(together[:, : len(made)] - jnp.concatenate(apart, axis=1)).max())
        shared, independent = [], []
        for _ in range(rounds):
            shared.append(seconds(calls["shared"]))
            independent.append(tuple(n / len(made) * x for x in seconds(calls["independent"])))
        figures[str(n)] = {
            "shared_s": statistics.median(wall for wall, _ in shared),
            "independent_s": statistics.median(wall for wall, _ in independent),
            "shared_compared_s": statistics.median(x for _, x in shared),
            "time_ratio": statistics.median(b / a for (_, a), (_, b) in zip(shared, independent, strict=True)),
            "model_ratio": n * shared_flops(config, 1) / shared_flops(config, n),
            "model_flops": shared_flops(config, n),
            "compiled_flops": counted(programs[0]),
            "ms_per_chunk": 1e3 * statistics.median(wall for wall, _ in shared) / n,
            "difference": difference,
        }
    return figures


def count_full() -> dict[str, dict[str, float]]:
    """Return the FLOPs of the released sizes by N, of programs that are not compiled."""
    config = PI0_PRESETS["pi0"]
    figures = {}
    for n in CANDIDATES:
        lowered = jax.jit(decide(Pi0(config, unroll=True))).lower(shapes(config), *inputs(config, n))
        figures[str(n)] = {"model_flops": shared_flops(config, n), "lowered_flops": counted(lowered)}
    return figures


def cost_of_critic(rounds: int) -> dict[str, float]:
    """Return the medians of processor milliseconds of updates and decisions with a critic."""
    config = configured(load_experiment("fake_aloha_pi0_rl"), [("agent.pi0.trainable", "expert")])
    config = configured(config, [("agent.edit_scale", "0")])
    agent: Any = make_agent(config, robot_spec(config.robot))
    key = jax.random.key(0)
    base, state = agent.new_base(key), agent.new_state(key)

    prompts = make_prompts(config)
    assert prompts is not None
    text = dict(zip(("prompt", "prompt_mask"), prompts(config.robot.task), strict=True))

    def ones(name: str) -> Any:
        wanted = agent.wants()[name]
        shapes = batch_shapes(config, agent, wanted.size or config.learner.batch_size, wanted)
        batch = jax.tree.map(lambda x: np.ones((1, *x.shape), x.dtype), shapes)
        seen = {k: np.broadcast_to(text[k], (*x.shape[:2], *text[k].shape)) if k in text else x
                for k, x in batch.observations.items()}  # fmt: skip
        return batch._replace(observations=seen)

    def sampled(params: Any, observation: Any, key: jax.Array) -> jax.Array:
        policy, noise = params["policy"], agent.acting_noise(key, observation, explore=True)
        context = agent.shown(policy, params["critic"], params["base"], observation)
        return agent.samples(policy, params["base"], context, noise)

    batches = jax.device_put({name: ones(name) for name in agent.wants()})
    observation = jax.tree.map(lambda x: x[0, 0], ones("policy").observations)
    states = {"critic": state, "update": agent.copied(state)}
    updates = {"critic": (agent.update_critic, batches["critic"]), "update": (agent.update, batches)}

    def update(name: str) -> Any:
        program, given = updates[name]
        states[name], metrics = program(states[name], base, given)
        return metrics

    params = agent.copied(agent.published(states["update"], base)) | {"base": base}
    alone = jax.jit(sampled)
    calls: dict[str, Callable[[], Any]] = {
        "critic": lambda: update("critic"),
        "update": lambda: update("update"),
        "samples": lambda: alone(params, observation, key),
        "best": lambda: agent.sample(params, observation, key, explore=True),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(1 + rounds):
        for name, call in calls.items():
            found = [seconds(call)[1] for _ in range(CALLS_OF_ROUND if number else 1)]  # the first one compiles
            times[name] += [1e3 * statistics.median(found)] if number else []
    choice = [best / samples for best, samples in zip(times["best"], times["samples"], strict=True)]
    return {f"{name}_ms": statistics.median(of) for name, of in times.items()} | {"choice": statistics.median(choice)}


def bytes_of_rules() -> dict[str, dict[str, float]]:
    """Return the megabytes of a snapshot and a checkpoint of each rule at the released sizes."""
    figures = {}
    for name, changes in RULES.items():
        language = {"agent.language.tokenizer": "bytes", "agent.language.model": ""}  # no file of pieces is needed
        config = configured(load_experiment("pi0_fold_box"), list((language | changes).items()))
        agent: Any = make_agent(config, robot_spec(config.robot))
        state, base = jax.eval_shape(lambda key, a=agent: (a.init(key), a.with_base.random(key)), jax.random.key(0))
        sent = jax.tree.leaves(jax.eval_shape(agent.published, state, base))  # as bfloat16
        figures[name] = {
            "snapshot_mb": sum(x.size * min(2, x.dtype.itemsize) for x in sent) / 1e6,
            "checkpoint_mb": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.replace(rng=()))) / 1e6,
        }
    return figures


def report_critic(figures: dict[str, float], sizes: dict[str, dict[str, float]]) -> bool:
    """Print both tables; whether both bars hold."""
    for name in ("critic", "update", "samples", "best"):
        print(f"{name:10} {figures[f'{name}_ms']:8.1f} ms of processor time")
    print(f"best of 16 over 16 samples: {figures['choice']:.3f}")
    for name, f in sizes.items():
        print(f"{name:10} {f['snapshot_mb']:10,.1f} MB a snapshot {f['checkpoint_mb']:10,.1f} MB a checkpoint")
    return figures["critic_ms"] <= UPDATE_BAR and figures["choice"] <= CHOICE_BAR


def report(figures: dict[str, dict[str, float]]) -> bool:
    """Print the table; whether both bars hold."""
    good = True
    print(
        f"{'N':>3} {'shared s':>9} {'ms a chunk':>11} {'independent s':>14} {'ratio':>6} {'by FLOPs':>9} "
        f"{'GFLOP':>8} {'of model':>9}  verdict"
    )
    for n, f in figures.items():
        times, flops = f["time_ratio"] / f["model_ratio"], f["compiled_flops"] / f["model_flops"]
        wrong = [f"time {times:.2f} of the model's"] if not 1 / TIME_BAR <= times <= TIME_BAR else []
        wrong += [f"FLOPs {flops:.2f} of the model's"] if not 0 < flops <= FLOPS_BAR else []
        wrong += [f"chunks differ by {f['difference']:.1e}"] if f["difference"] > 1e-3 else []
        good = good and not wrong
        row = (
            f"{n:>3} {f['shared_s']:9.3f} {f['ms_per_chunk']:11.1f} {f['independent_s']:14.3f} {f['time_ratio']:6.2f} "
        )
        row += f"{f['model_ratio']:9.2f} {f['compiled_flops'] / 1e9:8.1f} {flops:9.3f}  "
        print(row + (", ".join(wrong) or "ok"))
    if figures["1"]["shared_compared_s"] < LEAST_SECONDS:
        print(f"one decision takes less than {LEAST_SECONDS} s: the times say little. Choose a smaller --width.")
    return good


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--width", type=int, default=4, help="divides all widths")
    parser.add_argument("--depth", type=int, default=3, help="divides all depths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="also count the FLOPs of the released sizes")
    parser.add_argument("--critic", action="store_true", help="measure what a critic adds instead")
    args = parser.parse_args()
    if args.critic:
        critic, sizes = cost_of_critic(args.rounds), bytes_of_rules()
        write_figures(args, {"critic": critic, "rules": sizes})
        return 0 if report_critic(critic, sizes) else 1
    config = divided(args.width, args.depth)
    figures = measure(config, args.rounds)
    good, out = report(figures), {"divided": figures}
    if args.full:
        out["full"] = count_full()
        for n, f in out["full"].items():
            ratio = f["lowered_flops"] / f["model_flops"]
            good = good and 1 / FLOPS_BAR <= ratio <= FLOPS_BAR
            print(f"released sizes, N = {n}: {f['lowered_flops'] / 1e12:.2f} TFLOP, {ratio:.3f} of the model's")
    write_figures(args, out)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DataError as error:
        sys.exit(str(error))
