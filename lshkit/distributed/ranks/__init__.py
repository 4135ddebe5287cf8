"""Attention over a sequence whose rows are spread over the ranks of a torch process group."""
