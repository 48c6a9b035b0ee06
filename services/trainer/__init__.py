"""The trainer service: the run API, which does not import torch, and the training ranks that it starts for each run."""
