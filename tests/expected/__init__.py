"""Expected values: what one process computes, for checks to compare with what the ranks have."""
