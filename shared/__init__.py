"""Everything that crosses a process boundary: messages, streams, control bodies, settings, errors."""
