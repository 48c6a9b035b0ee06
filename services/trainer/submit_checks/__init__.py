"""What is checked before a run is accepted: data set, model, engine, rewards, places."""
