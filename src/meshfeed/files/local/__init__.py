"""Files of this machine: reading one, writing one durably, mapping one, and locks between processes."""
