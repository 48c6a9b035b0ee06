"""Files that clients upload for their runs: data sets, models and Python modules."""
