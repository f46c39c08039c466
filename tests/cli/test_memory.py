"""`serl-chunk memory`: a column for each way to train, and what fits."""

from __future__ import annotations

import pytest

from serl_chunk.learner import memory
from serl_chunk.main import main

LORA = ["--config.agent.pi0.vlm.mlp_rank=2", "--config.agent.pi0.trainable=lora"]


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (["fake_aloha"], ["acfql"]),
        (["fake_aloha_pi0"], ["full*", "expert"]),
        (["fake_aloha_pi0", *LORA], ["lora*", "full", "expert"]),
    ],
)
def test_each_way_to_train_has_a_column(words, ways, monkeypatch, capsys):
    def estimated(config, spec, devices):
        assert devices == 2
        megabytes = 1500 if config.agent.as_pi0 and config.agent.pi0.trainable == "full" else 1
        sizes = dict.fromkeys(memory.DeviceMemory._fields, 0) | {"parameters": megabytes * 10**6}
        return memory.LearnerMemory(memory.DeviceMemory(**sizes), replay=2 * 10**6, snapshot=3 * 10**6, checkpoint=0)

    monkeypatch.setattr(memory, "learner_memory", estimated)
    assert main(["memory", "--exp_name", *words, "--devices", "2", "--device_memory", "1"]) == 0
    rows = {line[:20].strip(): line[20:].split() for line in capsys.readouterr().out.splitlines()[1:]}
    full = [way.startswith("full") for way in ways]
    assert rows["MB of each device"] == ways
    assert rows["at most"] == rows["parameters"] == ["1,500.0" if each else "1.0" for each in full]
    assert rows["fits into 1 GB"] == ["no" if each else "yes" for each in full]
    assert (set(rows["a snapshot"]), set(rows["the host's replay"])) == ({"3.0"}, {"2.0"})
