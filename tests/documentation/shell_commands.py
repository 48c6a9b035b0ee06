"""Takes shell text apart into its simple commands, those inside ``$(...)`` included. Nothing is run."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

SUBSTITUTED = "SUBSTITUTED"
"""Stands for the output of a ``$(...)`` in a word."""
_KEYWORDS = frozenset({"do", "done", "then", "else", "fi", "if", "while", "until", "{", "}", "!", "(", ")"})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_REDIRECTION = re.compile(r"\d?(?:>>?|<)(&\d)?")


@dataclass(frozen=True)
class ShellCommand:
    """A simple command: ``variables`` set before it, then the program and its arguments."""

    words: tuple[str, ...]
    variables: tuple[str, ...]


def commands_in(text: str) -> Iterator[ShellCommand]:
    """Return the commands in the order in which they are written."""
    for piece, substitutions in _pieces(text.replace("\\\n", " ")):
        words = [word for word in shlex.split(piece) if not re.fullmatch(r"\w+\(\)", word)]
        while words and words[0] in _KEYWORDS:
            del words[0]
        if words[:1] == ["for"]:
            words = []
        words = _without_redirections(words)
        variables: list[str] = []
        while words and (found := _ASSIGNMENT.fullmatch(words[0])):
            variables.append(found[1])
            del words[0]
        if words[:1] == ["export"]:
            variables += [word.partition("=")[0] for word in words[1:]]
        if words or variables:
            yield ShellCommand(tuple(words), tuple(variables))
        for inner in substitutions:
            yield from commands_in(inner)


def _without_redirections(words: list[str]) -> list[str]:
    kept: list[str] = []
    is_target = False
    for word in words:
        found = _REDIRECTION.match(word)
        if not is_target and not found:
            kept.append(word)
        is_target = found is not None and found[0] == word and found[1] is None
    return kept


def _pieces(text: str) -> Iterator[tuple[str, list[str]]]:
    """Split at separators outside quotes. A ``$(...)`` becomes a word, and its text is returned beside the piece."""
    piece, inner, quote, at = "", [], "", 0
    while at < len(text):
        char = text[at]
        if quote != "'" and text.startswith("$(", at):
            end = _end_of_substitution(text, at + 2)
            inner.append(text[at + 2 : end])
            piece, at = piece + SUBSTITUTED, end + 1
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (not piece or piece[-1].isspace()):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        elif char == "\n" or text[at : at + 2] in ("&&", "||") or char in ";|" or _is_background(text, at):
            yield piece, inner
            piece, inner = "", []
            at += 2 if text[at : at + 2] in ("&&", "||") else 1
            continue
        piece, at = piece + char, at + 1
    yield piece, inner


def _is_background(text: str, at: int) -> bool:
    return text[at] == "&" and text[at - 1 : at] != ">"


def _end_of_substitution(text: str, at: int) -> int:
    """Return the place of the parenthesis that closes the one before ``at``."""
    depth, quote = 1, ""
    while depth:
        char = text[at]
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            depth += {"(": 1, ")": -1}.get(char, 0)
        at += 1
    return at - 1
