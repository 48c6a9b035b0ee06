"""The pair of the trainer's `push`: receives weights, and swaps them in."""
