"""Quality of each mode's text, as a panel of figures beside human text.

`prompts.py` cuts held-out text, `generation.py` asks a router for continuations, `panel.py` measures them, `run.py`
puts it together, `check.py` holds the panel itself against text that must lose.
"""
