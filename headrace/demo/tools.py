"""The tool of the demo's second task: it reverses a text, which the model itself does badly."""


def reverse(text: str) -> str:
    """Write a text backwards.

    Args:
        text: The text to reverse.

    Returns:
        The text with its characters in reverse order.
    """
    return text[::-1]
