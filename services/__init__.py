"""The four services: generator, rewarder, sessions and trainer. They exchange messages and never import each other."""
