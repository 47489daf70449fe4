"""The fetcher: a light process that reads from storage for one reading process.

protocol has the channel and the reader's side of it. start is the script that becomes a fetcher, and process
answers requests: objects are what it serves, schedule decides what to fetch next, and pace how much at once.
"""
