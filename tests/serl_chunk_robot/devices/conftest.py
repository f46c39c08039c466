"""Devices that come back quickly, and virtual ones."""

from __future__ import annotations

import evdev_stand_in
import fake_hid
import pytest

from serl_chunk_robot.devices import polling


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine may hold a device's thread up: no reading gets too old, unless a test wants it."""
    monkeypatch.setattr(polling, "AGAIN", 0.02)
    monkeypatch.setattr(polling, "SILENT", 60.0)


@pytest.fixture
def hid(tmp_path):
    with fake_hid.installed(tmp_path) as hid:
        yield hid


@pytest.fixture
def inputs(tmp_path):
    with evdev_stand_in.installed(tmp_path) as inputs:
        yield inputs


@pytest.fixture
def opened():
    """Open devices by their class or function; they are closed after the test."""
    devices = []

    def make(kind, *arguments, **more):
        devices.append(kind(*arguments, **more))
        return devices[-1]

    yield make
    for device in devices:
        device.close()
