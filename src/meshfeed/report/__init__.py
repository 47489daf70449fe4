"""Pictures of plans and runs: data in, one self-contained page out."""
