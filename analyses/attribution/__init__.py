"""Which parts of a model and of its input a prediction comes from: what attention, gradients and ablation say of it."""
