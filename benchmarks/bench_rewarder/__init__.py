"""What the reward service costs, and what it never loses: concurrency, math-verify, hostile answers, a whole run."""
