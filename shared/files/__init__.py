"""The file system: places that users may name, files by their content, and writes that survive a power loss."""
