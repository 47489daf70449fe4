"""Paths, globs, folders and URLs -> files -> records, and the images and audio that records name."""
