"""The run API: what people and programs ask of the trainer service. It never imports torch."""
