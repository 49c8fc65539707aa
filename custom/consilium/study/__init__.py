"""Define, check and run studies. A study is a grid of runs over methods, ranks, splits and seeds, in one file."""
