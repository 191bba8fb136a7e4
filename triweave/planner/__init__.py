"""What a layout costs: memory, time, search, explanation."""
