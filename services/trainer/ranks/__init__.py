"""Several training ranks that act as one."""
