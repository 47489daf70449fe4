"""What `meshfeed demo` tells: a job that is killed and goes on under another layout, beside one that is not.

`story` is the straight line. `runs` starts ../train_gpt.py under torchrun; `far` feeds it from `storage`, a
slow server. `compare` decides whether the jobs agree; `page` and `far_page` draw them.
"""
