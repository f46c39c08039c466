"""Matches error messages by the parameter and the value that they name, not by their sentences."""

from __future__ import annotations

import re


def naming(*named: object) -> str:
    """Build a pattern for `pytest.raises(..., match=...)`.

    Args:
        named: what the message must contain, each as a whole word, number or phrase, in any order: the parameter,
            file or field at fault, and the offending value.

    Returns:
        A regular expression that matches at the beginning of such a message alone.
    """
    assert named, "name at least the parameter"
    return r"(?s)\A" + "".join(f"(?=.*{_whole(str(word))})" for word in named)


def _whole(word: str) -> str:
    number = re.fullmatch(r"-?[\d.]+(e-?\d+)?", word)
    before = r"(?<![\w.-])" if number else r"(?<!\w)" if re.match(r"\w", word) else ""
    after = r"(?!\w|\.\d)" if number else r"(?!\w)" if re.search(r"\w\Z", word) else ""
    return before + re.escape(word) + after
