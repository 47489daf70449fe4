"""For files of this machine: writing one durably, mapping one, its version, and locks between processes."""
