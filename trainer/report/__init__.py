"""What a run directory says, as one HTML page: the verb ``report``.

Everything is read from the files that a run writes, without torch, Ray and the code of the run: a run that goes on, one
of another machine that shares the directory, and one whose model is not installed here.
"""
