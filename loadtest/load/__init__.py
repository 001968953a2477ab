"""The load test: many users at once, every request accounted for, every text checked.

`run.py` is one load run, `knee.py` raises the users until latency gives way. The users themselves live in a process of
their own (`worker.py`, `crowd.py`), because locust lives on gevent, which would change this one.
"""
