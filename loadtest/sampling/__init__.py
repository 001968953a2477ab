"""How a chain's text depends on its sampler: one variable changed at a time, in this process.

`variant.py` names what can be changed, `sampler.py` denoises many texts together, `study.py` scores them.
"""
