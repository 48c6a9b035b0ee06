"""The tool of the benchmark's run. The client plays it itself, by waiting."""


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word
