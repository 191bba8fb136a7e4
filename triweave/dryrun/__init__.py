"""One rank of any layout without the others: its memory with no GPU, its computation on one."""
