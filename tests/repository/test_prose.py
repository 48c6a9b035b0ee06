"""Text that people read avoids turns of phrase that slow them down: docstrings, comments, messages and docs.

The counts are an alarm and not a goal: read the sentence, and rewrite it as a whole (CONTRIBUTING.md, "Style").
"""

import ast
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.repository.test_repository import ROOT

pytestmark = pytest.mark.unit

PLACES = ["services", "shared", "headrace", "docs", "README.md", "CONTRIBUTING.md"]
MOST_OVERALL, MOST_IN_A_FOLDER = 1.0, 2.0
"""Turns per 1,000 words."""
_FEWEST_WORDS = 500
"""A folder with fewer words is not judged by itself."""
_SHORTEST_MESSAGE = 25

TURNS = {
    "who or whoever as a subject": (
        r"\b([Ww]hoever|(?<![a-z] )[Ww]ho (is|was|has|asks|reads|writes|stays|runs|wants|left|brings|can|cannot|did|"
        r"does|may|must|knows))\b"
    ),
    "what without a noun": (
        r"(?:^|[.:;,(] ?)[Ww]hat (?:of|is|was|are|has|became|becomes|cannot|can|would|an?|the|it|they|comes|came|does|"
        r"did|others|one|[a-z]+s) "
    ),
    "is no X (is not a X)": r"\b(?:is|are|was|were) (?:no|none)\b(?! (?:longer|more))",
    "has not (does not have)": r"\b(?:has|have) not\b(?! (?:been|yet))(?! [a-z]+ed\b)",
    "alone (only)": r"\b[a-z]+s? alone\b",
    "told of, said of (reported)": r"\b(?:told|said|says|tells) of\b|\b(?:is|are|was|were) (?:told|said)\b",
    "nobody, somebody": r"\b(?:nobody|somebody)\b",
    "a fragment as a definition": r"^\s+[a-z_]+: (?:Of|Its|That|Those|What|Who|By|In|For|From) [^\n]{0,40}\.$",
    "heed, shall": r"\b(?:heed|shall)\b",
    "one that, those that": r"\b(?:[Oo]ne|[Tt]hose) (?:that|who|which|of)\b",
}


def test_no_folder_is_full_of_phrases_that_slow_a_reader_down() -> None:
    turns: dict[str, Counter[str]] = defaultdict(Counter)
    words: Counter[str] = Counter()
    for path in texts():
        folder = str(path.parent) if path.parent != Path() else str(path)
        text = text_of(ROOT / path)
        words[folder] += len(text.split())
        for turn, pattern in TURNS.items():
            for match in re.finditer(pattern, text, flags=re.MULTILINE):
                turns[folder][f"{path}: {turn}: {match.group().strip()!r}"] += 1
    for folder, found in turns.items():
        if words[folder] >= _FEWEST_WORDS:
            rate = 1000 * found.total() / words[folder]
            assert rate <= MOST_IN_A_FOLDER, f"{folder} has {rate:.1f} per 1,000 words:\n" + "\n".join(sorted(found))
    overall = 1000 * sum(found.total() for found in turns.values()) / words.total()
    assert overall <= MOST_OVERALL, f"{overall:.2f} turns of phrase per 1,000 words"


def texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *PLACES], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = [Path(name) for name in listed.split() if name.endswith((".py", ".md")) and (ROOT / name).exists()]
    assert len(found) > len(PLACES)
    return found


def text_of(path: Path) -> str:
    """Return the prose of a page without its code, or the comments and longer strings of a module."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"```.*?```", "", source, flags=re.DOTALL)
    parts = [line.strip() for line in source.splitlines() if line.strip().startswith("#")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts.append("".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > _SHORTEST_MESSAGE:
            parts.append(node.value if " " in node.value else "")
    return "\n".join(parts)
