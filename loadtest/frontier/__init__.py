"""The frontier: quality against seconds, a point for each mode and setting on each network.

`worth.py` reads what the text of each is worth, `measuring.py` takes the seconds in the emulated WAN, `costs.py` makes
the file that mode `auto` chooses from, `points.py` puts it together, `picture.py` draws it.
"""
