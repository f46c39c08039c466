"""Writes the documents' tables of learning results from the files in `benchmarks/results`.

    python benchmarks/render_results.py
    python benchmarks/render_results.py --check

Replaces the cells of the tables between `<!-- results: NAME -->` and `<!-- end of results -->`; headings and labels are
the document's own. `--check` writes nothing and ends with status 1 where a document and its results differ. What the
cells show is in `support/documented_tables.py`.
"""

from __future__ import annotations

import argparse
import difflib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from support.documented_tables import TABLES
from support.result_tables import MARKED, render, results_of
from support.results import FOLDER, UNKNOWN

from serl_chunk.types import DataError

ROOT = Path(__file__).resolve().parents[1]


def refuse_unknown_code(folder: Path = FOLDER) -> None:
    """Raise DataError where a results file names no commit, or one with changes on top."""
    for file in sorted(folder.glob("*.json")):
        results = results_of(file)
        for name, commit in (("commit", results.commit), ("published", results.published)):
            if commit == UNKNOWN or commit.endswith("-dirty"):
                raise DataError(
                    f"{file}: {name}: {commit!r}, expected a commit without changes. Commit, and run the benchmark "
                    "from that checkout."
                )


def differences(root: Path = ROOT) -> Iterator[tuple[Path, str, str]]:
    """Yield (document, text, text with tables made anew) of each document that differs. Raises DataError."""
    refuse_unknown_code()
    documents = [root / "README.md", root / "benchmarks" / "README.md", *sorted((root / "docs").rglob("*.md"))]
    texts = {document: document.read_text() for document in documents}
    marked = Counter(match[2] for text in texts.values() for match in MARKED.finditer(text))
    if wrong := [name for name in TABLES if marked[name] != 1]:
        raise DataError(
            f"the table {wrong[0]} is marked {marked[wrong[0]]} times, expected once. Put it between "
            f"<!-- results: {wrong[0]} --> and <!-- end of results -->."
        )
    for document, text in texts.items():
        if (made := render(text, TABLES)) != text:
            yield document, text, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a document differs")
    args = parser.parse_args()
    try:
        changed = list(differences())
    except DataError as e:
        raise SystemExit(str(e)) from None
    for path, text, made in changed:
        name = path.relative_to(ROOT)
        if args.check:
            lines = difflib.unified_diff(
                text.splitlines(), made.splitlines(), f"{name}", "from results", n=0, lineterm=""
            )
            print("\n".join(lines))
        else:
            path.write_text(made)
            print(f"{name}: rewritten")
    if args.check and changed:
        raise SystemExit("documents differ from benchmarks/results: run python benchmarks/render_results.py")


if __name__ == "__main__":
    main()
