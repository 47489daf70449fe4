"""Remote storage: one client (client, and writer for what writes) and its manners (retries, errors).

hub reads from the Hugging Face Hub. obstore does not survive a fork, so a reader leaves this to its fetcher.
"""
