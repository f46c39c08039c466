"""Which messages `benchmarks/mutate_errors.py` replaces, and how it finds them again in a tree that was moved about."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import mutate_errors

SOURCE = """
class SerlChunkError(Exception): ...
class DataError(SerlChunkError, ValueError): ...
class Odd(DataError): ...
class Other(Exception): ...

def read(path):
    if not path:
        raise ValueError("ä path is needed", 1)
    try:
        raise Odd(
            f"{path}: is empty, "
            f"give {path!r} another"
        ) from None
    except KeyError:
        raise Other("not ours")

class Reader:
    def close(self):
        raise DataError("closed twice")
    def open(self, name):
        raise DataError(name)
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "serl_chunk" / "data").mkdir(parents=True)
    (tmp_path / "serl_chunk" / "data" / "reading.py").write_text(SOURCE)
    return tmp_path


def test_errors_with_a_text_are_found_and_replaced(tree):
    found = mutate_errors.raises(tree)
    assert [(r.function, r.index, r.error) for r in found] == [
        ("read", 0, "ValueError"), ("read", 1, "Odd"), ("Reader.close", 0, "DataError"),
    ]  # fmt: skip
    names: dict = {}
    exec(mutate_errors.mutated(SOURCE, dict(enumerate(found))), names)
    with pytest.raises(ValueError, match=r"\('MUTANT 0 message', 1\)"):
        names["read"]("")
    with pytest.raises(names["Odd"], match=r"\AMUTANT 1 message\Z"):
        names["read"]("a")
    with pytest.raises(names["DataError"], match=r"\AMUTANT 2 message\Z"):
        names["Reader"]().close()


def test_a_choice_is_found_by_its_text_in_another_file_and_under_another_name(tree):
    saved = [r.to_json() for r in mutate_errors.raises(tree)]
    (tree / "serl_chunk" / "data" / "reading.py").unlink()
    (tree / "serl_chunk" / "moved.py").write_text(
        SOURCE.replace("path", "file").replace("Odd", "Even").replace("ä file", "ä path").replace("twice", "again")
    )
    first, second, third = mutate_errors.located(saved, mutate_errors.raises(tree))
    assert (first.index, second.index, third) == (0, 1, None)
    assert (second.error, second.file.stem) == ("Even", "moved")


def test_both_packages_have_messages():
    """The base of all errors is in one of them, and most errors are in the other."""
    root = Path(mutate_errors.__file__).parents[1]
    found = {(r.file.parts[0], r.error) for r in mutate_errors.raises(root)}
    assert {("packages", "WireError"), ("packages", "ConfigError"), ("serl_chunk", "DataError")} <= found


def test_equal_messages_are_told_apart_by_their_function(tree):
    extra = SOURCE + "\ndef close():\n    raise DataError('closed twice')\n"
    (tree / "serl_chunk" / "data" / "reading.py").write_text(extra)
    there = mutate_errors.raises(tree)
    assert mutate_errors.located([r.to_json() for r in there], there) == there
    strange = there[-1].to_json() | {"function": "elsewhere"}
    assert mutate_errors.located(
        [strange], [r._replace(file=Path(f"{i}.py"), index=7) for i, r in enumerate(there)]
    ) == [None]
