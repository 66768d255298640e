"""How wrong is `brigade plan`? Published runs, their programs, and the comparison of both."""
