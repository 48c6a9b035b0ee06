"""One line a log event, for people on a terminal and for machines in a container."""

import json
import logging
import sys
import time


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object on one line, whatever the message contains."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        event = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


def configure_logging(level: str) -> None:
    """Send every log record to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
