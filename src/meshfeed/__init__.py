"""One virtual dataloader for every rank of an N-D-parallel training job."""
