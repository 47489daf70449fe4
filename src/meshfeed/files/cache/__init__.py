"""The node's cache: its folder (cache, owned_folder), blocks of objects, and entries made once."""
