"""The memory-bound operations of a Llama layer as Triton kernels, one operation a file.

Each reads its inputs from memory once and writes its outputs once, computes in float32 whatever the type, and rounds
once. Sums are taken in a fixed order: the same inputs give the same bits. The layers hold the same operations in plain
torch, for other devices; `dispatch` chooses. Only the layers import the other modules here, where they are used: Triton
need not be installed.
"""
