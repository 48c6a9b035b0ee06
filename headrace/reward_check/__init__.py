"""`headrace rewards check`: one reward function on rows of a data set, without a run and without services."""
