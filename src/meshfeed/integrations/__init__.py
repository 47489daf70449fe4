"""Feeds inside training loops that belong to others: one module per framework, imported by who uses it.

`loader` has what they share. Nothing in meshfeed imports from here, and a framework is imported by the
function that needs it.
"""
