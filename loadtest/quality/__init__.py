"""Quality of each mode's text or pictures, by a judge, beside human text or real pictures."""
