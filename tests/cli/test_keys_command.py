"""`serl-chunk keys`: what each subcommand does, prints and refuses; which keys learner and actor start with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from errors import naming
from ports import free_port
from transport_tools import eventually, linked, serving

from serl_chunk.cli import keys as commands
from serl_chunk.main import main
from serl_chunk.transport.security.keys import ClientKeys, JoinToken
from serl_chunk.transport.security.server import ServerKeys
from serl_chunk.transport.wire.handshake import RefusedError
from serl_chunk.types import ConfigError

HERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(commands, "JOIN_TIMEOUT", 0.3)
    return tmp_path / "config" / "serl-chunk" / "keys"


@pytest.fixture
def robot(tmp_path: Path) -> str:
    return str(tmp_path / "robot")


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """What `serl-chunk keys ARGUMENTS` prints; on standard error alone where it fails."""
    capsys.readouterr()
    assert main(["keys", *arguments]) == status
    out, err = capsys.readouterr()
    out = "".join(line for line in out.splitlines(True) if not re.match(r"\d\d:\d\d:\d\d ", line))  # the server's log
    if status:
        assert out == ""
        assert re.fullmatch(r"serl-chunk: [^\n]+\n", err)
    return out if status == 0 else err


def word_of(output: str) -> str:
    [word] = re.findall(r"^  serl-chunk keys join '(sc1-[\w-]+)'$", output, re.MULTILINE)
    return word


@pytest.fixture
def port(capsys) -> int:
    run(capsys, "init")
    return free_port()


def invited(capsys, port: int, name: str = "left", host: str = HERE, *more: str) -> str:
    return word_of(run(capsys, "add", name, "--host", host, "--port", str(port), *more))


def test_joining_twice(capsys, home, robot, tmp_path, port):
    word = invited(capsys, port)
    run(capsys, "join", word, "--keys", robot)
    before = ClientKeys.all(Path(robot))
    run(capsys, "join", word, "--keys", robot)  # no learner was reached yet: the same pair is kept
    assert ClientKeys.all(Path(robot)) == before
    with serving(port, keys=ServerKeys.open(home)):
        assert "joined the learner" in run(capsys, "join", word, "--keys", robot)
        assert "has joined with that line already, as 'left'" in run(capsys, "join", word, "--keys", robot)
        stranger = tmp_path / "stranger"
        said = run(capsys, "join", word, "--keys", str(stranger), status=1)
        assert "its line was used by another machine or is older than ten minutes" in said
        assert ClientKeys.all(stranger) == []  # nothing worthless stays
        with linked(port, keys=ClientKeys.all(Path(robot))[0]):
            pass


def test_a_machine_that_has_joined_keeps_its_key_until_another_works(capsys, home, robot, port):
    word = invited(capsys, port)
    with serving(port, keys=ServerKeys.open(home)):
        run(capsys, "join", word, "--keys", robot)
        [first] = ClientKeys.all(Path(robot))
    again = invited(capsys, port, "left2")
    assert "this machine has joined it already" in run(capsys, "join", again, "--keys", robot, status=2)
    assert ClientKeys.all(Path(robot)) == [first]
    with serving(port, keys=ServerKeys.open(home)):
        run(capsys, "join", again, "--keys", robot)
        [second] = ClientKeys.all(Path(robot))
        assert second.name == "left2"
        with linked(port, keys=second):
            pass


def test_what_is_refused(capsys, home, robot, tmp_path):
    assert f"no keys in {home}" in run(capsys, "list")
    assert "`serl-chunk keys init`" in run(capsys, "add", "left", status=2)
    assert f"made in {home}" in run(capsys, "init")
    assert "holds a learner's keys" in run(capsys, "init", status=2)
    for name in ("", "../left", "x" * 65):
        assert "key name" in run(capsys, "add", "--", name, status=2)
    assert "has no key named 'left'; it has: this-machine" in run(capsys, "revoke", "left", status=2)
    word = word_of(run(capsys, "add", "left"))
    assert "the line is not complete" in run(capsys, "join", word[:-3], "--keys", robot, status=2)
    (tmp_path / "file").write_text("")
    assert "cannot be used" in run(capsys, "init", "--keys", str(tmp_path / "file"), status=2)
    (home / "server.json").chmod(0o644)
    assert f"chmod 600 {home / 'server.json'}" in run(capsys, "list", status=2)


def test_no_command_prints_a_secret_but_the_line(capsys, home, robot, port):
    outputs = [run(capsys, "list")]
    word = invited(capsys, port)
    outputs += [run(capsys, "join", word, "--keys", robot), run(capsys, "list", "--keys", robot)]
    outputs.append(run(capsys, "init", "--keys", robot + "_of_another"))
    [own] = ClientKeys.all(Path(robot))
    secrets = (ServerKeys.open(home).pair.secret, own.pair.secret, JoinToken.decode(word).ticket,
               ServerKeys.open(Path(robot + "_of_another")).pair.secret)  # fmt: skip
    assert not any(s in text for s in secrets for text in outputs)


def test_a_learner_makes_keys_and_prints_a_line_until_a_robot_has_joined(home, capsys, caplog):
    caplog.set_level("INFO", "serl_chunk")

    def start() -> tuple[ServerKeys, str]:
        caplog.clear()
        keys = commands.learner_keys("0.0.0.0", None, insecure=False)
        assert keys is not None
        commands.invite_first(keys, "0.0.0.0", 7000)
        return keys, capsys.readouterr().out

    keys, out = start()
    assert f"made in {home}" in caplog.text
    assert word_of(out) not in caplog.text  # a log file would keep the secret
    invitation = JoinToken.decode(word_of(out))
    assert (invitation.name, invitation.port, invitation.server) == ("robot", 7000, keys.pair.public)
    again, out = start()
    assert again.pair == keys.pair  # no robot has joined: another line, which replaces the first
    assert caplog.messages == []
    second = ClientKeys.accept(home, JoinToken.decode(word_of(out)))
    assert keys.enrol(ClientKeys.accept(home, invitation).ticket.public, second.pair.public) is None
    assert keys.enrol(second.ticket.public, second.pair.public) == "robot"
    assert start()[1] == ""
    assert caplog.messages == []


def test_a_learner_has_keys_where_it_needs_them_or_is_told_so(home, tmp_path, capsys):
    assert commands.learner_keys(HERE, None, insecure=False) is None
    assert commands.learner_keys("0.0.0.0", None, insecure=True) is None
    assert not home.exists()
    keys = commands.learner_keys(HERE, str(tmp_path / "k"), insecure=False)
    commands.invite_first(keys, HERE, 5588)
    assert (keys.folder, capsys.readouterr().out) == (tmp_path / "k", "")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=naming("--bind", "0.0.0.0", tmp_path / "file", "--keys", "--insecure")):
        commands.learner_keys("0.0.0.0", str(tmp_path / "file"), insecure=False)
    everywhere = commands.addresses("0.0.0.0")  # where its line says that it is
    assert everywhere == commands.addresses("::") == commands.addresses("*") != []
    assert "0.0.0.0" not in everywhere
    assert commands.addresses("10.0.0.5") == ["10.0.0.5"]


def test_an_actor_has_the_name_of_its_key_and_no_other(capsys, home, robot, port):
    run(capsys, "join", invited(capsys, port), "--keys", robot)  # at a free port: no learner answers there
    asked = commands.actor_keys(HERE, robot, insecure=False)
    assert commands.actor_name(None, asked, HERE) == commands.actor_name("left", asked, HERE) == "left"
    with pytest.raises(ConfigError, match=naming("--actor_id=right", "'left'", asked.file, "keys add right")):
        commands.actor_name("right", asked, HERE)
    [unasked] = ClientKeys.all(Path(robot))
    with pytest.raises(ConfigError, match=naming("--actor_id=right")):
        commands.actor_name("right", unasked, "203.0.113.7")
    assert commands.actor_name("right", unasked, HERE) == "right"  # the learner may use no keys there
    [own] = ClientKeys.all(home)  # of the learner's own machine: it names no robot
    assert commands.actor_name(None, own, HERE) == commands.actor_name(None, None, HERE) == "actor"
    assert commands.actor_name("right", own, "203.0.113.7") == "right"


def test_one_key_for_all_machines_of_a_fleet(capsys, home, port):
    said = run(capsys, "add", "--fleet", "sim", "--host", HERE, "--port", str(port))
    folder = home / "fleets" / "sim"
    assert str(folder) in said
    [keys] = ClientKeys.all(folder)
    assert keys.pair.secret not in said
    assert keys.pair.secret not in "".join(p.read_text() for p in (home / "allowed").iterdir())
    assert "joined" in run(capsys, "list")
    with serving(port, keys=ServerKeys.open(home)) as server, linked(port, keys=keys, actor_id="sim-1") as first:
        with linked(port, keys=keys, actor_id="sim-b"):
            assert {s.info.actor_id for s in server.sessions()} == {"sim-1", "sim-b"}
        with linked(port, keys=keys, actor_id="left", connect=False) as link, pytest.raises(RefusedError) as refused:
            link.connect(timeout=10)
        assert "the key 'sim' admits actors 'sim-*', got 'left'" in str(refused.value)
        run(capsys, "revoke", "sim")
        eventually(lambda: first.error is not None)
        assert "was revoked" in str(first.error)
    run(capsys, "add", "--fleet", "sim", "--actors", "s-*")  # another, in the place of the revoked one
    assert ClientKeys.all(folder)[0].pair != keys.pair
    for wrong in (["left", "--fleet", "a"], [], ["left", "--actors", "a-*"], ["--fleet", "a", "--actors", "left"],
                  ["--fleet", "sim"], ["--fleet", "../a"], ["--fleet", "a", "--actors", "[ab]*"]):  # fmt: skip
        run(capsys, "add", *wrong, status=2)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_NAME": "sim-7d9f-x2"}, "sim-7d9f-x2"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_NAME": "actors-0"}, "sim-actors-0"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_PROCID": "0"}, "sim-3"),
        ({"SLURM_PROCID": "0"}, "sim-0"), ({"RANK": "7"}, "sim-7"), ({}, None),
    ],
)  # fmt: skip
def test_an_actor_of_a_fleet_is_named_by_where_it_runs(capsys, home, port, monkeypatch, environment, name):
    run(capsys, "add", "--fleet", "sim")
    keys = commands.actor_keys(HERE, str(home / "fleets" / "sim"), insecure=False)
    monkeypatch.setattr(commands.os, "environ", environment)
    if name is None:
        with pytest.raises(ConfigError, match="no pod, array index or rank"):
            commands.actor_name(None, keys, HERE)
    else:
        assert commands.actor_name(None, keys, HERE) == name
    assert commands.actor_name("sim-z", keys, HERE) == "sim-z"
    with pytest.raises(ConfigError, match="expected sim-"):
        commands.actor_name("left", keys, HERE)
