"""The layers of a Llama, each split over the tensor-parallel ranks."""
