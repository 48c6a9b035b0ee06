"""Access to files: paths that users may name, sets of files by content hash, writes that survive a power loss."""
