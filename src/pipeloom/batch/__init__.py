"""A batch: containers of tensors, cut into micro-batches, merged again, and what its loss is."""
