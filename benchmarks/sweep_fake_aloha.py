"""The sweep behind experiments/fake_aloha.py: one setting changed at a time, seed 42, resumable.

python benchmarks/sweep_fake_aloha.py --rows ensemble_2,no_average --json sweep.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from asked import chosen

BENCHMARK = Path(__file__).with_name("fake_aloha.py")

# row -> overrides of the experiment
ROWS: dict[str, tuple[str, ...]] = {
    "default": (),
    "ensemble_2": ("agent.critic.ensemble=2", "agent.critic.target_subset=2"),
    "no_average": ("agent.policy_ema=0", "agent.act_by=online"),
    "online_critic": ("agent.act_by=online",),
    "utd_0.5": ("learner.utd_ratio=0.5",),
    "full_noise": ("agent.flow.noise_low=1",),
    "imitate_all": ("agent.bc_on=all",),
    "squared": ("agent.critic.loss=squared",),
    "policy_target": ("agent.target=policy",),
    "expectile_0.9": ("agent.expectile=0.9",),
    "tail_policy": ("agent.critic.tail=policy",),
    "drop_terminal_windows": ("replay.terminal_windows=drop",),
    "absolute_actions": ("normaliser.actions=absolute_demo",),
    "candidates_8": ("agent.candidates=8",),
    "candidates_32": ("agent.candidates=32",),
}


def main() -> None:
    """Run the chosen rows through benchmarks/fake_aloha.py and print one line each."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", default="all", help=f"of: {', '.join(ROWS)}; or all")
    p.add_argument("--variant", default="rl_helper", help="of benchmarks/fake_aloha.py")
    p.add_argument("--seeds", default="42")
    p.add_argument("--max_steps", type=int, default=8_000)
    p.add_argument("--out", type=Path, default=Path("runs/sweep_fake_aloha"))
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    rows = chosen(p, args.rows, ROWS, "row")
    figures = {}
    for row in rows:
        out = args.out / f"{row}_{args.variant}"
        settings = [
            f"learner.max_steps={args.max_steps}",
            f"learner.checkpoint_period={args.max_steps // 4}",
            *ROWS[row],
        ]
        command = [sys.executable, str(BENCHMARK), "--variants", args.variant, "--seeds", args.seeds]
        command += ["--out", str(out), "--json", str(out / "figures.json")]
        for setting in settings:
            command += ["--set", setting]
        out.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, check=True)
        figures[row] = json.loads((out / "figures.json").read_text())["results"]
        for r in figures[row]:
            curve = " ".join(f"{q['step']}:{q['success_rate']:.2f}" for q in r["curve"])
            print(f"{row:22s} seed {r['seed']}: last {r['last']['success_rate']:.2f}; validation {curve}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
