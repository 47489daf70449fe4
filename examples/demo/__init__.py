"""What `meshfeed demo` shows: a job that is killed and resumed under a different layout, and one that is not.

`story` is the straight line. `runs` starts ../train_gpt.py on every rank; `remote` feeds it from `storage`, a
slow server. `compare` decides whether the jobs agree; `page` and `remote_page` draw them.
"""
