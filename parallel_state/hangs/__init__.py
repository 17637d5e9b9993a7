"""Ranks that wait for each other: the line of a call, the record of a rank's last calls, and the report of a hang."""
