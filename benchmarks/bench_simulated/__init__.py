"""How group rate, Redis memory and Redis CPU go with the number of generator replicas; the replicas are simulated."""
