"""A job in its folder: cut into parts, each encoded once, merged in order and published."""
