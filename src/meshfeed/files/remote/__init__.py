"""Remote storage: the client, its retries (retries), and what errors mean (errors).

hub reads datasets of the Hugging Face Hub, whose URLs hub_url parses. obstore does not survive a fork,
so a reading process leaves all this to its fetcher.
"""
