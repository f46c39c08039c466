"""Addresses and API keys."""

from __future__ import annotations

import sys

import pytest
from errors import naming

from serl_chunk.serving import endpoint
from serl_chunk.serving.endpoint import Address, authorization, client_key, is_authorized, read_key, websockets
from serl_chunk.types import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [("openpi://robot:9000", "robot", 9000, "ws://robot:9000"),
     ("openpi://10.0.0.7", "10.0.0.7", 8000, "ws://10.0.0.7:8000"),
     ("openpi://[::1]:8001/", "::1", 8001, "ws://[::1]:8001")],
)  # fmt: skip
def test_addresses(text, host, port, url):
    address = Address.parse(text, "actor.policy")
    assert (*address, address.url) == (host, port, url)


@pytest.mark.parametrize(
    "text", ["", "robot:8000", "ws://robot:8000", "openpi://", "openpi://a:0", "openpi://a:70000", "openpi://a b:1",
             "openpi://key@robot:8000", "openpi://robot:8000/path"],
)  # fmt: skip
def test_other_addresses_are_refused(text):
    with pytest.raises(ConfigError, match=naming("actor.policy", "openpi://HOST:PORT")):
        Address.parse(text, "actor.policy")


@pytest.mark.parametrize("text", [b"", b"a key with spaces", b"k" * 20 + b"\n" + b"m" * 20, b"\xff" * 20])
def test_other_files_are_no_keys_and_stay_secret(tmp_path, text):
    (tmp_path / "key").write_bytes(text)
    with pytest.raises(ConfigError, match=naming("api_key", tmp_path / "key")) as error:
        read_key(str(tmp_path / "key"), "api_key")
    assert "kkkk" not in str(error.value)


def test_a_clients_key_comes_from_the_setting_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(endpoint.KEY_VARIABLE, raising=False)
    assert client_key("", "actor.policy_key") == ""
    with pytest.raises(ConfigError, match=naming("actor.policy_key", tmp_path / "absent")):
        client_key(str(tmp_path / "absent"), "actor.policy_key")
    (tmp_path / "a").write_text("a" * 16 + "\n")
    (tmp_path / "b").write_text("b" * 20)
    monkeypatch.setenv(endpoint.KEY_VARIABLE, str(tmp_path / "a"))
    assert client_key("", "actor.policy_key") == "a" * 16
    assert client_key(str(tmp_path / "b"), "actor.policy_key") == "b" * 20
    monkeypatch.setenv(endpoint.KEY_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=naming(endpoint.KEY_VARIABLE)):
        client_key("", "actor.policy_key")


def test_headers_and_without_the_library_its_extra(monkeypatch):
    key = "k" * 16
    header = authorization(key)["Authorization"]
    assert (header, authorization("")) == (f"Api-Key {key}", {})
    assert is_authorized(None, "")
    assert is_authorized(header, key)
    others = (None, "", key, f"Api-Key {key}x", f"Bearer {key}", "Api-Key \xe9\udce9")
    assert not [other for other in others if is_authorized(other, key)]
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(ConfigError, match=r"serl-chunk\[serve\]"):
        websockets()
