"""The fetcher: a light process that reads from storage for one reading process.

protocol is the reader's side. start is the script that becomes a fetcher, and process answers requests:
objects are what it serves, schedule says what it fetches next, and pace how much at once.
"""
