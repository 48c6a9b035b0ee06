"""Whether every loss type learns: the demo task with each of them."""
