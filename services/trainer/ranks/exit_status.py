"""What a training rank, and the launcher of several, tells the run API by the way it ends."""

ENDED = 0
"""The run is over."""
CRASHED = 1
"""Start me again; after SIGTERM too."""
REFUSED = 2
"""The run cannot go on; the reason is in its record or in the log."""
FENCED = 3
"""A newer incarnation owns the run."""
