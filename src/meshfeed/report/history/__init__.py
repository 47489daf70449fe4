"""A run's log as one page.

Read in this order: `waits` (who waited for what), `axis` (steps -> columns, ranks -> rows), `cells` (the
largest of each), `series` (the job over time), `summary` (in words and figures), `page`.
"""
