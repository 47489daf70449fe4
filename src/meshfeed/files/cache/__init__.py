"""The node's cache: its folder (cache, owned_folder) and what lies in it (blocks)."""
