"""The command line: one file per command, `main` puts them together."""
