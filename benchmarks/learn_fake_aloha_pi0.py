"""A small pi0 and a convolutional policy clone the same demonstrations of the fake ALOHA task, from three cameras.

Both imitate 200 scripted demonstrations and see nothing else. The last checkpoint of each acts on 100 starts that no
other command uses, the others on validation starts. Resumable.

    python benchmarks/learn_fake_aloha_pi0.py --json fake_aloha_pi0.json
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from support import learning
from support.cli_args import Setting
from support.results import Run, write

from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.types import ConfigError

N_DEMOS = 200


def contestants(
    updates: dict[str, int], seed: int, changed: Sequence[Setting] = ()
) -> dict[str, tuple[ExperimentConfig, list[str]]]:
    """Return both experiments, of demonstrations alone, and what of each differs from the packaged one."""
    images = load_experiment("fake_aloha_images")
    of = images.agent
    conv = BcConfig(image_keys=of.image_keys, encoder=of.encoder, policy_updates=1)
    configs = {"conv": dataclasses.replace(images, agent=conv), "pi0": load_experiment("fake_aloha_pi0")}
    out = {}
    for name, config in configs.items():
        n = updates[name]
        changes = {
            "seed": seed, "learner.offline_steps": n, "learner.online_steps": 0, "learner.pretrain_steps": 0,
            "learner.eval_interval": 0, "learner.checkpoint_period": n // 4, "actor.intervention": "none",
        }  # fmt: skip
        if name == "pi0":
            changes["agent.pi0.lr_cosine"] = n
        overrides = [(path, str(value)) for path, value in changes.items()]
        overrides += changed if name == "pi0" else ()
        said = [] if name == "pi0" else ["agent=bc", "agent.policy_updates=1"]
        out[name] = apply_overrides(config, overrides), [*said, *map("=".join, overrides)]
    return out


def main() -> None:
    p = learning.parser(__doc__, "benchmark_fake_aloha_pi0", of="of pi0", seeds="42")
    p.add_argument("--pi0_updates", type=int, default=12_000, help="of pi0, in batches of 32")
    p.add_argument("--conv_updates", type=int, default=6_000, help="of the convolutional policy, in batches of 64")
    args = learning.arguments(p)
    runs = []
    for seed in args.seeds:
        try:
            configs = contestants({"pi0": args.pi0_updates, "conv": args.conv_updates}, seed, args.overrides)
        except ConfigError as error:
            p.error(str(error))
        demos = learning.record(configs["pi0"][0], N_DEMOS, args.out / "demos")
        for name, (config, said) in configs.items():
            trained = learning.train(config, args.out / f"{name}_{seed}", [demos])
            points = trained.curve(filter(None, trained.steps), args.episodes)
            runs.append(Run(name, seed, config.name, said, points))
    if args.json:
        write(args.json, runs)


if __name__ == "__main__":
    main()
