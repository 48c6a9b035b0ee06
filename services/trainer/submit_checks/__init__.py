"""The checks before a run is accepted: data set, model, engine, rewards, places."""
