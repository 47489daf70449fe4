"""Feeds for the training loops of other frameworks: one module per framework, which users import.

`loader` and `config` are what they share. No other part of meshfeed imports from here.
"""
