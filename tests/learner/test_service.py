"""The learner's network: what actors meet before it is ready, and what is logged while none is there."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from errors import naming
from point_robot import experiment
from ports import free_port

from serl_chunk.learner import service as service_module
from serl_chunk.learner.service import LearnerService
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.folder import open_run
from serl_chunk.types import ConfigError


@pytest.fixture
def service(tmp_path):
    config = experiment()
    config = dataclasses.replace(config, transport=dataclasses.replace(config.transport, journal=False))
    with open_run(config, robot_spec(config.robot), str(tmp_path)).locked():
        run = SimpleNamespace(path=tmp_path, run_id="r")
        service = LearnerService(config, run, {}, bind="127.0.0.1", port=free_port())
        service.server.start()
        yield service
        service.close()


def test_before_its_learner_is_there_it_is_not_ready(service):
    for called in (service._welcome, service.tick, service.status):
        with pytest.raises(ConfigError, match=naming("still reading")):
            called()


def test_a_learner_that_waits_for_actors_logs_the_remedy_once(service, monkeypatch, caplog):
    monkeypatch.setattr(service_module, "LONELY_S", -1.0)
    monkeypatch.setattr(service_module, "CHECK_PERIOD", 0.0)
    learner = SimpleNamespace(idle=False, updates=0, status=lambda: {"env_steps": 3})
    service.attach(learner)
    assert service.tick()
    assert caplog.messages == []
    learner.idle = True
    for _ in range(3):
        assert service.tick()
    [line] = caplog.messages
    assert "no actor is connected" in line
    assert "Start an actor of" in line
    assert service.status() == {"env_steps": 3, "actors": (), "stalled": ""}
