"""What the documents say is tried: commands are parsed, examples run, settings and links looked up."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import pkgutil
import re
import runpy
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from serl_chunk import cli as command_modules
from serl_chunk import main as command_line
from serl_chunk.agents.registry import IMPLEMENTATIONS
from serl_chunk.cli import training
from serl_chunk.cli.commands import COMMANDS, word_of
from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.config.robots import (
    AlohaConfig,
    AlohaSimConfig,
    FakeAlohaConfig,
    FakeSingleArmConfig,
    FrankaConfig,
    GymConfig,
    LiberoConfig,
    OgbenchConfig,
    RobomimicConfig,
)
from serl_chunk.data.demos import load_demos
from serl_chunk.robots.registry import robot_spec
from serl_chunk_robot.main import READING, REQUESTS
from serl_chunk_robot.robot_file.config import load as load_robot

ROOT = Path(__file__).resolve().parents[1]
DOCS = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIAL = ROOT / "docs" / "your_robot.md"
# Pages whose commands use the files that they show. tests/system/test_tutorial.py runs those of tutorial.md.
WITH_FILES = (TUTORIAL, ROOT / "docs" / "pi0.md", ROOT / "docs" / "tutorial.md")
SERVING = ROOT / "docs" / "serving.md"  # tests/cli/test_serve.py runs its scripts
DATA = ROOT / "docs" / "data.md"  # tests/data/formats/test_formats.py runs its lines
LANGUAGES = {"console", "bash", "python", "toml", "text"}  # text is not tried: pictures and fragments
NAMES = (ROOT / "tests" / "data" / "acrlpd_pi0_names.txt").read_text().split("\n")[:-1]  # published, each in a table
# Of the programs the documents compare ours with, and of pip.
FOREIGN_FLAGS = {"--successes_needed", "--dataset_type", "--max_episode_steps", "--num_episodes", "--no-deps",
                 *(name for name in NAMES if name.startswith("--"))}  # fmt: skip
DEEPER = {  # module of serl_chunk -> what of it a command line starts once it has read its settings
    "cli.local": "run_local", "fleet.local": "run_both", "cli.learner": "run_learner run_offline dry_run",
    "cli.evaluation": "run_evaluation", "cli.actor": "run_training_actor", "cli.record": "run_record",
    "runs.report.report": "build_report", "cli.doctor.doctor": "run_doctor", "cli.serve": "run_serve",
}  # fmt: skip
TO_THERE = {  # commands; others stop
    "config", "new", "experiments", "presets", "report", "record", "teleoperate", "serve", "doctor",
}  # fmt: skip
STUBBED = [(name, function) for name, functions in DEEPER.items() for function in functions.split()] + [
    (f"cli.{command.module}", f"{word_of(name)}_command")
    for name, command in COMMANDS.items()
    if command.module and name not in TO_THERE
]
every_page = pytest.mark.parametrize("doc", DOCS, ids=lambda d: str(d.relative_to(ROOT)))


class Block(NamedTuple):
    doc: Path
    language: str
    text: str

    @property
    def file(self) -> str:
        """The name in the first line of a Python block, `# name.py`; empty where there is none."""
        match = re.match(r"# (\w+\.py)\n", self.text)
        return match[1] if match else ""


def blocks(doc: Path) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", doc.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(doc, language, text) for language, text in found]


def prose(doc: Path) -> str:
    return re.sub(r"^```.*?^```$", "", doc.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands() -> Iterator[tuple[str, list[str]]]:
    """(document, words) of every command shown; in console blocks only lines behind a `$` are commands."""
    for block in (b for doc in DOCS for b in blocks(doc)):
        if block.language not in ("console", "bash"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            if block.language == "console" and not line.startswith("$ "):
                continue
            yield block.doc.name, shlex.split(line.removeprefix("$ "), comments=True)


def commands_of(program: str) -> list[Any]:
    found = [(doc, words[1:]) for doc, words in commands() if words and Path(words[0]).name == program]
    return [pytest.param(words, id=f"{doc}: {' '.join(words)[:90]}") for doc, words in found]


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of `WITH_FILES`, under the names that the pages give them."""
    folder = tmp_path_factory.mktemp("tutorial")
    assert command_line.main(["new", str(folder / "reach.py")]) == 0
    for block in (b for page in WITH_FILES for b in blocks(page)):
        if block.file:
            (folder / block.file).write_text(block.text)
    # A page of pi0 says where its tokenizer is from.
    shutil.copy(ROOT / "tests" / "data" / "pi0_transforms" / "tiny_spm.model", folder / "paligemma_tokenizer.model")
    return folder


class Calls(list[tuple[str, dict[str, Any]]]):
    """(function, arguments by name) of the commands that were called instead of run."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replaces what the command line starts; the real signatures are kept, so that a wrong call fails."""
    made = Calls()
    # A module that is imported for the first time while a stub is in place would keep it for ever.
    for module_of_commands in pkgutil.walk_packages(command_modules.__path__, f"{command_modules.__name__}."):
        importlib.import_module(module_of_commands.name)

    def stub(name: str, real: Callable[..., Any]) -> Callable[..., int]:
        def called(*args: Any, **kwargs: Any) -> int:
            made.append((name, inspect.signature(real).bind(*args, **kwargs).arguments))
            return 0

        return called

    for name, function in STUBBED:
        module = importlib.import_module(f"serl_chunk.{name}")
        monkeypatch.setattr(module, function, stub(function, getattr(module, function)))
    return made


def test_every_block_says_what_it_is_and_only_known_programs_are_shown():
    found = {(b.doc.name, b.language) for doc in DOCS for b in blocks(doc)}
    assert [each for each in found if each[1] not in LANGUAGES] == []
    assert {language for _, language in found} >= {"console", "python", "text"}
    known = {"serl-chunk", "make", "python", "python3", "pip", "source"}
    assert {Path(words[0]).name for _, words in commands()} == known


# Commands of a robot's server reach for one: tests/system/test_tutorial.py runs them.
@pytest.mark.parametrize("words", [p for p in commands_of("serl-chunk") if p.values[0][0] != "robot"])
def test_serl_chunk_accepts(
    words: list[str], calls: Calls, tutorial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path if words[0] == "new" else tutorial)  # the tutorial's own file is there already
    assert command_line.main([str(ROOT / w) if w.startswith("examples/") else w for w in words]) == 0
    if words[0] == "new":
        assert list(tmp_path.iterdir()) == [tmp_path / words[1]]
        return
    name, arguments = calls.pop()
    assert not calls
    if name == "run_both":  # what the two processes will be given
        shared = arguments["arguments"]
        assert command_line.main([*shared, "--learner"]) == command_line.main([*shared, "--actor"]) == 0
        assert [name for name, _ in calls] == ["run_learner", "run_training_actor"]
    elif name.endswith("_command"):
        assert name == f"{word_of(words[' '.join(words[:2]) in COMMANDS])}_command"
    elif name != "build_report":
        assert isinstance(arguments["config"], ExperimentConfig)


def test_robot_files_are_valid(tmp_path: Path):
    """Those of a page are one file, its first block first."""
    text = "\n".join(b.text for doc in DOCS for b in blocks(doc) if b.language == "toml")
    file = tmp_path / "robot.toml"
    file.write_text(text)
    (tmp_path / "keys").mkdir()
    loaded = load_robot(file)
    assert loaded.profiles["exploring"].limits.rates.velocity[0] == 1.5


def test_make_has_the_targets_scripts_the_flags_and_pip_the_extras():
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    for words in (p.values[0] for p in commands_of("make")):
        for variable, equals, _ in (word.partition("=") for word in words):
            assert re.search(rf"^{variable} \?=" if equals else rf"^{variable}:", makefile, re.MULTILINE), variable
    for words in (p.values[0] for p in commands_of("python")):
        source = (ROOT / words[0]).read_text()
        for call, module in (("learning.parser(", "learning"), ("_parser(", "cli_args")):
            source += (ROOT / "benchmarks" / "support" / f"{module}.py").read_text() if call in source else ""
        for flag in (w for w in words[1:] if w.startswith("--")):
            shared = flag == "--set" and "add_settings(" in source
            assert shared or f'add_argument("{flag}"' in source, flag
    for words in (p.values[0] for p in commands_of("pip")):
        assert (ROOT / words[words.index("-c") + 1]).is_file()
        package, extras = re.fullmatch(r"(\.|jax)\[(.*)\]", words[-1]).groups()
        for extra in extras.split(",") if package == "." else ():
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_the_printed_help_is_accepted(calls: Calls, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    text = training.EXAMPLES + training.MORE_EXAMPLES
    lines = re.findall(r"serl-chunk (--exp_name .*)", re.sub(r"\\\n +", "", text))
    for line in lines:
        assert command_line.main(shlex.split(line)) == 0, line
    assert len(calls) == len(lines) >= 4


def python_blocks() -> list[Any]:
    found = [b for doc in DOCS for b in blocks(doc) if b.language == "python"]
    return [pytest.param(b, id=f"{b.doc.name}: {b.file}") for b in found]


@pytest.mark.parametrize("block", python_blocks())
def test_python_examples_compile_and_have_a_name(block: Block):
    assert block.file, "name the file in the first line"
    compile(block.text, block.file, "exec")
    assert block.doc in (TUTORIAL, SERVING, DATA) or "def experiment()" in block.text, "another page: it is not run"


@pytest.mark.parametrize("block", [p for p in python_blocks() if "def experiment()" in p.values[0].text])
def test_experiment_examples_load(block: Block, tmp_path: Path):
    (tmp_path / block.file).write_text(block.text)
    config = load_experiment(str(tmp_path / block.file))
    reach = config.discount ** robot_spec(config.robot).max_episode_steps
    assert 0.1 < reach < 0.4  # what the documents advise


@pytest.mark.system
def test_the_tutorial_runs_end_to_end(
    tutorial: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tutorial)
    for block in blocks(TUTORIAL):
        if block.file and "def experiment()" not in block.text:
            runpy.run_path(block.file, run_name="__main__")
    recording = next(
        p.values[0] for p in commands_of("serl-chunk") if "demos/reach" in p.id and "--policy human" in p.id
    )
    assert command_line.main(recording) == 0
    assert run_record(**calls.pop()[1]) == 0
    demos = load_demos(["demos/reach"], robot_spec(load_experiment("reach.py").robot))
    assert len(demos.episodes) == 5
    assert all(e.end.terminated and e.steps.reward[-1] == 1 for e in demos.episodes)

    training = next(p.values[0] for p in commands_of("serl-chunk") if "reach.py" in p.values[0] and "--local" in p.id)
    assert command_line.main(training) == 0
    arguments = calls.pop()[1]
    small = [("batch_size", 16), ("pretrain_steps", 20), ("max_steps", 4),
             ("warmup_episodes", 3), ("training_starts", 0), ("utd_ratio", 0.1)]  # fmt: skip
    tiny = [("agent.critic.hidden", "8"), ("agent.critic.ensemble", "2"),
            ("agent.flow.hidden", "8"), ("agent.flow.steps", "1"), ("agent.policy_updates", "1")]  # fmt: skip
    config = apply_overrides(arguments["config"], [*((f"learner.{k}", str(v)) for k, v in small), *tiny])
    learner, summary = train_local(config, arguments["options"])
    assert learner.updates == 4
    assert summary.episodes >= 3
    assert summary.delivered
    assert learner.checkpoints.steps() == [0, 4]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@every_page
def test_links_lead_somewhere(doc: Path):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(doc))
    for link in links:
        assert not link.startswith("/")
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (doc.parent / path).resolve() if path else doc
        assert target.is_file(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE)
            assert anchor in map(slug, headings), link


@functools.cache
def sources() -> str:
    return "\n".join(p.read_text() for room in ("serl_chunk", "experiments") for p in (ROOT / room).rglob("*.py"))


def test_published_names_lead_to_ours():
    """Tables that give for published names what has their place here, or why there is none."""
    text = (ROOT / "docs" / "algorithms" / "published_names.md").read_text()
    tables = re.findall(r"^\| published \| here \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row[2:-2].split(" | ") for table in tables for row in table.splitlines()]
    assert len(rows) > 150
    listed = {name for published, _ in rows for name in re.findall(r"`([^`]+)`", published)}
    assert set(NAMES) - listed == set()
    words = set(re.findall(r"\w+", sources()))
    for published, ours in rows:
        named = {word for code in re.findall(r"`([^`]+)`", ours) for word in re.findall(r"[a-zA-Z]\w*", code)}
        assert named or ours.startswith("none: "), published
        assert named <= words, published


def test_tests_that_pages_name_exist():
    named = {name for doc in DOCS for name in re.findall(r"`(test_\w+)`", prose(doc))}
    tests = " ".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 30
    assert named - set(re.findall(r"\bdef (test_\w+)", tests)) == set()


def test_sections_that_the_code_refers_to_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    numbered = {int(n) for n in re.findall(r"^## (\d+) ", text, re.MULTILINE)}
    assert numbered == set(range(1, len(numbered) + 1))
    referred = {int(n) for n in re.findall(r"docs/architecture\.md, section (\d+)", sources())}
    assert referred
    assert referred <= numbered
    for path in set(re.findall(r"\bdocs/\w+\.md", sources())):
        assert (ROOT / path).is_file(), path


def paths(cls: type) -> set[str]:
    """The settings of a part, `critic.hidden`, and their groups, `critic`."""
    out = set()
    for field in dataclasses.fields(cls):
        nested = field.default_factory if dataclasses.is_dataclass(field.default_factory) else None
        out |= {field.name} | ({f"{field.name}.{path}" for path in paths(nested)} if nested else set())
    return out


@functools.cache
def groups() -> dict[str, set[str]]:
    """`learner -> {batch_size, ...}` for every part of an experiment; all kinds of agents and robots together."""
    out = {}
    base = load_experiment("fake_aloha")
    robots = (FakeAlohaConfig, FakeSingleArmConfig, AlohaConfig, AlohaSimConfig, FrankaConfig, LiberoConfig,
              OgbenchConfig, RobomimicConfig, GymConfig)  # fmt: skip
    kinds = {"agent": tuple(IMPLEMENTATIONS), "robot": robots}
    for field in dataclasses.fields(base):
        classes = kinds.get(field.name, (type(getattr(base, field.name)),))
        if all(dataclasses.is_dataclass(c) for c in classes):
            out[field.name] = {path for c in classes for path in paths(c)}
    return out


@every_page
def test_settings_exist(doc: Path):
    known = groups()
    # A section of ablations.md has the figures of options that are gone.
    text = re.sub(r"^## Removed options$.*?(?=^## )", "", prose(doc), flags=re.DOTALL | re.MULTILINE)
    pattern = (
        rf"`(?:--config\.)?({'|'.join(known)})\.(?!(?:py|log|toml)\b)([a-z][a-z0-9_.]*)"  # `transport.py` is a file
    )
    for group, name in re.findall(pattern, text):
        assert name in known[group], f"{group}.{name}"


@every_page
def test_metrics_exist(doc: Path):
    named = re.findall(r"`(?:critic|actor|replay|wait|rates|timer|group)/(?!mean_weight_)(\w+)`", prose(doc))
    assert set(named) - set(re.findall(r"\w+", sources())) == set()


@pytest.fixture(scope="module")
def flags() -> set[str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert command_line.main(["--help_all"]) == 0
        robots = (f"robot {word}" for word in (*REQUESTS, *READING, "new", "check", "teach", "serve", "keys"))
        for name in (*(name for name, command in COMMANDS.items() if command.module), *robots):
            with pytest.raises(SystemExit):
                command_line.main([*name.split(), "--help"])
    known = {"--config", *FOREIGN_FLAGS, *re.findall(r"--[a-z][a-z_-]*[a-z]", printed.getvalue())}
    scripts = "".join(script.read_text() for script in (ROOT / "benchmarks").rglob("*.py"))
    return known | set(re.findall(r'add_argument\("(--[\w-]+)"', scripts))


@every_page
def test_flags_exist(doc: Path, flags: set[str]):
    inline = " ".join(re.findall(r"`([^`]+)`", prose(doc)))
    assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", inline)) - flags == set()


def test_every_benchmark_is_described():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    listed = set(re.findall(r"^\| `(\w+\.py)` \|", text, re.MULTILINE))
    scripts = {p.name for p in (ROOT / "benchmarks").glob("*.py")}
    assert listed == scripts  # what is no command lies in benchmarks/support
    assert [name for name in scripts if '__name__ == "__main__"' not in (ROOT / "benchmarks" / name).read_text()] == []


def test_no_benchmark_has_the_name_of_an_experiment():
    """Both folders may be on `sys.path`, where one would hide the other."""
    experiments = {p.name for p in (ROOT / "experiments").glob("*.py")}
    assert "fake_aloha.py" in experiments
    assert experiments & {p.name for p in (ROOT / "benchmarks").rglob("*.py")} == {"__init__.py"}
