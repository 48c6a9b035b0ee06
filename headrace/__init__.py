"""What a user touches: command line, HTTP client, local launcher."""
