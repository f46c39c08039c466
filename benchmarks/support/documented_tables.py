"""The tables of learning results in the documents, by the names of their markers; `render_results.py` fills them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from support import result_tables as show
from support.result_tables import Table, Where


def numbers(label: str) -> tuple[int, ...]:
    """Return the numbers of a label, such as `10,000 and 20,000 updates`."""
    return tuple(int(text.replace(",", "")) for text in re.findall(r"\d{1,3}(?:,\d{3})*", label))


def _seed(label: str) -> dict[str, Any]:
    return {"seeds": numbers(label)}


def _option(label: str) -> dict[str, Any]:
    """Return the run that a label names in backticks, and the one behind "against" that it is compared with."""
    names = re.findall(r"`(\w[\w.]*)`", label)
    return {"run": names[0], "base": names[1] if "against `" in label else "default"}


def _option_online(label: str) -> dict[str, Any]:
    longer = {"file": "ablations_cube_single_gaussian"} if "gaussian" in label or "2,000 and" in label else {}
    return {**_option(label), **longer}


def _demonstrations(label: str) -> dict[str, Any]:
    task = "hand" if "by hand" in label else "cube" if "TransferCube" in label else "fake"
    n = numbers(label)[0]

    def clones(where: Where) -> str:
        return show.plain_percent(dataclasses.replace(where, run=f"{task} {where.run}, {n} demonstrations"))

    return {"cell": clones}


def _run_and_seed(label: str) -> dict[str, Any]:
    """Of a label such as `end, shuffled, 21`."""
    name, _, seed = label.rpartition(", ")
    return {"run": name.replace("`", ""), **_seed(seed)}


def _runs(names: str, **more: Any) -> list[dict[str, Any]]:
    return [{"run": name, **more} for name in names.split()]


def _at(*updates: Any) -> dict[str, Any]:
    return {"at": updates}


_LATER = range(9_000, 19_000, 1_000)  # updates
_LAST, _VALIDATION = _at("last"), {"starts": "validation"}
_CHANGED = ("24 groups", "24 groups, shuffled", "K 1", "64 starts", "64 starts, no memory")
_human_ticks, _OF_50, _OF_100 = show.field("human_ticks"), show.bare(50), show.bare(100)
_FAKE = {"file": "ablations_fake_aloha", "seeds": (0,)}
_CUBE = {"file": "ablations_cube_single", "seeds": (0,)}
_IMITATED = ("human_data", "own_successes", "own_successes_fifth", "own_successes_joints_1")
_TRIALS = "default no_warmup handover_mask 4_candidates_no_warmup no_warmup_no_ema 4_candidates no_ema expectile_09"

TABLES = {
    "fake-aloha": Table(
        [(show.percent, {}), (_human_ticks, _LAST)],
        [
            {"file": "fake_aloha", "run": "bc", "at": ("best",)},
            {"file": "fake_aloha_recipe", "run": "rl_helper"},
            {"run": "rl_helper_1000"},
            {"run": "hg_dagger_1000", "at": ("best",)},
            {"run": "rl_alone"},
        ],
        {"file": "fake_aloha_human", "seeds": (11, 12, 13)},
    ),
    "fake-aloha-seed-11": Table(
        [(show.percent, {}), (_human_ticks, _LAST)],
        [
            *_runs("rl_helper horizon_1 qc"),
            *_runs("hg_dagger", at=("best", "last")),
            *_runs("qc_fql"),
            *_runs("gaussian qc_rlpd", at=("best", "last")),
            *_runs("rlpd no_demos"),
        ],
        {"file": "fake_aloha_seed_11"},
    ),
    "aloha-transfer-cube": Table(
        [(show.percent, _at("first")), (show.percent, _LAST)],
        _seed,
        {"file": "aloha_transfer_cube", "run": "aloha_transfer_cube"},
    ),
    "gym-hil": Table(
        [
            (show.percent, _at(0)),
            (show.plain_percent, _at(1_000)),
            (show.plain_percent, _at(2_000)),
            (show.percent, _at(3_000)),
            (_human_ticks, {}),
            (show.field("env_steps"), {}),
            (show.figures("episodes", "episodes_with_intervention"), {}),
        ],
        _seed,
        {"file": "gym_hil", "run": "gym_hil"},
    ),
    "cube-single": Table(
        [(_OF_50, _at(n)) for n in (10_000, 20_000, 25_000, 30_000, 40_000, 49_000)],
        [
            *_runs("ours qc qc-fql qc-rlpd rlpd bc"),
            *_runs("published-qc published-qc-fql", file="cube_single_published"),
        ],
        {"file": "cube_single"},
    ),
    "cube-single-equal": Table(
        [*((_OF_100, _at(n)) for n in (5_000, 10_000, 15_000)), (_OF_100, _LAST)],
        _runs("ours n-step-25 qc"),
        {"file": "cube_single_equal", "seeds": (0, 1, 2)},
    ),
    "cube-single-savings": Table(
        [*((_OF_50, _at(n)) for n in (10_000, 20_000, 30_000)), (show.field("wall"), _at(30_000))],
        [
            *_runs("qc", file="cube_single"),
            *_runs("qc-2-steps qc-expectile"),
            *_runs("qc-fql", file="cube_single"),
            *_runs("qc-fql-critic-first"),
        ],
        {"file": "cube_single_savings", "seeds": (0,)},
    ),
    "cube-single-savings-online": Table(
        [(_OF_100, _at(n)) for n in (4_000, 6_000, 8_000, 10_000, 11_000)],
        _runs("qc-rlpd qc-rlpd-critic-first qc-rlpd-subset"),
        {"file": "cube_single_savings_online"},
    ),
    "ablations": Table(
        [(show.interval, _FAKE), (show.difference, _FAKE), (show.interval, _CUBE), (show.difference, _CUBE)], _option
    ),
    "ablations-online": Table(
        [(show.interval, {}), (show.difference, {})], _option_online, {"file": "ablations_cube_single_online"}
    ),
    "ablations-seeds": Table(
        [(show.plain_percent, {}), (show.interval, {}), (show.difference, {})],
        _option,
        {"file": "ablations_fake_aloha", "seeds": (0, 1, 2)},
    ),
    "going-online-trials": Table(
        [(_human_ticks, {}), *((show.arms, _at(n)) for n in (1_000, 2_000, 3_000, 4_000))],
        [{"run": f"fake_aloha {name}, 10 demonstrations"} for name in _TRIALS.split()],
        {"file": "going_online_trials", "seeds": (31, 32, 33)},
    ),
    "no-human": Table(
        [(show.arms, _at(n)) for n in (0, 2_000, 4_000, 6_000)],
        [{"run": f"fake_aloha {name}, 3 demonstrations"} for name in ("no_human", "no_human_one_candidate")],
        {"file": "no_human", "seeds": (51, 52)},
    ),
    "own-successes": Table(
        [(show.arms, _at(n)) for n in (0, 2_500, 5_000)],
        [{"run": f"aloha_transfer_cube {name}, 30 demonstrations"} for name in _IMITATED],
        {"file": "transfer_cube_online", "seeds": (51,)},
    ),
    "imitated-with-a-human": Table(
        [(show.arms, _at(n)) for n in (0, 500, 1_000, 1_500, 2_000, 3_000, 4_000, 12_000)],
        [{"run": f"fake_aloha {name}, 10 demonstrations"} for name in ("human_data", "own_successes", "default")],
        {"file": "going_online", "seeds": (14,)},
    ),
    "transfer-cube-online": Table(
        [(show.arms, _at(n)) for n in range(0, 35_000, 5_000)],
        _seed,
        {"file": "transfer_cube_online", "run": "aloha_transfer_cube human_data, 30 demonstrations"},
    ),
    "insertion-online": Table(
        [(show.arms, _at(n)) for n in (0, 5_000, 10_000, 20_000, 30_000)],
        _seed,
        {"file": "insertion_online", "run": "aloha_insertion default, 30 demonstrations"},
    ),
    "groups": Table(
        [*((show.plain_percent, _at(n)) for n in (0, 10, 20, 40, 60, 70)), (show.field("wall", 60), _LAST)],
        _run_and_seed,
        {"file": "group_learning"},
    ),
    "group-baselines": Table(
        [*((show.plain_percent, _at(n)) for n in (0, 10, 20, 30, "last")), (show.field("env_steps", 1e3), _LAST)],
        _run_and_seed,
        {"file": "group_baselines"},
    ),
    "group-heads": Table(
        [*((show.plain_percent, _at(n)) for n in (0, "last")), (show.field("env_steps", 1e3), _LAST)],
        _run_and_seed,
        {"file": "group_heads"},
    ),
    "group-variants": Table(
        [
            (show.plain_percent, _at(0)),
            (show.steps_to(25), {}),
            (show.plain_percent, _LAST),
            (show.field("env_steps", 1e3), _LAST),
        ],
        [
            {"file": "group_baselines", "run": "end", "seeds": (21, 22, 23)},
            {"run": "end, weigh episode", "seeds": (21, 22, 23)},
            *({"run": f"end, {changed}"} for changed in _CHANGED),
        ],
        {"file": "group_variants", "seeds": (21,)},
    ),
    "group-cube": Table(
        [*((show.percent, _at(n)) for n in (0, 6, "last")), (show.field("env_steps", 1e3), _LAST)],
        [{"run": "transfer cube"}],
        {"file": "group_transfer_cube"},
    ),
    "group-acfql": Table(
        [
            *((show.percent, _at(n)) for n in (0, "last")),
            (show.field("env_steps", 1e3), _LAST),
            (show.field("wall", 60), _LAST),
        ],
        [{"file": "group_acfql", "run": "rl_alone_default"}, {"file": "group_baselines", "run": "end"}],
        {"seeds": (21,)},
    ),
    "group-trials": Table(
        [(show.plain_percent, _at(*n)) for n in ((0,), (5, 6), (10,))],
        [
            {"run": f"{rule} {way}"}
            for rule, ways in (
                (
                    "end",
                    (
                        "base",
                        "lr4e-4",
                        "epochs4",
                        "sigma0.1",
                        "noise0.5",
                        "minibatch1024",
                        "lr5e-5 epochs8 minibatch1024",
                        "lr1e-4 epochs4 minibatch1024",
                    ),
                ),
                ("sde", ("base", "lr2e-4", "clip0.1", "clip0.2 minibatch4096", "sigma0.3", "epochs4")),
                ("ript", ("base", "lr2e-4", "epochs4", "minibatch2048 lr2e-4", "sigma0.1", "clip0.2")),
                ("ipo", ("base", "alpha0.5", "lr3e-5", "lr3e-4", "epochs4", "noise0.5")),
                ("fba", ("lr3e-4", "epochs4", "noise1", "end", "lr3e-5", "base")),
                ("fbi", ("lr1e-5", "noise1", "lr3e-5", "end", "epochs4", "base")),
                ("ript gaussian", ("base", "lr2e-4", "lr1e-4 epochs2", "minibatch1024 epochs2")),
            )
            for way in ways
        ],
        {"file": "group_trials", **_VALIDATION},
    ),
    "hg-dagger": Table(
        [*((show.plain_percent, _at(n)) for n in range(0, 14_000, 2_000)), (_human_ticks, _LAST)],
        _seed,
        {"file": "hg_dagger", "run": "hg-dagger"},
    ),
    "hg-dagger-1000": Table(
        [*((show.plain_percent, _at(n)) for n in range(0, 16_000, 4_000)), (_human_ticks, _LAST)],
        _seed,
        {"file": "hg_dagger", "run": "hg-dagger_1000"},
    ),
    "imitation": Table(
        [(show.plain_percent, _at(n)) for n in (0, 500, 1_000)],
        _seed,
        {"file": "imitation", "run": "fake_aloha default, 10 demonstrations"},
    ),
    "clones-steady": Table(
        [(show.plain_percent, _at(n)) for n in (8_000, 13_000, 18_000)] + [(show.deviation, _at(*_LATER))],
        [{"run": "fake steady, 10 demonstrations"}, {"run": "cube steady, 30 demonstrations"}],
        {"file": "clones_steady", **_VALIDATION},
    ),
    "clones": Table(
        [(show.plain_percent, {"run": name}) for name in ("today", "k", "k_joints")],
        _demonstrations,
        {"file": "clones", "seeds": (1, 2, 3, 4, 5)},
    ),
    "clones-by-hand": Table(
        [(show.plain_percent, {"run": name}) for name in ("k_joints", "h25")],
        _demonstrations,
        {"file": "clones", "seeds": (1, 2, 3, 4, 5)},
    ),
    "going-online": Table(
        [
            *((show.arms, _at(n)) for n in (0, 500, 1_000, 2_000, 3_000, 4_000, 8_000, 12_000)),
            (_human_ticks, _at(4_000)),
            (show.figures("explored", "window_least"), {}),
        ],
        _seed,
        {"file": "going_online", "run": "fake_aloha default, 10 demonstrations"},
    ),
    "grasp-critic": Table(
        [(show.plain_percent, {"run": "continuous"}), (show.plain_percent, {"run": "discrete"})],
        [*({**_at(n), **_VALIDATION} for n in (0, 2_000, 4_000, 8_000, 12_000)), {}, {"cell": _human_ticks}],
        {"file": "grasp_critic", "seeds": (0, 1)},
    ),
    "human-in-the-loop": Table(
        [(show.percent, {}), (show.share, {}), (_human_ticks, {})],
        _runs("ours hg-dagger rlpd bc"),
        {"file": "human_in_the_loop", "seeds": (0,)},
    ),
    "human-advice": Table(
        [(cell, _at(n)) for cell in (show.plain_percent, _human_ticks) for n in (2_000, 4_000)],
        _runs("ours advised"),
        {"file": "human_advice", "seeds": (0, 1, 2)},
    ),
    "fake-aloha-images": Table(
        [
            *((show.arms, _at(n)) for n in (0, 1_000, 2_000, 3_000, 4_000, 6_000, 8_000, 10_000, 12_000)),
            (_human_ticks, _at(1_000)),
            (_human_ticks, _LAST),
            (show.figures("explored", "window_least"), {}),
        ],
        _seed,
        {"file": "fake_aloha_images", "run": "fake_aloha_images pictures, 30 demonstrations"},
    ),
    "operator-transfer-cube": Table(
        [(show.operator_ticks, {}), (show.percent, {})],
        [
            *(
                {"run": "ours", "seeds": (seed,), "at": at}
                for seed in (42, 43)
                for at in ((0,), (15_000, 25_000), (36_000,))
            ),
            *({"run": name, "seeds": (seed,)} for seed in (42, 43) for name in ("bc", "bc-more")),
            {"run": "bc-more-still", "seeds": (42,)},
        ],
        {"file": "operator_transfer_cube"},
    ),
    "operator-transfer-cube-earlier": Table(
        [(show.operator_ticks, {}), (show.percent, {})],
        [
            *({"run": "earlier_ours", "at": at} for at in ((0,), (10_000, 20_000, 30_000), (36_000,))),
            *_runs("earlier_hg-dagger earlier_bc earlier_bc-more earlier_bc-more-still"),
        ],
        {"file": "operator_transfer_cube"},
    ),
    "fake-aloha-options": Table(
        [*((_OF_100, {**_at(n), **_VALIDATION}) for n in (2_000, 4_000, 6_000, 8_000)), (show.percent, {})],
        _runs("default ensemble_2 newest_policy act_by_online target_by_policy absolute_actions"),
        {"file": "fake_aloha_options"},
    ),
}
