"""Exit statuses by which a training rank, or the launcher of several, informs the run API."""

ENDED = 0
"""The run is over."""
CRASHED = 1
"""Start this process again. Also used after SIGTERM."""
REFUSED = 2
"""The run cannot go on; the reason is in its record or in the log."""
FENCED = 3
"""A newer incarnation owns the run."""
