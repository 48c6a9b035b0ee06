"""The three services. They never import each other; they communicate by messages (see ``shared``)."""
