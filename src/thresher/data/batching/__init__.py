"""Choose the pairs of each step and assign them to ranks and micro-batches."""
