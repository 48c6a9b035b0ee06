"""The three services. They never import each other; they meet on the wire (see ``shared``)."""
