"""Remote storage: one client, how it asks (retries), what errors mean (errors).

hub reads datasets of the Hugging Face Hub, whose URLs hub_url takes apart. obstore does not survive a fork,
so a reading process leaves all this to its fetcher.
"""
