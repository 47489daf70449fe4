"""The node's cache: its folder (cache, owned_folder), blocks of objects, and what one process makes once."""
