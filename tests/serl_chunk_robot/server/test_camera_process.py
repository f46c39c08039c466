"""Frames from a camera's publisher to clients: their content, keys, and what a camera must not give."""

from __future__ import annotations

import time

import numpy as np
import pytest
from robot_cameras import PublishedCamera, job
from robot_served import Served, free_port, wait, write_keys

from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.drivers.camera import CameraError, CameraSpec, Frame
from serl_chunk_robot.server.streams import FramePublisher


def test_a_client_gets_the_newest_picture_of_the_cameras_it_reads_alone():
    port = free_port(4)
    robot = Served(port=port, cameras=(("top", 12, 16, port + 2), ("wrist", 8, 20, port + 3)))
    cameras = [PublishedCamera("top", port + 2), PublishedCamera("wrist", port + 3, height=8, width=20)]
    try:
        client = robot.client()
        assert client.cameras() == [("top", 12, 16, port + 2), ("wrist", 8, 20, port + 3)]
        wait(lambda: client.newest_picture("top") is not None)
        first = client.newest_picture("top")
        assert (first.image.shape, first.image.dtype) == ((12, 16, 3), np.uint8)
        assert not first.image.flags.writeable
        kept = first.image.copy()
        time.sleep(0.3)  # some 18 pictures, of which one is kept
        client.next_state()
        second = client.newest_picture("top")
        assert second.number > first.number + 5
        assert 0 <= client.server_time() - second.moment < 0.2
        assert second.changed == second.moment
        assert np.array_equal(first.image, kept)
        assert list(client._streams) == [("camera", "top")]
        with pytest.raises(RobotError, match="camera 'left': the server has top, wrist"):
            client.newest_picture("left")
    finally:
        for camera in cameras:
            camera.close()
        robot.close()


def test_frames_need_an_admitted_key_and_the_name_of_their_camera(tmp_path):
    keys = write_keys(tmp_path, left="", gone="")
    port = free_port(3)
    robot = Served(keys=tmp_path, port=port, cameras=(("top", 12, 16, port + 2),))
    camera = PublishedCamera("top", port + 2, keys=tmp_path)
    try:
        admitted = robot.client("left", keys=keys["left"])
        wait(lambda: admitted.newest_picture("top") is not None)
        (tmp_path / "allowed" / "gone.json").unlink()
        stranger = robot.client("gone", keys=keys["gone"])
        stranger._greeting = admitted.hello()  # it knows the ports from elsewhere
        time.sleep(0.6)  # the folder is read every 0.5 s
        ends = time.monotonic() + 0.4
        while time.monotonic() < ends:
            assert stranger.newest_picture("top") is None
            time.sleep(0.01)
        assert admitted.newest_picture("top").number > 5
        camera.close()
        number = admitted.newest_picture("top").number
        camera = PublishedCamera("wrist", port + 2, keys=tmp_path)  # another one at this port
        time.sleep(0.4)
        assert admitted.newest_picture("top").number == number
    finally:
        camera.close()
        robot.close()


class Sent:
    """A publisher of which the messages are kept."""

    def __init__(self, monkeypatch, spec, latency=0.0):
        self.messages, name = [], "serl_chunk_robot.server.streams.arrays.pack"
        monkeypatch.setattr(name, lambda m: self.messages.append(m) or b"")
        self.publisher = FramePublisher(job("top", free_port())._replace(latency=latency), spec)

    def publish(self, image, stamp, number=0):
        self.publisher.publish(Frame(image, stamp, number))
        return self.messages[-1]


@pytest.mark.parametrize("noisy", [True, False])
def test_changed_is_the_moment_of_the_last_picture_that_differed(monkeypatch, noisy):
    sent = Sent(monkeypatch, CameraSpec(4, 5, noisy), latency=0.5)
    image = np.zeros((4, 5, 3), np.uint8)  # a driver that reuses its buffer
    changed = [sent.publish(image, 1.0)["changed"], sent.publish(image, 2.0)["changed"]]
    image[3, 4, 2] = 1
    changed += [sent.publish(image, 3.0)["changed"], sent.publish(image, 4.0)["changed"]]
    assert changed == ([0.5, 0.5, 2.5, 2.5] if noisy else [0.5, 1.5, 2.5, 3.5]), "of a drawn scene they always change"
    sent.publisher.close()


@pytest.mark.parametrize(
    ("image", "stamp", "words"),
    [
        (np.zeros((4, 6, 3), np.uint8), 1.0, r"must be uint8\[4, 5, 3\], got uint8\[4, 6, 3\]"),
        (np.zeros((4, 5, 3), np.uint8), 1e12, "clock of `open`"),
    ],
)
def test_a_frame_that_is_not_as_the_contract_says_is_an_error(monkeypatch, image, stamp, words):
    sent = Sent(monkeypatch, CameraSpec(4, 5))
    with pytest.raises(CameraError, match=words):
        sent.publish(image, stamp)
    assert not sent.messages
    sent.publisher.close()
