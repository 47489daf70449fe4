"""Real servers for tests, each a context manager that leaves nothing behind."""
