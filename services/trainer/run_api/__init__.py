"""The run API: the HTTP interface of the trainer service. Never imports torch."""
