"""The tables of learning results in the documents, by the names of their markers."""

from __future__ import annotations

import dataclasses

from support.result_tables import (
    At,
    Cell,
    Column,
    Row,
    Table,
    Where,
    arms,
    bare,
    difference,
    field,
    figures,
    interval,
    listed,
    operator_ticks,
    percent,
    percent_square,
    plain_percent,
    rates,
    separate,
    share,
    wall,
)

FAKE_ALOHA = Table(
    "docs/results.md",
    "variant",
    [Column("success, seeds 11, 12, 13", percent), Column("human ticks", field("human_ticks"), Where(at=("last",)))],
    [
        Row(
            "behaviour cloning (`bc`), best of five lengths and two normalisers",
            Where("fake_aloha", "bc", at=("best",)),
        ),
        Row(
            "**the recipe of `make demo`** (`rl_helper`), 12,000 updates, 50,000 steps",
            Where("fake_aloha_recipe", "rl_helper"),
        ),
        Row("the scripted human limited to 1,000 ticks (`rl_helper_1000`)", Where(run="rl_helper_1000")),
        Row(
            "HG-DAgger on as many ticks (`hg_dagger_1000`), best checkpoint",
            Where(run="hg_dagger_1000", at=("best",)),
        ),
        Row(
            "no interventions (`rl_alone`): full starting noise, all imitated, 16,000 updates, 66,000 steps",
            Where(run="rl_alone"),
        ),
    ],
    Where("fake_aloha_human", seeds=(11, 12, 13)),
)

_BEST_AND_LAST: tuple[At, ...] = ("best", "last")
FAKE_ALOHA_SEED_11 = Table(
    "docs/results.md",
    "variant",
    [Column("success", percent), Column("human ticks", field("human_ticks"), Where(at=("last",)))],
    [
        Row("the recipe (`rl_helper`)", Where(run="rl_helper")),
        Row("single actions instead of chunks (`horizon_1`)", Where(run="horizon_1")),
        Row("QC with 8 candidates (preset `qc`, this task's network sizes)", Where(run="qc")),
        Row(
            "HG-DAgger with the human unlimited (`hg_dagger`), best, last checkpoint",
            Where(run="hg_dagger", at=_BEST_AND_LAST),
        ),
        Row("QC-FQL (preset `qc-fql`, likewise)", Where(run="qc_fql")),
        Row(
            "the Gaussian agent (`gaussian`: acrlpd, best of 16), best, last", Where(run="gaussian", at=_BEST_AND_LAST)
        ),
        Row("QC-RLPD (`qc_rlpd`), best, last", Where(run="qc_rlpd", at=_BEST_AND_LAST)),
        Row("RLPD of Q-chunking (`rlpd_qc`)", Where(run="rlpd")),
        Row("no demonstrations, with interventions (`no_demos`)", Where(run="no_demos")),
    ],
    Where("fake_aloha_seed_11"),
)

TRANSFER_CUBE = Table(
    "docs/results.md",
    "seed",
    [
        Column("clone", percent, Where(at=("first",))),
        Column("after 30,000 updates, 300,000 steps", percent),
        Column("intervals", separate),
    ],
    [Row(str(seed), Where(seeds=(seed,))) for seed in (42, 43, 44)],
    Where("aloha_transfer_cube", "aloha_transfer_cube"),
)

GYM_HIL = Table(
    "docs/benchmarks.md",
    "seed",
    [
        Column("clone", percent, Where(at=(0,))),
        Column("1,000 updates", plain_percent, Where(at=(1_000,))),
        Column("2,000", plain_percent, Where(at=(2_000,))),
        Column("3,000", percent, Where(at=(3_000,))),
        Column("human ticks", field("human_ticks")),
        Column("online steps", field("env_steps")),
        Column("episodes, helped", figures("episodes", "episodes_with_intervention")),
    ],
    [Row(str(seed), Where(seeds=(seed,))) for seed in (0, 1, 2)],
    Where("gym_hil", "gym_hil"),
)

_OF_50, _OF_100 = bare(50), bare(100)
CUBE_SINGLE = Table(
    "docs/benchmarks.md",
    "success, %",
    [
        Column("10,000", _OF_50, Where(at=(10_000,))),
        Column("20,000", _OF_50, Where(at=(20_000,))),
        Column("30,000 offline", _OF_50, Where(at=(30_000,))),
        Column("40,000", _OF_50, Where(at=(40_000,))),
        Column("49,000 online", _OF_50, Where(at=(49_000,))),
    ],
    [
        Row("ours: the experiment as it is", Where(run="ours")),
        Row("QC, best of 8", Where(run="qc")),
        Row("QC-FQL, alpha 300", Where(run="qc-fql")),
        Row("QC-RLPD", Where(run="qc-rlpd")),
        Row("RLPD of Q-chunking (`rlpd-qc`)", Where(run="rlpd")),
        Row("BC (flow)", Where(run="bc")),
        Row(
            "published code: QC, best of 8",
            Where("cube_single_published", "published-qc", also=((30_000, 25_000),)),
        ),
        Row("published code: QC-FQL", Where("cube_single_published", "published-qc-fql")),
    ],
    Where("cube_single"),
)

_SAVINGS = "cube_single_savings"
CUBE_SINGLE_SAVINGS = Table(
    "docs/benchmarks.md",
    "success, %",
    [
        Column("10,000", _OF_50, Where(at=(10_000,))),
        Column("20,000", _OF_50, Where(at=(20_000,))),
        Column("30,000 updates", _OF_50, Where(at=(30_000,))),
        Column("seconds for these", wall(1), Where(at=(30_000,))),
    ],
    [
        Row("QC, best of 8, two runs", Where(run="qc")),
        Row("with 2 of its 5 flow steps in the target", Where(_SAVINGS, "qc-2-steps")),
        Row("with an expectile in place of samples", Where(_SAVINGS, "qc-expectile")),
        Row("QC-FQL, two runs", Where(run="qc-fql")),
        Row("with the policies once in four critic updates", Where(_SAVINGS, "qc-fql-critic-first")),
    ],
    Where("cube_single", seeds=(0,)),
)

CUBE_SINGLE_SAVINGS_ONLINE = Table(
    "docs/benchmarks.md",
    "success, %",
    [
        Column("4,000", _OF_100, Where(at=(4_000,))),
        Column("6,000", _OF_100, Where(at=(6_000,))),
        Column("8,000", _OF_100, Where(at=(8_000,))),
        Column("10,000", _OF_100, Where(at=(10_000,))),
        Column("11,000 updates", _OF_100, Where(at=(11_000,))),
    ],
    [
        Row("QC-RLPD", Where(run="qc-rlpd")),
        Row("with the policy once in four critic updates", Where(run="qc-rlpd-critic-first")),
        Row("with two random heads in the target", Where(run="qc-rlpd-subset")),
    ],
    Where("cube_single_savings_online"),
)


def _option(name: str, base: str = "default") -> Row:
    """Return a row of the ablations, whose label names a base other than the default."""
    against = "" if base == "default" else f", against `{base}`"
    return Row(f"`{name}`{against}", Where(run=name, base=base))


_FAKE, _CUBE = Where("ablations_fake_aloha", seeds=(0,)), Where("ablations_cube_single", seeds=(0,))
ABLATIONS = Table(
    "docs/ablations.md",
    "option",
    [
        Column("fake ALOHA [95 %]", interval, _FAKE),
        Column("difference", difference, _FAKE),
        Column("cube-single [95 %]", interval, _CUBE),
        Column("difference", difference, _CUBE),
    ],
    [
        *map(
            _option,
            (
                "default", "drop_terminal_windows", "tail_policy", "squared", "target_2_mean", "target_2_min",
                "target_all_min", "target_by_policy", "expectile_0.9", "ensemble_2", "utd_0.5", "critic_warmup_0",
                "critic_warmup_2000", "candidates_1", "candidates_4", "candidates_8", "candidates_32",
                "all_candidates_at_once", "act_by_online", "choose_by_min", "no_policy_average", "policy_updates_1",
                "full_noise", "imitate_all", "horizon_1", "absolute_actions", "adjacent_windows", "cut_at_takeovers",
                "takeover_costs_0.1", "hl_gauss", "floor_of_returns", "choose_std_1", "knots_2", "climb",
            ),
        ),
        _option("climb_and_imitate", "climb"),
        _option("decoupled_10"),
        _option("decoupled_20"),
        _option("replan_early", "decoupled_10"),
        _option("delay_2"),
        _option("delay_2_trained", "delay_2"),
        _option("gaussian"),
        _option("gaussian_16", "gaussian"),
        _option("helper_errs"),
        _option("helper_errs_cut", "helper_errs"),
        _option("helper_errs_costs", "helper_errs"),
    ],
)  # fmt: skip

_GAUSSIAN = "ablations_cube_single_gaussian"
ABLATIONS_ONLINE = Table(
    "docs/ablations.md",
    "option",
    [Column("success [95 %]", interval), Column("difference", difference)],
    [
        _option("default"),
        _option("utd_0.5"),
        Row(
            "`critic_warmup_2000` (`critic_warmup_0` is the default there)",
            Where(run="critic_warmup_2000", base="default"),
        ),
        _option("all_candidates_at_once"),
        _option("knots_2"),
        Row("`default`, 2,000 and 10,000 steps", Where(_GAUSSIAN, "default", base="default")),
        Row("`gaussian`, against it", Where(_GAUSSIAN, "gaussian", base="default")),
        Row("`gaussian_16`, against `gaussian`", Where(_GAUSSIAN, "gaussian_16", base="gaussian")),
        Row(
            "`gaussian_16_target_8`, against `gaussian_16`",
            Where(_GAUSSIAN, "gaussian_16_target_8", base="gaussian_16"),
        ),
    ],
    Where("ablations_cube_single_online"),
)

ABLATIONS_SEEDS = Table(
    "docs/ablations.md",
    "option",
    [Column("seeds", rates), Column("all [95 %]", interval), Column("difference [95 %]", difference)],
    [*map(_option, ("default", "expectile_0.9", "critic_warmup_0", "candidates_32", "all_candidates_at_once"))],
    Where("ablations_fake_aloha", seeds=(0, 1, 2)),
)


def _trial(name: str, label: str) -> Row:
    return Row(label, Where(run=f"fake_aloha {name}, 10 demonstrations"))


GOING_ONLINE_TRIALS = Table(
    "docs/ablations.md",
    "10 demonstrations, seeds 31, 32",
    [
        Column("human ticks", field("human_ticks"), Where(at=("last",))),
        *(Column(f"{n:,}", arms, Where(at=(n,))) for n in (1_000, 2_000, 3_000, 4_000)),
    ],
    [
        _trial("default", "500 critic updates before the first of all, 16 candidates"),
        _trial("no_warmup", "**none before** (the default since)"),
        _trial("4_candidates_no_warmup", "the same, 4 candidates"),
        _trial("no_warmup_no_ema", "the same, 16, the newest policy acts (`policy_ema=0`), seed 31"),
        _trial("4_candidates", "500 before, 4 candidates"),
        _trial("no_ema", "500 before, the newest policy acts"),
        _trial("expectile_09", "500 before, `agent.expectile=0.9`, seed 31"),
    ],
    Where("going_online_trials", seeds=(31, 32)),
)


def _clones(demos: int) -> Cell:
    """Successes of clones of so many demonstrations; the column's run is the flow."""
    return lambda book, where: plain_percent(
        book, dataclasses.replace(where, run=f"fake {where.run}, {demos} demonstrations")
    )


_AT = (0, 500, 1_000, 2_000, 3_000, 4_000, 8_000, 12_000)
GOING_ONLINE = Table(
    "docs/results.md",
    "seed",
    [
        *(Column(f"{n:,}", arms, Where(at=(n,))) for n in _AT),
        Column("human ticks to 4,000", field("human_ticks"), Where(at=(4_000,))),
        Column("clone explored, of 200; least window of 40", figures("explored", "window_least")),
    ],
    [
        Row(str(seed), Where(run="fake_aloha default, 10 demonstrations", seeds=(seed,)))
        for seed in (11, 12, 13, 14, 15)
    ],
    Where("going_online"),
)

CLONES = Table(
    "docs/algorithms.md",
    "demonstrations",
    [
        Column("v = f", plain_percent, Where(run="today")),
        Column("v = f + k(t) x", plain_percent, Where(run="k")),
        Column("and moved joints", plain_percent, Where(run="k_joints")),
    ],
    [Row(str(n), Where(), _clones(n)) for n in (10, 30)],
    Where("clones", seeds=(1, 2, 3, 4, 5)),
)

GRASP_CRITIC = Table(
    "docs/algorithms/gripper.md",
    "updates",
    [
        Column("continuous, seeds 0, 1", plain_percent, Where(run="continuous")),
        Column("chosen (`fake_aloha_discrete_gripper`), seeds 0, 1", plain_percent, Where(run="discrete")),
    ],
    [
        Row("0, the clone", Where(at=(0,), starts="validation")),
        *(Row(f"{n:,}", Where(at=(n,), starts="validation")) for n in (2_000, 4_000, 8_000, 12_000)),
        Row("the last on 100 other starts", Where(at=("last",))),
        Row("human ticks", Where(at=("last",)), field("human_ticks")),
    ],
    Where("grasp_critic", seeds=(0, 1)),
)

HUMAN_IN_THE_LOOP = Table(
    "docs/algorithms/human_in_the_loop.md",
    "method",
    [
        Column("success alone", percent_square),
        Column("human's share of the last 20 episodes' ticks", share("human_share")),
        Column("human ticks in all", field("human_ticks")),
    ],
    [
        Row("ours: the experiment as it is", Where(run="ours")),
        Row("HG-DAgger (flow)", Where(run="hg-dagger")),
        Row("RLPD of Q-chunking (`rlpd-qc`)", Where(run="rlpd")),
        Row("BC (flow), which learns nothing from human steps", Where(run="bc")),
    ],
    Where("human_in_the_loop", seeds=(0,)),
)


def _images(label: str, updates: int, starts: str = "validation") -> Row:
    return Row(label, Where(at=(updates,), starts=starts))


FAKE_ALOHA_IMAGES = Table(
    "docs/algorithms/vision.md",
    "updates",
    [
        Column("success", percent_square),
        Column("online steps", field("env_steps")),
        Column("human ticks", field("human_ticks")),
        Column("minutes", wall(60)),
    ],
    [
        _images("0, the clone", 0),
        *(_images(f"{n:,}", n) for n in (2_000, 4_000, 6_000, 8_000, 10_000)),
        _images("12,000, the experiment's end", 12_000),
        _images("18,000", 18_000, "reported"),
    ],
    Where("fake_aloha_images", "fake_aloha_images"),
)

_ONLINE = (10_000, 20_000, 25_000, 30_000)
OPERATOR = Table(
    "docs/operator.md",
    "",
    [Column("ticks of the operator, demonstrations included", listed(operator_ticks)), Column("success", percent)],
    [
        Row("before training online", Where(run="ours", at=(0,))),
        Row("after 10,000, 20,000, 25,000 and 30,000 updates", Where(run="ours", at=_ONLINE)),
        Row("**after 36,000 updates**", Where(run="ours", at=(36_000,))),
        Row("HG-DAgger (preset `hg-dagger`, our policy's sizes and settings), as many updates", Where(run="hg-dagger")),
        Row("a clone of the ten", Where(run="bc")),
        Row("a clone of 61 of its demonstrations", Where(run="bc-more")),
        Row("the same without moved joints (`agent.bc_joint_noise=0`)", Where(run="bc-more-still")),
        Row("without them, and with a network of velocities, from no noise", Where(run="bc-more-velocity")),
    ],
    Where("operator_transfer_cube", at=("last",)),
)

OPTIONS_AT_LENGTH = Table(
    "benchmarks/README.md",
    "option",
    [
        *(Column(f"{n:,}", bare(100), Where(at=(n,), starts="validation")) for n in (2_000, 4_000, 6_000, 8_000)),
        Column("reported", percent, Where(at=("last",))),
    ],
    [
        Row("`default`", Where(run="default")),
        Row("`ensemble_2`: two critics instead of four", Where(run="ensemble_2")),
        Row(
            "`policy_ema=0`, `acting_critic=online`: the newest policy acts, not its average",
            Where(run="newest_policy"),
        ),
        Row("`acting_critic=online`: the newest critic chooses, not its target", Where(run="act_by_online")),
        Row("`target_by_policy`: the target from policy samples instead of an expectile value",
            Where(run="target_by_policy")),
        Row("`absolute_actions`: scaled to the demonstrations' range, not relative", Where(run="absolute_actions")),
    ],
    Where("fake_aloha_options"),
)  # fmt: skip

TABLES = {
    "fake-aloha": FAKE_ALOHA,
    "fake-aloha-seed-11": FAKE_ALOHA_SEED_11,
    "aloha-transfer-cube": TRANSFER_CUBE,
    "gym-hil": GYM_HIL,
    "cube-single": CUBE_SINGLE,
    "cube-single-savings": CUBE_SINGLE_SAVINGS,
    "cube-single-savings-online": CUBE_SINGLE_SAVINGS_ONLINE,
    "ablations": ABLATIONS,
    "ablations-online": ABLATIONS_ONLINE,
    "ablations-seeds": ABLATIONS_SEEDS,
    "going-online-trials": GOING_ONLINE_TRIALS,
    "clones": CLONES,
    "going-online": GOING_ONLINE,
    "grasp-critic": GRASP_CRITIC,
    "human-in-the-loop": HUMAN_IN_THE_LOOP,
    "fake-aloha-images": FAKE_ALOHA_IMAGES,
    "operator-transfer-cube": OPERATOR,
    "fake-aloha-options": OPTIONS_AT_LENGTH,
}
