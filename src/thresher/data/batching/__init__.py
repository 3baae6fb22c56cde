"""Which pairs each step holds, and how ranks and micro-batches divide them."""
