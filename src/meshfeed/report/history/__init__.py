"""A run's log as one page.

Read in this order: `waits` (who waited for what), `grid` (ranks by steps, the largest wait of each cell, the
job over time), `starvation` (waits that come back), `summary` (in words and figures), `page`.
"""
