"""Pages about plans, runs and documents: data in, one self-contained page out."""
