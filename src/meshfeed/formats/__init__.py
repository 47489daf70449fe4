"""Formats of token stores and kinds of tokenizers. Each is registered as an entry point; see `store.open`."""
