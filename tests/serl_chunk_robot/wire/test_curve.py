"""Key files and keys on sockets, as a robot server uses them. The learner's are tested in tests/transport/security."""

from __future__ import annotations

import json

import pytest
from errors import naming

from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.wire.curve import Pair, check_folder, key_of, read, to_bytes, to_text


def test_a_key_file_is_for_its_owner_alone(tmp_path):
    pair, file = Pair.new(), tmp_path / "server.json"
    assert Pair.of_secret(pair.secret) == pair
    assert to_text(to_bytes(pair.public)) == pair.public
    assert pair.secret not in repr(pair)
    file.write_text(json.dumps({"secret": pair.secret, "public": "short"}))
    file.chmod(0o600)
    assert key_of(file, read(file), "secret") == pair.secret
    with pytest.raises(ConfigError, match=naming(file, "'public'")):
        key_of(file, read(file), "public")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=naming(f"chmod 600 {file}")):
        read(file)
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigError, match=naming(f"chmod 700 {tmp_path}")):
        check_folder(tmp_path)
