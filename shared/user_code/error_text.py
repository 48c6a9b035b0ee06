"""Describes exceptions of user code, whatever their ``__str__`` does."""

import traceback

MAX_DETAIL_CHARS = 300
_MAX_TRACE_CHARS = 16_384


def describe(error: BaseException) -> str:
    """Return the type and message of an exception in user code, at most MAX_DETAIL_CHARS characters."""
    message = message_of(error)
    return printable(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def message_of(error: BaseException) -> str:
    """Return the message of an exception in user code, or a placeholder if its ``__str__`` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  user code: __str__ may do anything
        return "(its message cannot be shown)"


def users_trace(error: BaseException) -> str:
    """Return an exception's last 8 frames and its message, without our own frame. A long text loses its middle."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    trace = "".join(traceback.format_exception(type(error), error, frames, limit=-8))
    if len(trace) > _MAX_TRACE_CHARS:
        half = _MAX_TRACE_CHARS // 2
        trace = f"{trace[:half]}\n[...]\n{trace[-half:]}"
    return encodable(trace)


def origin_of(error: BaseException) -> str:
    """Return the type of an exception in user code, and the file and line that raised it, without its message."""
    last = traceback.extract_tb(error.__traceback__, limit=-1)
    where = f" at {last[0].filename}:{last[0].lineno}" if last else ""
    return encodable(f"{type(error).__name__}{where}")


def printable(text: str) -> str:
    """Return at most ``MAX_DETAIL_CHARS`` characters of ``text``. Escapes characters that UTF-8 cannot encode."""
    return encodable(at_most(MAX_DETAIL_CHARS, text))


def encodable(text: str) -> str:
    """Return ``text`` with the characters escaped that UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def at_most(num_characters: int, text: str) -> str:
    """Return the beginning of ``text``, with ``...`` if it was cut."""
    return text if len(text) <= num_characters else f"{text[: num_characters - 3]}..."
