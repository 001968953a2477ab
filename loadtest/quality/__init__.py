"""Quality of each mode's text or pictures, by a judge, compared with human text or real pictures."""
