"""Observations in messages, as openpi's programs name them."""

from __future__ import annotations

import numpy as np
import pytest
from actor_helpers import SPEC
from errors import naming
from policy_servers import SIZES, request

from serl_chunk.serving.observations import ObservationReader, ObservationWriter
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError
from serl_chunk_robot.wire.codec import WireError

READER = ObservationReader(SPEC, {**SIZES, "front": ((8, 10), (4, 4))}, task="the experiment's")
FRONT = np.arange(240, dtype=np.uint8).reshape(8, 10, 3)
WRIST = np.full((6, 5, 3), 7, np.uint8)
STATE_OF = np.array([0.25, 0.5, 0])


def flat(**changes):
    return {"observation/state": STATE_OF, "observation/front": FRONT, "observation/wrist": WRIST, **changes}


@pytest.mark.parametrize(
    "values",
    [
        {"state": STATE_OF, "images": {"front": FRONT.transpose(2, 0, 1), "wrist": WRIST}, "prompt": "a task"},
        {"state": STATE_OF.tolist(), "images": {"front": FRONT, "wrist": WRIST, "low": 3}, "prompt": "a task"},
        flat(prompt="a task", **{"observation/state": STATE_OF.astype(np.float16)}),
        {"state": STATE_OF, "images/front": FRONT, "observation/images/wrist": WRIST, "prompt": "a task"},
        {
            "observation/joint_position": STATE_OF[:2],
            "observation/gripper_position": STATE_OF[2:],
            "observation/front_image": FRONT,
            "observation/wrist_image": WRIST,
            "prompt": "a task",
        },
    ],
)
def test_every_form_is_the_same_observation(values):
    observation, task = READER.read(values)
    assert task == "a task"
    assert observation.keys() == {STATE, f"{IMAGE_PREFIX}front", f"{IMAGE_PREFIX}wrist"}
    assert observation[STATE].dtype == np.float32
    np.testing.assert_array_equal(observation[STATE], [0.25, 0.5, 0])
    np.testing.assert_array_equal(observation[f"{IMAGE_PREFIX}front"], FRONT)
    np.testing.assert_array_equal(observation[f"{IMAGE_PREFIX}wrist"], WRIST)
    observation, task = READER.read(flat(**{"observation/front": np.zeros((3, 4, 4), np.uint8)}))  # the agent's size
    assert (task, observation[f"{IMAGE_PREFIX}front"].shape) == ("the experiment's", (4, 4, 3))


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"state": np.zeros(4)}, ("state", 4, 3)), ({"state": np.array([0, np.nan, 0])}, ("state[1]", "nan")),
     ({"state": np.array([0, 1e300, 0])}, ("state[1]", "inf")), ({"state": [1, "a", 2]}, ("state",)),
     ({"state": [[1], 2, 3]}, ("state",)), ({"state": np.zeros(3, bool)}, ("state", "bool[3]")),
     ({"images": {"front": FRONT}}, ("images.wrist", "images.front", "front, wrist")),
     ({"images": "none"}, ("images.front", "state, images, prompt")),
     ({"images": {"front": FRONT[:4], "wrist": WRIST}}, ("images.front", "uint8[4, 10, 3]", "uint8[3, 8, 10]")),
     ({"images": {"front": FRONT / 255, "wrist": WRIST}}, ("images.front", "float64[8, 10, 3]")),
     ({"images": {"front": FRONT, "wrist": [1, 2]}}, ("images.wrist", "list")), ({"prompt": 3}, ("prompt", "int"))],
)  # fmt: skip
def test_bad_values_are_named_with_what_is_valid(changes, named):
    with pytest.raises(WireError, match=naming(*named)):
        READER.read(request() | changes)
    with pytest.raises(WireError, match=naming("state", "missing", "observation/front")):
        READER.read({"observation/front": FRONT})
    with pytest.raises(WireError, match=naming("prompt", "missing", "several tasks")):
        ObservationReader(SPEC, {}, task=None).read({"state": STATE_OF})


def test_what_is_written_is_read():
    observation = {STATE: STATE_OF.astype(np.float32), "images/front": FRONT, "images/wrist": WRIST}
    entries = ("observation/state=state", "observation/front=images/front", "observation/wrist_image=images/wrist")
    for writer in (ObservationWriter(SPEC), ObservationWriter(SPEC, entries)):
        assert writer.cameras == ("front", "wrist")
        read, task = READER.read(writer.write(observation, "a task"))
        assert task == "a task"
        for key, value in observation.items():
            np.testing.assert_array_equal(read[key], value)


def test_alohas_form_has_channels_first_and_float64_and_another_parts_of_the_state():
    values = ObservationWriter(SPEC).write({STATE: STATE_OF, "images/front": FRONT, "images/wrist": WRIST}, "")
    assert values["state"].dtype == np.float64
    assert values["images"]["front"].shape == (3, 8, 10)
    writer = ObservationWriter(
        SPEC, ("observation/joint_position=state[0:2]", "observation/gripper_position=state[2:3]")
    )
    values = writer.write({STATE: np.arange(3, dtype=np.float32)}, "")
    assert writer.cameras == ()
    np.testing.assert_array_equal(values["observation/joint_position"], [0, 1])
    np.testing.assert_array_equal(values["observation/gripper_position"], [2])


@pytest.mark.parametrize(
    ("entry", "named"),
    [("state", "state"), ("a=joints", "joints"), ("a=state[1:9]", "state[1:9]"), ("a=images/low", "low")],
)
def test_bad_entries_are_named(entry, named):
    with pytest.raises(ConfigError, match=named.replace("[", r"\[")):
        ObservationWriter(SPEC, (entry,), "actor.policy_observation")
