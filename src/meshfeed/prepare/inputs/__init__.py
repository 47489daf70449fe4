"""Paths, globs, folders and URLs -> files -> records, and the images, audio and video that records name."""
