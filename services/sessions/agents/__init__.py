"""Users' agent programs: Python functions in killable worker processes, or programs behind a URL."""
