"""What a run directory says: one HTML page of it (``report``), and a screen that refreshes (``top``).

Everything is read from the files that a run writes, without torch, Ray and the code of the run: a run that goes on, one
of another machine that shares the directory, and one whose model is not installed here.
"""
