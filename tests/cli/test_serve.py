"""`serl-chunk serve`: a trained run, and a learner, to openpi's own client and to ours."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import queue
import re
import runpy
import subprocess
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import drawn
from errors import naming
from learner_tools import agent_of
from ports import free_port
from processes import settings
from transport_tools import eventually
from transport_tools import serving as learner_serving

from serl_chunk.actor.policy import LocalPolicy, Request
from serl_chunk.agents.spec import agent_spec
from serl_chunk.cli import serve
from serl_chunk.cli.evaluation import checkpoints_of_run
from serl_chunk.cli.keys import LearnerAddress
from serl_chunk.cli.process import load, split_overrides
from serl_chunk.cli.serve import ServedPolicy, ServeOptions, run_serve
from serl_chunk.config.agents.gripper import GripperConfig
from serl_chunk.config.compatibility import contract
from serl_chunk.data.preprocess import Preprocess, fit_preprocess
from serl_chunk.data.prompts import tokens_digest
from serl_chunk.learner.service import welcome_of
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.folder import open_run
from serl_chunk.serving.client import PolicyClient
from serl_chunk.serving.endpoint import Address
from serl_chunk.transport.client import link as client_link
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, PolicyOrigin, Snapshot

pytest.importorskip("websockets")
openpi = pytest.importorskip("openpi_client.websocket_client_policy")

pytestmark = pytest.mark.compiles
CAMERAS = ("top", "left_wrist")
CHANGES = [
    *settings(),
    f"--config.agent.image_keys={','.join(CAMERAS)}",
    "--config.robot.image_size=16",
    "--config.agent.encoder.features=4,4",
    "--config.agent.encoder.latent=8",
    "--config.agent.language.tokenizer=bytes",
    "--config.agent.language.length=96",
]
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def agent(config):
    """One agent, also of every server: it holds no state, and is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "make_agent", lambda config, spec: agent_of(config.agent, agent_spec(config, spec)))
        yield serve.make_agent(config, spec_of(config))


@pytest.fixture(scope="module")
def run(tmp_path_factory, config, agent):
    """A run whose checkpoint's parameters were drawn; its state holds nothing."""
    folder, spec = tmp_path_factory.mktemp("served") / "run", spec_of(config)
    preprocess = fit_preprocess(config, spec, [])
    params = agent.published(drawn(agent), {})
    run = open_run(config, spec, str(folder))
    with run.locked():
        run.write_config()
    with contextlib.closing(CheckpointStore(folder)) as store:
        meta = {"env_steps": 0, "human_ticks": 0, "base_digest": agent.base_digest, **preprocess.normaliser.fields()}
        arrays = preprocess.normaliser.to_arrays()
        store.save(5, {"empty": jnp.zeros(1)}, agent.flatten_params(params), arrays, meta)
        assert store.wait()
    return folder


@pytest.fixture(scope="module")
def config():
    return load("fake_aloha", split_overrides(CHANGES))


@pytest.fixture(scope="module")
def env(config):
    with contextlib.closing(make_env(config.robot)) as env:
        yield env


@contextlib.contextmanager
def serving(config, options):
    stop, port = threading.Event(), queue.SimpleQueue()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(run_serve, config, options, stop=stop, started=lambda s: port.put(s.port))
        served.add_done_callback(lambda ended: port.put(None))
        try:
            found = port.get(timeout=120)
            assert found is not None, served.exception()
            yield found
        finally:
            stop.set()
        assert served.result(30) == 0


@pytest.fixture(scope="module")
def port(config, run):
    with serving(config, ServeOptions(run, port=0, largest=4)) as port:
        yield port


def observed(env, seed):
    state = env.reset(seed=seed)[0][STATE]
    return {STATE: state, **env.read_images(CAMERAS)}


def aloha(observation, prompt="pick the cube"):
    images = {c: observation[IMAGE_PREFIX + c].transpose(2, 0, 1) for c in CAMERAS}
    return {"state": observation[STATE].astype(np.float64), "images": images, "prompt": prompt}


@pytest.fixture(scope="module")
def policy(config, run, env, agent) -> LocalPolicy:
    [found] = checkpoints_of_run(config, env.robot_spec, agent, run, ["latest"])
    policy = LocalPolicy(agent, found.preprocess, env.robot_spec)
    policy.swap(found.snapshot)
    return policy


def expected(policy, observation, prompt="pick the cube"):
    return policy.decide(Request(observation, explore=False, task=prompt))


def test_openpis_client_gets_the_checkpoints_chunks(port, env, policy, config):
    client = openpi.WebsocketClientPolicy("127.0.0.1", port)
    metadata = client.get_server_metadata()
    assert (metadata["robot"], metadata["action_horizon"]) == (env.robot_spec.name, config.chunk.horizon)
    for seed in range(3):
        observation = observed(env, seed)
        reply, right = client.infer(aloha(observation)), expected(policy, observation)
        assert reply["actions"].shape == (config.chunk.horizon, env.robot_spec.action_dim)
        assert reply["actions"].dtype == np.float32
        np.testing.assert_allclose(reply["actions"], right.actions, rtol=1e-4, atol=1e-5)
        assert type(reply["q"]) is float
        assert reply["q"] == pytest.approx(float(right.record["q"]), rel=1e-3, abs=1e-4)
        assert reply["policy_version"] == policy.version
        assert reply["policy_timing"]["infer_ms"] > 0
        assert ("prev_total_ms" in reply["server_timing"]) == (seed > 0)
    flat = {
        "observation/state": observation[STATE],
        **{f"observation/{c}": observation[f"images/{c}"] for c in CAMERAS},
    }
    np.testing.assert_allclose(client.infer(flat | {"prompt": "pick the cube"})["actions"], reply["actions"], atol=1e-5)
    other = client.infer(aloha(observation, "put it away"))["actions"]
    assert not np.allclose(other, reply["actions"], atol=1e-5)


@pytest.fixture
def script(port, tmp_path) -> Path:
    [text] = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert "8000" in text
    (tmp_path / "request_chunk.py").write_text(text.replace("8000", str(port)))
    return tmp_path / "request_chunk.py"


def test_the_documents_script_runs(script, capsys, config):
    runpy.run_path(str(script))
    assert capsys.readouterr().out.startswith(f"({config.chunk.horizon}, 14) 5.0 ")


@pytest.mark.skipif(
    "SERL_CHUNK_OPENPI" not in os.environ, reason="SERL_CHUNK_OPENPI names no Python with openpi-client"
)
def test_the_documents_script_runs_in_openpis_environment(script):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [os.environ["SERL_CHUNK_OPENPI"], script.name], cwd=script.parent, env=clean, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert " 5.0 " in done.stdout


def test_a_bad_request_of_openpis_client_names_the_field(port, env):
    client = openpi.WebsocketClientPolicy("127.0.0.1", port)
    values = aloha(observed(env, 0))
    del values["images"]["left_wrist"]
    with pytest.raises(RuntimeError, match=r"images\.left_wrist"):
        client.infer(values)
    client = openpi.WebsocketClientPolicy("127.0.0.1", port)
    with pytest.raises(RuntimeError, match=r"agent\.language\.length|tokens"):
        client.infer(aloha(observed(env, 0), "a" * 200))


def test_padding_changes_nobodys_answer(env, policy):
    """Row i of a batch of one size is the same whatever the others are, to the bit; of another size, to rounding."""
    rows = [policy.prepare(Request(observed(env, seed), task="pick the cube")) for seed in range(4)]

    def decide(*chosen):
        policy._decisions = 0
        return [d.actions for d in policy.decide_each([rows[i] for i in chosen], explore=True)]

    whole = decide(0, 1, 2, 3)
    padded = decide(0, 1, 0, 0)
    np.testing.assert_array_equal(padded[:2], whole[:2])
    np.testing.assert_array_equal(decide(0, 1, 3, 2)[:2], whole[:2])
    np.testing.assert_allclose(decide(0, 1), whole[:2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(decide(0), whole[:1], rtol=1e-4, atol=1e-5)


def test_grippers_that_keep_their_opening_are_served_as_the_state_has_them(config, env, policy):
    spec, observation = env.robot_spec, observed(env, 0)
    kept = dataclasses.replace(config, agent=dataclasses.replace(config.agent, gripper=GripperConfig(mode="fixed")))
    free, held = (
        served.decide([served.prepare(aloha(observation))])[0].actions
        for served in (ServedPolicy(c, spec, policy) for c in (config, kept))
    )
    grippers = list(spec.grippers)
    opening = observation[STATE][[spec.joint_of_action[g] for g in grippers]]
    others = np.delete(np.arange(spec.action_dim), grippers)
    np.testing.assert_allclose(held[:, grippers], np.tile(opening, (len(held), 1)), atol=1e-6)
    assert not np.allclose(held[:, grippers], free[:, grippers], atol=1e-3)
    np.testing.assert_allclose(held[:, others], free[:, others], rtol=1e-4, atol=1e-5)
    unmeasured = dataclasses.replace(spec, joint_of_action=(-1,) * spec.action_dim)
    ServedPolicy(config, unmeasured, policy)
    with pytest.raises(ConfigError, match=naming("agent.gripper.fixed_value", grippers[0])):
        ServedPolicy(kept, unmeasured, policy)


def test_an_action_that_is_not_finite_is_an_error_of_its_own_row(env, policy, monkeypatch):
    rows = [policy.prepare(Request(observed(env, seed))) for seed in range(2)]
    decode = Preprocess.decode

    def broken(self, state, chunk):
        return decode(self, state, chunk) * np.array([np.nan, 1], np.float32)[:, None, None]

    monkeypatch.setattr(Preprocess, "decode", broken)
    bad, good = policy.decide_each(rows)
    assert "finite" in str(bad)
    assert np.isfinite(good.actions).all()


def test_our_client_is_served_with_a_key(config, run, env):
    with (
        serving(config, ServeOptions(run, port=0, key="k" * 20, largest=1)) as port,
        contextlib.closing(PolicyClient(Address("127.0.0.1", port), key="k" * 20)) as client,
    ):
        assert client.wait(10)
        assert client.infer(aloha(observed(env, 0)))["actions"].shape == (config.chunk.horizon, 14)


def test_what_a_learner_publishes_is_served_from_its_newest_snapshot_on(config, agent, env, policy, caplog):
    caplog.set_level("INFO", "serl_chunk")
    so_far = types.SimpleNamespace(preprocess=policy.preprocess, episodes=0, env_steps=0, human_ticks=0)
    digests = {"base": agent.base_digest, "tokens": tokens_digest(config)}
    how = {"config": config.transport, "contract": contract(config, env.robot_spec, agent.network_shape(), **digests)}
    params, request = agent.flatten_params(agent.published(drawn(agent), {})), aloha(observed(env, 0))
    address = LearnerAddress("127.0.0.1", free_port(), "s", None, True)
    origin = PolicyOrigin("run", policy.preprocess.digest())
    with learner_serving(address.port, welcome=lambda: welcome_of(so_far), **how) as learner:
        learner.publish(Snapshot(1, params, origin=origin), {})
        with (
            serving(config, ServeOptions(learner=address, port=0, largest=1)) as port,
            contextlib.closing(PolicyClient(Address("127.0.0.1", port))) as client,
        ):
            assert client.wait(10)
            assert client.infer(request)["policy_version"] == 1
            learner.publish(Snapshot(7, params, origin=origin), {})
            eventually(lambda: client.infer(request)["policy_version"] == 7)
    assert "policy version 7 is served" in caplog.text
    assert re.search(r"batches by number of clients: \{1: \d+", caplog.text)


ABSENT = dict.fromkeys(("checkpoint_path", "checkpoint_step", "ip", "learner_port", "keys", "actor_id", "api_key"))
FLAGS = {**ABSENT, "bind": "127.0.0.1", "port": 8000, "insecure": False, "max_batch": 8}


def options(**changes):
    return ServeOptions.of(argparse.Namespace(**{**FLAGS, **changes}))


def test_a_signal_ends_the_wait_for_a_learner(config, monkeypatch):
    monkeypatch.setattr(client_link, "_REPORT_EVERY_S", 0.02)
    stop = threading.Event()
    stop.set()
    with pytest.raises(KeyboardInterrupt):
        run_serve(config, ServeOptions(learner=LearnerAddress("127.0.0.1", 1, "s", None, True)), stop=stop)


def test_a_wider_address_needs_a_key_or_consent(tmp_path):
    (tmp_path / "key").write_text("k" * 20)
    served = options(checkpoint_path="run", bind="0.0.0.0", api_key=str(tmp_path / "key"))
    assert (served.bind, served.key) == ("0.0.0.0", "k" * 20)
    assert options(checkpoint_path="run", bind="0.0.0.0", insecure=True).key == ""
    assert options(ip="box", insecure=True).learner.insecure
    assert not options(ip="box", insecure=True, keys="k").learner.insecure
