"""Feeds inside training loops that belong to others: one module per framework, imported by who uses it.

`loader` has what they share. No other part of meshfeed imports from here.
"""
