"""The memory-bound operations of a Llama layer as Triton kernels, one operation a file.

Each reads its inputs from memory once and writes its outputs once, computes in float32 whatever the type, and rounds
once. Sums are taken in a fixed order: the same inputs give the same bits. The layers hold the same operations in plain
torch, for other devices; `dispatch` chooses. Entry points make their outputs and launch; on the meta device they only
make them, so that what they take of a GPU is counted by their own code, with neither GPU nor Triton.
"""
