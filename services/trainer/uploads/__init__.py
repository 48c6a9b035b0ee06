"""Files that clients upload for their runs: data sets and models."""
