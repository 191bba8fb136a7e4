"""How slices of the sequence get from one tensor-parallel rank to another while products are computed."""
