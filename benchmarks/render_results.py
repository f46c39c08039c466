"""Writes the documents' tables of learning results from the files in `benchmarks/results`.

    python benchmarks/render_results.py
    python benchmarks/render_results.py --check

Replaces what is between `<!-- results: NAME -->` and `<!-- end of results -->`. `--check` writes nothing and ends
with status 1 where a document and its results differ. The tables are in `support/documented_tables.py`.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from pathlib import Path

from support.documented_tables import TABLES
from support.result_tables import MARKED, Book, render
from support.results import FOLDER, UNKNOWN

from serl_chunk.types import DataError

ROOT = Path(__file__).resolve().parents[1]


def documents(root: Path = ROOT) -> list[str]:
    """Return the paths from `root` of the documents that have a table or a marker."""
    marked = [p for p in (root / "README.md", root / "benchmarks" / "README.md", *(root / "docs").rglob("*.md"))]
    found = [str(p.relative_to(root)) for p in marked if p.is_file() and MARKED.search(p.read_text())]
    return sorted({*found, *(table.document for table in TABLES.values())})


def refuse_unknown_code(book: Book, folder: Path = FOLDER) -> None:
    """Raise DataError where a results file names no commit, or one with changes on top."""
    for file in sorted(folder.glob("*.json")):
        results = book.file(file.stem)
        for name, commit in (("commit", results.commit), ("published", results.published)):
            if commit == UNKNOWN or commit.endswith("-dirty"):
                raise DataError(
                    f"{file}: {name}: {commit!r}, expected a commit without changes. Commit, and run the benchmark "
                    "from that checkout."
                )


def differences(root: Path = ROOT) -> Iterator[tuple[Path, str, str]]:
    """Yield (document, text, text with tables made anew) of each document that differs. Raises DataError."""
    book = Book()
    refuse_unknown_code(book)
    for name in documents(root):
        text = (root / name).read_text()
        if (made := render(text, name, TABLES, book)) != text:
            yield root / name, text, made


def main() -> None:
    """Rewrite the documents, or compare them."""
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
