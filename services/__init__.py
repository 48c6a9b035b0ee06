"""The four services. They never import each other; they communicate by messages (see ``shared``)."""
