"""`headrace rewards check`: tries one reward function on rows of a data set, without a run or services."""
