"""Exports at a period: pi0 as openpi's checkpoints, while it is trained."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import ml_dtypes
import numpy as np
from learner_tools import learner_of, let_go
from pi0_agents import SMALL

from serl_chunk.cli.record import run_record
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.learner import learner as learner_module
from serl_chunk.models.pi0.tree import flat
from serl_chunk.runs.openpi_checkpoints import Checkpoint


def test_each_period_leaves_the_acting_pi0_and_a_disk_that_is_full_ends_no_training(tmp_path, monkeypatch, caplog):
    base = load_experiment("fake_aloha")
    model = dataclasses.replace(SMALL, action_dim=23, depth=1, trainable="expert", steps=1)
    agent = BcConfig(policy="pi0", pi0=model, language=LanguageConfig("bytes", 32), policy_updates=1)
    loop = dataclasses.replace(
        base.learner, batch_size=4, pretrain_steps=0, critic_pretrain_steps=0, offline_steps=3, online_steps=0,
        export_period=1,
    )  # fmt: skip
    actor = dataclasses.replace(base.actor, intervention="none")
    robot = dataclasses.replace(base.robot, task="lift")
    config = dataclasses.replace(base, agent=agent, learner=loop, actor=actor, robot=robot)
    run_record(config, 1, str(tmp_path / "demos"), policy="scripted", noise=None, cameras=())
    learner = learner_of(config, str(tmp_path / "demos"), tmp_path / "run")
    exports = tmp_path / "run" / "exports"
    (exports / "1.partial").mkdir(parents=True)  # of a process that was killed
    while learner.updates < 1:
        learner.work()
    expected = flat(learner.state.policy_average["pi0"]) | flat(learner.base["pi0"])
    found = {}
    Checkpoint(exports / "1").load(model, jax.random.key(0), lambda leaf, array: found.update({leaf.path: array}))
    assert set(found) == set(expected)
    for path, array in found.items():
        wanted = np.asarray(expected[path]).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(array).astype(ml_dtypes.bfloat16), wanted)

    def full(*_):
        raise ValueError("OUT_OF_RANGE: Error writing")  # as tensorstore says it

    with monkeypatch.context() as patch:
        patch.setattr("serl_chunk.runs.openpi_checkpoints.export", full)
        while learner.updates < 2:
            learner.work()
    assert "exports/2: could not be exported (ValueError: OUT_OF_RANGE: Error writing)" in caplog.text
    while learner.updates < 3:
        learner.work()
    assert sorted(folder.name for folder in exports.iterdir()) == ["1", "3"]
    assert exports.name == learner_module.EXPORTS

    learner.config = dataclasses.replace(config, learner=dataclasses.replace(loop, keep_checkpoints=2))
    learner.updates = 10  # its folder is the newest by number
    learner.export()
    assert sorted(folder.name for folder in exports.iterdir()) == ["10", "3"]
    learner.updates = 11
    with monkeypatch.context() as patch:  # the file is another one than the run's
        patch.setattr("serl_chunk.runs.openpi_checkpoints.norm_stats_of", lambda config: {"arm": {}})
        patch.setattr(learner_module, "fit_preprocess", lambda *_: mock.Mock(digest=lambda: "other"))
        learner.export()
    assert "11: not exported" in caplog.text
    assert not (exports / "11").exists()
    let_go(learner)
